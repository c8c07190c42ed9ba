"""Checks of what credit functions, advantages, loss norms and losses return. What is wrong is refused in one sentence.

A first reading can skip it.
"""
import inspect
import math
from types import SimpleNamespace
from typing import Any, Callable

import torch
from torch import Tensor

from plumbing.files import require
from plumbing.metrics import TAKEN
from settings import Settings


def check_name(function: Any, name: str, taken: dict[str, Any]) -> None:
    """ValueError for what can't become a credit function of that name. taken: those that there are."""
    require(inspect.isfunction(function), "decorate a function made by def, once")
    again = name in taken and taken[name].function.__module__ == function.__module__ == "__main__"
    require(again or name not in taken,  # a notebook's cell may run again
            f"there are two credit functions named {name}: rename one of them")


def check_parameters(function: Any) -> None:
    """ValueError for a hyper-parameter of a credit function that can't become a flag: its default says the flag's type.
    """
    for p in list(inspect.signature(function.function).parameters.values())[1:]:  # the first is the batch
        require(type(p.default) in (bool, int, float, str),
                f"{function.name}: the parameter {p} can't become a flag; give it a bool, int, float or str as default")
        require(p.annotation in (p.empty, type(p.default)), f"{function.name}: the default of {p} is of another type, "
                "and the flag would get that: write 2.0, say, for a float of 2")


def required(function: Any, hyper_parameters: dict) -> tuple[str, ...]:
    """What a credit function needs of a run, with these hyper-parameters and the others at their defaults."""
    needs = function.needs(**function.parameters | hyper_parameters) if callable(function.needs) else function.needs
    require(isinstance(needs, tuple),
            f'{function.name}: needs must be a tuple of names, such as ("critic",), not {needs!r}')
    return needs


def checked(returned: Any, function: Any, batch: Any) -> Tensor:
    """The weights or credit (B, T) that a credit function returned, 0 on padding; ValueError where that is neither, or
    `own_numbers` refuses what it logs."""
    values = per_token(returned, batch, f"{function.name} must return {'weights' if function.is_reweighting else 'credit'}")
    batch.log = own_numbers(function.name, batch)
    require(not function.is_reweighting or (values >= 0).all(),
            f"{function.name} returned a negative weight: credit of either sign is for @token_credit")
    return values


class Grades(dict):
    """batch.grades: the numbers of the task's grade; ValueError for one that it does not return."""

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(f"batch.grades has no {name}: the grade of this task returns {', '.join(self)}")


def per_token(found: Any, batch: Any, duty: str) -> Tensor:
    """What a credit function made, a finite number for each token (B, T), of the advantage's type, on its device, 0 on
    padding; ValueError, which begins with its duty, for anything else."""
    shape, own = tuple(batch.mask.shape), tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    require(own == shape, f"{duty} of shape (B, T) = {shape}, not {own}")
    values = torch.where(batch.mask, found.to(batch.advantage), 0.0)  # (B, T)
    require(values.isfinite().all(), f"{duty} without NaN or infinity in it, which division by 0 gives; dividing by "
            "torch.where(x > 0, x, 1.0) instead of x avoids it")
    return values


def own_numbers(function: str, batch: Any) -> dict[str, Tensor]:
    """What a credit function put into batch.log; ValueError for what can be no column of the credit log."""
    require(isinstance(batch.log, dict), f"{function} replaces batch.log: write batch.log[name] = values")
    for name in batch.log:
        require(isinstance(name, str) and name.isidentifier() and name not in TAKEN,
                f"{function} logs {name!r:.50}: a name in batch.log has letters, digits and _, and is not taken")
    return {name: per_token(values, batch, f"{function} must log {name}") for name, values in batch.log.items()}


def check_pure(name: str, batch: Any, compute: Callable[[], Tensor]) -> Tensor:
    """What compute() returns; ValueError where it, the credit function `name`, asks for a number that the task's grade
    does not return, or writes into the batch, which others read."""
    batch.grades = Grades(batch.grades)
    before = {field: value.clone() for field, value in vars(batch).items() if isinstance(value, Tensor)}
    returned = compute()
    require(all(torch.equal(value, getattr(batch, field)) for field, value in before.items()),
            f"{name} changes a field of the batch: write x.exp() or x * y instead of x.exp_() or x *= y")
    return returned


