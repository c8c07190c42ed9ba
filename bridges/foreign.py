"""A TokenBatch of responses that another trainer sampled: credit functions read it like one of rollout.py.

Nothing is decoded, and no model is run, before a credit function looks at it. A function sees only responses that can
be compared: those with a reward, whose groups are of one size. Where sizes differ, it is asked for each size.

Alphabet: B responses, G to each of Q prompts, T sampled tokens of the longest one. In the other trainer's tensors it
has C columns: what the environment said stands there between the sampled tokens.
"""
import inspect
import zlib
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Callable, Iterable, NamedTuple, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bridges import own_modules

with own_modules():
    from extras.turns import decode
    from grpo import ADVANTAGES
    from methods.credit_function import CreditFunction
    from methods.registry import CREDIT_FUNCTIONS
    from plumbing.checks import per_token, required
    from plumbing.files import require
    from plumbing.task_file import check_roles
    from plumbing.tokenizer import Tokenizer
    from rollout import TokenBatch, by_group, seed_of
    from sampler import Replies
    from tasks.math_task import calculations
    from tasks.text import roles, sentence_starts

FACTS, TEXTS = ("logprob", "entropy", "logit_grad"), ("text", "spans", "role", "in_answer")
# What credit functions ask for that no other trainer tells.
HERE_ALONE = {**dict.fromkeys(("vineppo", "turn_vine", "oracle"), "continuations"), "regrade_ablation": "a grader",
              "attention_credit": "attention", "causal_ablation": "log-probs with tokens hidden",
              "reward_decomposition": "a reward for layout"}
HINTS = {"reference": "set its beta or KL loss, or ", "a reward for layout": "name its function in format=, or "}


def no_grader(*_: Any) -> dict:
    """Stands for the task's grade."""
    raise ValueError("this credit function grades further texts, and responses from elsewhere have no grader: train "
                     "with a task, see docs/extend.md")


# What a task is to responses from elsewhere: what a text says by itself, but nothing that must be known of a puzzle.
TASK = SimpleNamespace(roles=roles, sentence_starts=sentence_starts, calculations=calculations, grade=no_grader,
                       show=lambda puzzle: "")


def read_tokenizer(theirs: Any) -> Tokenizer:
    """A tokenizer of transformers, as texts are read here."""
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return Tokenizer(folder)


def method_of(credit: Callable) -> Callable:
    """The function itself, also of a partial."""
    return getattr(credit, "func", credit)


def name_of(credit: Callable) -> str:
    """Its name."""
    return getattr(method_of(credit), "name", getattr(method_of(credit), "__name__", "credit"))


def identity(credit: Callable) -> dict[str, Any]:
    """What tells a credit function from another one: name, hyper-parameters, and a checksum of its source, if known."""
    method = method_of(credit)
    try:
        source = inspect.getsource(getattr(method, "function", method))
    except (OSError, TypeError):  # of an interpreter's prompt, or no function
        source = ""
    given = {**getattr(method, "parameters", {}), **getattr(credit, "keywords", {})}
    given = {name: x.item() if isinstance(x, np.generic) else x for name, x in given.items()}
    return {"name": name_of(credit), "parameters": {name: x for name, x in given.items()
                                                    if isinstance(x, bool | int | float | str)},
            "source": f"{zlib.crc32(source.encode()):08x}" if source else "unknown"}


def label(known: dict[str, Any]) -> str:
    """A function with its parameters in a few words, from its identity."""
    return " ".join([known["name"], *(f"{name}={x}" for name, x in known["parameters"].items())])


