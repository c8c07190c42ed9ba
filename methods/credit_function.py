"""What a decorator makes of a credit function, and the list of all: the machinery behind mitigations.py.

A first reading can skip it: mitigations.py shows what to write.
"""
import inspect
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from plumbing.checks import check_name, checked
from rollout import TokenBatch


@dataclass(frozen=True)
class CreditFunction:
    """A credit function with what a run must know of it. It is called as before, and returns credit (B, T)."""

    name: str  # of --mitigation
    function: Callable[..., Tensor]  # as it was written
    reweight: Callable | None  # makes credit of the weights that a reweighting returns; None: it returns credit
    from_advantage: bool  # whether it reads batch.advantage: only then --advantage has an effect
    needs: tuple[str, ...] | Callable  # what a run must provide; where that depends on flags, a function of these

    @property
    def is_reweighting(self) -> bool:
        """Whether it returns weights."""
        return self.reweight is not None

    def __call__(self, batch: TokenBatch, /, *arguments, **hyper_parameters) -> Tensor:
        """Credit (B, T), 0 on padding."""
        returned = self.raw(batch, *arguments, **hyper_parameters)  # (B, T)
        return self.reweight(batch, returned) if self.reweight else returned

    def raw(self, batch: TokenBatch, /, *arguments, **hyper_parameters) -> Tensor:
        """The weights or credit (B, T) that the function returns, checked, and 0 on padding."""
        return checked(self.function(batch, *arguments, **hyper_parameters), self, batch)

    @property
    def summary(self) -> str:
        """The first paragraph of the function's docstring."""
        document = inspect.getdoc(self.function) or "no docstring yet"
        return " ".join(document.split("\n\n")[0].split())

    @property
    def parameters(self) -> dict[str, bool | int | float | str]:
        """The hyper-parameters and their defaults, read from the function's signature."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}


CREDIT_FUNCTIONS: dict[str, CreditFunction] = {}  # by name; importing methods/registry.py completes it


def register(function: Callable | None, reweight: Callable | None, **properties) -> Callable:
    """The CreditFunction of a function, which CREDIT_FUNCTIONS has by its name from now on."""
    if function is None:  # @reweighting(needs=...) is called before it gets the function
        return lambda function: register(function, reweight, **properties)
    name = getattr(function, "__name__", "")
    check_name(function, name, CREDIT_FUNCTIONS)
    CREDIT_FUNCTIONS[name] = CreditFunction(name, function, reweight, **properties)
    return CREDIT_FUNCTIONS[name]


def token_credit(function: Callable | None = None, *, from_advantage: bool = False,
                 needs: tuple[str, ...] | Callable = ()) -> Callable:
    """Decorator for a function that returns the credit (B, T) itself. What it returns on padding is set to 0.

    It is called as before, and its result is checked. CREDIT_FUNCTIONS has it by its name. from_advantage=True says
    that it reads batch.advantage: only then does train.py take --advantage and --shaping. needs: what it asks for
    beyond the batch, see `reweighting` of mitigations.py.
    """
    return register(function, None, from_advantage=from_advantage, needs=needs)


def z_score(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """(x - mean) / (std + 1e-4) of values x (..., n, T), over the last two dimensions and mask; 0 outside mask.

    In double, where the mean of equal float32 values is that value exactly, and their z-score 0.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    count = mask.sum((-2, -1), keepdim=True).clamp(min=1)  # (..., 1, 1)
    total = torch.where(mask, values.double(), 0.0).sum((-2, -1), keepdim=True)  # (..., 1, 1)
    deviation = torch.where(mask, values - total / count, 0.0)  # (..., n, T)
    std = ((deviation**2).sum((-2, -1), keepdim=True) / count).sqrt()  # (..., 1, 1)
    return (deviation / (std + 1e-4)).to(values)