def check_finite(found: Any, like: Tensor, must: str) -> Tensor:
    """What a function returned, as many numbers as `like` has, finite in float32, too; else ValueError. must: begins
    its sentence."""
    require(isinstance(found, Tensor) and found.shape == like.shape and found.float().isfinite().all(),
            f"{must} of {tuple(like.shape)} a finite number: is there a division by 0?")
    return found


def check_gradient(norm: float) -> None:
    """FloatingPointError where a gradient's norm is not finite."""
    if not math.isfinite(norm):
        raise FloatingPointError("the gradient is not finite: --lr or credit is too large, or --loss divides by 0")


def check_order(s: Settings, device: torch.device, advantage: Callable, norm: Callable, loss: Callable) -> None:
    """ValueError where the order of puzzles or responses matters to the function of --advantage or --loss_norm, or the
    rest of a micro-batch to that of --loss: 3 drawn responses to each of 2 puzzles tell. s: with --responses 3."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.rand(shape, dtype=torch.float64, generator=generator).to(device)
    reward, success = draw(6), torch.tensor([0, 1, 0.3, 0.8, 0, 1], dtype=torch.float64, device=device)  # (6,) unequal
    logprob, credit = -draw(6, 8).float(), draw(6, 8).float() - 0.5
    mask = torch.arange(8, device=device) < torch.tensor([[5], [1], [3], [4], [8], [2]], device=device)  # (6, 8)
    batch = lambda r, won: SimpleNamespace(puzzles=range(2), success=won, grades={"r": r, "won": won},
                                           parts={"r": 2, "won": 1})
    compare = lambda r, won: check_finite(advantage(r.view(2, 3), batch(r, won)), r.view(2, 3),
                                          f"--advantage {s.advantage} must give each response").flatten()
    share = lambda mask: check_finite(norm(mask, s), mask, f"--loss_norm {s.loss_norm} must give each token")
    gain = lambda *drawn: check_loss(loss(*drawn, s), drawn[3], s)[0].masked_fill(~drawn[3], 0)
    rows = torch.tensor([5, 3, 4, 1, 2, 0], device=device)  # the puzzles swapped, each one's responses in its own order
    same_elsewhere(f"--advantage {s.advantage}", compare, rows, reward, success)
    same_elsewhere(f"--loss_norm {s.loss_norm}", share, rows, mask)
    same_elsewhere(f"--loss {s.loss}", gain, rows[:4], logprob, logprob + credit.flip(0), credit, mask)


def same_elsewhere(flag: str, function: Callable, rows: Tensor, *drawn: Tensor) -> None:
    """ValueError where a function, unless it draws random numbers, gives some rows (m,) others alone than among all."""
    try:
        whole, again, part = function(*drawn), function(*drawn), function(*(x[rows] for x in drawn))
    except (AttributeError, KeyError):  # it reads what is not drawn here: the trial step has it
        return
    except (RuntimeError, IndexError) as error:  # such as shapes that don't fit each other
        raise ValueError(f"{flag} fails on 3 responses to each of 2 puzzles: {error}".splitlines()[0]) from error
    require(not torch.equal(whole, again) or torch.allclose(part, whole[rows], rtol=1e-4, atol=1e-6),
            f"{flag} gives a response another number when others stand elsewhere: is a mean over the wrong axis?")


def check_loss(found: Any, mask: Tensor, s: Settings) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What --loss returned: gain and clip (b, T), and the loss's own columns, {} where it has none; else ValueError."""
    shape = tuple(mask.shape)
    gain, stopped, *more = found if isinstance(found, tuple | list) and len(found) in (2, 3) else (None, None)
    own = more[0] if more else {}
    require(isinstance(own, dict) and all(isinstance(x, Tensor) and x.shape == shape
                                          for x in (gain, stopped, *own.values())),
            f"--loss {s.loss} must return two tensors of (b, T) = {shape}, gain and clip, and may add a dict of others")
    return gain, stopped, own