def find_credit(credit: str | Callable, task: Any, told: set[str], trainer: str, taken: Iterable[str] = ()) -> Callable:
    """The credit function of this name, or the given one; ValueError where it needs what the trainer can't tell.
    told: "reference", where the trainer has a reference model. taken: names that mean something else there."""
    found = CREDIT_FUNCTIONS.get(credit) if isinstance(credit, str) else credit
    first = str(credit).split()[:1]
    require(callable(found), f"give hyper-parameters as partial({first[0]}, name=value)" if {*first} & {*CREDIT_FUNCTIONS}
            else f"there is no credit function {credit!r:.50}: {', '.join(CREDIT_FUNCTIONS)}")
    method, given = method_of(found), getattr(found, "keywords", {})  # of a partial
    if isinstance(method, CreditFunction):
        require(given.keys() <= method.parameters.keys(), f"{method.name} takes no {', '.join(given)}: it has "
                f"{', '.join(method.parameters) or 'no hyper-parameters'}")
        clash = [name for name in method.parameters if name in taken and name not in getattr(credit, "keywords", {})]
        require(not clash, f"{method.name} has a hyper-parameter {', '.join(clash)}, which {trainer} calls something else: "
                "give it in a partial")
        of = given.get("of", method.parameters.get("of"))  # the other method that it turns around or averages
        told = told | ({"a grader"} if getattr(task, "grade", no_grader) is not no_grader else set())
        needs = *(HERE_ALONE[name] for name in (method.name, of) if name in HERE_ALONE), *required(method, given)
        lacks = [need for need in needs if need not in told and not hasattr(task, need)]
        hint = "".join(HINTS[need] for need in lacks if need in HINTS)
        require(not lacks, f"{method.name} needs {', '.join(lacks)}, which {trainer} does not offer: {hint}train with "
                f"train.py --mitigation {method.name}")
    return found


def at_least_0(entropy: Tensor) -> Tensor:
    """Entropy without what rounding takes it below 0."""
    return torch.where(entropy > -1e-3, entropy.clamp(min=0), entropy)


class Layout(NamedTuple):
    """Responses as TokenBatch has them, of sampled tokens alone; and where these stand in the other trainer's."""

    tokens: Tensor  # (B, T)
    mask: Tensor  # (B, T) bool
    before: Replies
    columns: Tensor  # (B, C) bool, True on sampled tokens

    def compact(self, values: Tensor) -> Tensor:
        """The other trainer's values (B, C) of the sampled tokens: (B, T), 0 on padding."""
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values[self.columns])

    def spread(self, values: Tensor) -> Tensor:
        """The reverse: values (B, T) in the other trainer's columns, (B, C), 0 elsewhere.

        >>> own = layout([[5, 8, 8, 6]], [[1, 0, 0, 1]])  # the policy said 5 and 6, the environment 8 8
        >>> own.tokens.tolist(), own.before, own.spread(torch.tensor([[0.5, 2.0]])).tolist()
        ([[5, 6]], ({1: [8, 8]},), [[0.5, 0.0, 0.0, 2.0]])
        """
        return values.new_zeros(self.columns.shape).masked_scatter(self.columns, values[self.mask])


def layout(responses: Sequence[list[int]], sampled: Sequence[list] | None = None, C: int = 0,
           device: Any = "cpu") -> Layout:
    """The layout of B responses without padding. sampled: 1 for each token of the policy's; None: all are."""
    sampled = [[1] * len(row) for row in responses] if sampled is None else sampled
    own, before = [[] for _ in responses], tuple({} for _ in responses)  # the replies are named by the token behind
    for i, (row, marks) in enumerate(zip(responses, sampled, strict=True)):
        for token, mine in zip(row, marks, strict=True):
            (own[i] if mine else before[i].setdefault(len(own[i]), [])).append(token)
    pad = lambda rows: pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True).to(device)
    columns = pad(sampled)  # (B, the longest)
    return Layout(pad(own), pad([[1] * len(row) for row in own]).bool(), before,
                  F.pad(columns, (0, max(C - columns.shape[1], 0))).bool())


class Abstained(Exception):
    """A credit function looked at what is not known of some responses, `rows` (n,)."""

    def __init__(self, rows: Tensor):
        self.rows = rows


class ForeignBatch(TokenBatch):
    """B responses with their puzzles and prompts, B each, in any order; group (B,) says which are compared. A reward, a
    success or a format that nobody found is NaN. read(name) returns {name: value, and perhaps others}, of FACTS, (B, T)
    each, or of the tokenizer: it is called when a credit function looks at one of them. asks: makes batch.ask of a
    part and its rows."""

    def __init__(self, own: Layout, read: Callable[[str], dict[str, Any]], grades: dict[str, Tensor], success: Tensor,
                 group: Sequence, puzzles: Sequence, prompts: Sequence, asks: Callable | None = None, **known: Any):
        B, device = len(own.tokens), own.tokens.device
        first = {name: i for i, name in reversed([*enumerate(group)])}  # the first row of each group
        number = {name: q for q, name in enumerate(sorted(first, key=first.get))}
        usual = {"task": TASK, "format": torch.full((B,), torch.nan, device=device), "parts": {"reward": 1.0},
                 "ask": None, "advantage": None, "log": {}}
        vars(self).update(usual | known, tokens=own.tokens, mask=own.mask, before=own.before, read=read, grades=grades,
                          reward=grades["reward"], success=success.float(), puzzles=tuple(puzzles[first[q]] for q in number),
                          prompts=tuple(prompts[first[q]] for q in number), asks=asks,
                          group=torch.tensor([number[name] for name in group], device=device))

    def __getattr__(self, name: str) -> Any:
        """A field that is looked at for the first time."""
        if name in vars(self).get("partly", {}):
            raise Abstained(self.partly[name])  # the rows of which it is not known
        if name not in (*FACTS, *TEXTS, "tokenizer", "ended"):
            raise AttributeError(f"a batch from another trainer has no {name}")
        found = self.described() if name in TEXTS else self.read(name)
        require(name in found, f"this trainer does not tell batch.{name}: train with train.py")
        vars(self).update(found)
        return found[name]

    def described(self) -> dict[str, Any]:
        """The fields TEXTS."""
        own = [row[mask].tolist() for row, mask in zip(self.tokens, self.mask)]  # B
        text, spans, _ = zip(*[decode(self, row, said) for row, said in zip(own, self.before)])  # B each
        nothing = np.zeros(0, int), np.zeros(0, bool)  # of a row that fills a batch
        found = [check_roles(self.task.roles(*it), len(row)) if row else nothing for *it, row in zip(text, spans, own)]
        role, in_answer = (pad_sequence([torch.from_numpy(x) for x in rows], batch_first=True).to(self.mask.device)
                           for rows in zip(*found))  # (B, T) each
        return {"text": text, "spans": tuple(map(tuple, spans)), "role": role.to(torch.int8), "in_answer": in_answer}

    def part(self, rows: Tensor) -> "ForeignBatch":
        """The batch of some of the responses (b,), whose groups are of one size and side by side."""
        at = rows.tolist()
        of = lambda x: x[rows] if isinstance(x, Tensor) else tuple(x[i] for i in at)
        known = {name: of(getattr(self, name)) for name in ("format", "ended", "advantage")
                 if vars(self).get(name) is not None}
        read = lambda name: {name: (lambda x: x if name == "tokenizer" else of(x))(getattr(self, name))}
        group = self.group[rows].tolist()
        part = ForeignBatch(
            Layout(self.tokens[rows], self.mask[rows], of(self.before), None), read,
            {name: x[rows] for name, x in self.grades.items()}, self.success[rows], group,
            *([x[q] for q in group] for x in (self.puzzles, self.prompts)),
            task=self.task, parts=self.parts, normalize=self.normalize, **known)
        part.described = lambda: {name: of(getattr(self, name)) for name in TEXTS}
        part.ask = self.asks(part, rows) if self.asks else None
        part.partly = {name: rows[x.isnan()] for name in ("success", "format")
                       if (x := getattr(part, name)).isnan().any() and not getattr(self, name).isnan().all()}
        for name in part.partly:
            del vars(part)[name]
        return part


def by_size(group: Tensor, known: Tensor, least: int = 2) -> list[Tensor]:
    """Rows (b,) of groups of one size, side by side, for each size from the least one on; of responses that are known
    (B,)."""
    rows = known.nonzero()[:, 0]  # (n,)
    rows = rows[group[rows].argsort(stable=True)]
    size = group[rows].bincount(minlength=1)[group[rows]]  # (n,) that of its row's group
    return [rows[size == n] for n in size.unique().tolist() if n >= least]


def compared(batch: ForeignBatch, name: str, parts: list[tuple[Tensor, ForeignBatch]]) -> Tensor:
    """The advantages (B,) of a batch's parts, by a function of --advantage; 0 elsewhere. A part of the reward is compared
    among those that have it."""
    found, all_rows = torch.zeros_like(batch.reward), torch.cat([rows for rows, _ in parts])  # (B,), (n,)
    if name == "step_mean":
        found[all_rows] = ADVANTAGES[name](batch.reward[all_rows][None], batch)[0]
    elif name == "gdpo":
        for kind, weight in batch.parts.items():
            known = torch.zeros_like(found).index_fill(0, all_rows, 1) * ~batch.grades[kind].isnan()  # (B,)
            for rows in by_size(batch.group, known > 0):
                Q = len(batch.group[rows].unique())
                found[rows] += weight * ADVANTAGES["grpo"](batch.grades[kind][rows].view(Q, -1), batch).flatten()
        found /= found[all_rows].square().mean().sqrt() + 1e-4
    else:
        for rows, part in parts:
            found[rows] = ADVANTAGES[name](by_group(part, part.reward), part).flatten()
    return found.float()


def assign_credit(batch: ForeignBatch, credit: Callable, step: int, advantage: str = "theirs") -> Tensor:
    """The credit (B, T) of a batch's tokens, and batch.advantage, of `theirs` or of ours; 0 for the batch.left_out
    responses that nothing is compared with. ValueError, with step and function, where it is no finite number."""
    own = batch.mask.any(1)  # (B,) with a token of the policy's: verl's padding has none
    known = own & ~batch.reward.isnan()  # (B,)
    # What the trainer gives a response that is compared with none, such as by the whole step, `none` must keep. And a
    # trainer may have no groups at all.
    alone = getattr(method_of(credit), "from_advantage", False) or batch.group.bincount().max() == 1
    least = 1 if advantage == "theirs" and alone else 2
    while True:
        parts = [(rows, batch.part(rows)) for rows in by_size(batch.group, known, least)]
        found, batch.log = torch.zeros(batch.mask.shape, device=known.device), {}
        batch.left_out = int(own.sum()) - sum(len(rows) for rows, _ in parts)
        try:
            if advantage != "theirs":
                batch.advantage = compared(batch, advantage, parts) if parts else found[:, 0]
            for rows, part in parts:
                part.advantage = batch.advantage[rows]
                found[rows] = credit_of_part(part, credit, step).to(found)
                for name, values in part.log.items():
                    batch.log.setdefault(name, torch.zeros_like(found))[rows] = values.to(found)
            return found
        except Abstained as unknown:
            known[unknown.rows] = False


def credit_of_part(part: ForeignBatch, credit: Callable, step: int) -> Tensor:
    """The credit (b, T) of a part's tokens."""
    name = name_of(credit)
    try:
        with torch.no_grad():
            return per_token(credit(part), part, f"{name} must return credit")
    except ValueError as error:
        raise ValueError(f"step {step}, credit function {name}: {error}") from error


class Asked:
    """batch.ask of a part and its rows: random numbers, and what else the trainer tells, `known` by name."""

    def __init__(self, seed: int, step: int, rows: Tensor, **known: Callable[[], Tensor]):
        self.generator = lambda name: torch.Generator().manual_seed(seed_of(name, seed, step))  # as in Queries
        self.rows, self.known = rows, known

    def __getattr__(self, name: str) -> Tensor:
        """What a credit function asks for."""
        known = vars(self).get("known", {})
        require(name in known, f"batch.ask.{name} is not told by this trainer: train with train.py")
        return known[name]()[self.rows]
