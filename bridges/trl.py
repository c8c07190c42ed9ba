"""TRL's GRPOTrainer, whose tokens get the credit of a function of mitigations.py, of methods/, or of your own.

    from bridges.trl import CreditTrainer
    trainer = CreditTrainer(model, reward_funcs, args=config, train_dataset=data, credit="entropy_ratio")

TRL samples, grades, compares and updates, with all that it has for that; `credit` takes the place of its advantages.
The function gets the whole step: the responses of all processes that were sampled together. It works with TRL 1.9 to
1.16, and stands on four of its private methods.
"""
import json
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Callable, Iterator
from uuid import uuid4

import torch
import trl
from accelerate.utils import gather_object
from packaging.version import Version
from torch import Tensor
from torch.nn import Module
from transformers import TrainingArguments
from transformers.trainer_callback import ExportableState, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils

from bridges import own_modules
from bridges.foreign import (TASK, Asked, ForeignBatch, Layout, assign_credit, at_least_0, find_credit, identity, layout,
                             read_tokenizer)

with own_modules():
    from grpo import ADVANTAGES
    from methods.registry import CREDIT_FUNCTIONS
    from mitigations import NORMALIZATIONS, reweighting, token_credit  # noqa: F401  for a function in a script
    from plumbing.files import require
    from plumbing.tokenizer import Tokenizer
    from rollout import TokenBatch  # noqa: F401  for a function in a script

# In TRL's batch; all else are a multimodal model's inputs.
KNOWN = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch",
         "old_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps", "ref_per_token_logps",
         "tool_mask"}
add_fused_lm_head = getattr(utils, "add_fused_lm_head", None)
globals().update(CREDIT_FUNCTIONS)  # so that a script can import one by name: partial(token_type, filler=0.3)
OLDEST, NEWEST = "1.9", "1.16"  # releases of TRL that it was tried with
SQUARES = "log_sum_sq_probs"  # log sum p^2 of a token's distribution, by the head that TRL has since 1.15


@contextmanager
def squares_of(model: Module, C: int, temperature: float, ask: bool) -> Iterator[list]:
    """Inside, a list gets log sum p^2 at each of the last C tokens that the model reads, (b, C), if it is asked for."""
    found: list[Tensor] = []

    def keep(module: Module, inputs: Any, outputs: Any) -> None:
        if (square := getattr(outputs, SQUARES, None)) is None and getattr(outputs, "logits", None) is not None:
            square = (2 * (outputs.logits[:, :-1].float() / temperature).log_softmax(-1)).logsumexp(-1)
        found.extend([] if square is None else [square[:, -C:].float()])
    hook = model.register_forward_hook(keep) if ask else None
    yield found
    if hook:
        hook.remove()


def size_at_logits(logprob: Tensor, square: Tensor) -> Tensor:
    """||onehot - p|| from log p of the token and log sum p^2, (b, C) each."""
    rest = -logprob.expm1()  # the probability of all other tokens, and the sum of its squares:
    others = (square.exp() - logprob.exp() ** 2).clamp(min=0).minimum(rest**2)
    return torch.hypot(rest, others.sqrt())


def distinct(names: list[str]) -> list[str]:
    """The names of reward functions, with a mark where one comes again, or is that of the whole reward.

    >>> distinct(["right", "reward", "right"])
    ["right", "reward'", "right'"]
    """
    found = ["reward"]
    for name in names:
        while name in found:
            name += "'"
        found.append(name)
    return found[1:]


class Row(dict):
    """A row of the dataset, for batch.puzzles: its columns are attributes, too, as of a puzzle of train.py."""

    def __getattr__(self, name: str) -> Any:
        """A column."""
        if name not in self:
            raise AttributeError(f"the dataset has no column {name}, but {', '.join(self)}")
        return self[name]


class CreditRecord(TrainerCallback, ExportableState):
    """Says at the start, and in trainer_state.json, which credit a run is trained with; and at a resume, if another."""

    def __init__(self, record: dict):
        self.record = record  # what `identity` says, and the run's name

    def state(self) -> dict:
        """What is saved with a checkpoint."""
        return {"args": {}, "attributes": {"record": self.record}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A resumed run keeps its name."""
        before = state.stateful_callbacks.get("CreditRecord", self.state())["attributes"]["record"]
        other = {name: x for name, x in before.items() if name != "run" and x != self.record.get(name)}
        self.record["run"] = before["run"]
        if state.is_world_process_zero:
            print("credit: " + json.dumps(self.record), flush=True)
            if other:
                print(f"the run was begun with another credit: {json.dumps(other)}", flush=True)


class CreditTrainer(GRPOTrainer):
    """GRPOTrainer, in which `credit` says what each token gets.

    credit: the name of a credit function, or a function of the batch, such as partial(surprise, power=0.5).
    advantage: TRL's own ("theirs"), or a name of --advantage. normalize: see --normalize.
    success: a response succeeds if its reward is above this number or, of a name, what that reward function returns.
    format: the name of the reward function that pays for layout. task: has `roles` and the like for the data's rows.
    """

    def __init__(self, *arguments: Any, credit: str | Callable = "none", advantage: str = "theirs",
                 success: float | str = 0.5, format: str = "", normalize: str = "response", task: Any = TASK,
                 **options: Any):
        require(Version(OLDEST) <= Version(Version(trl.__version__).base_version) < Version(f"{NEWEST}.999"),
                f"CreditTrainer was tried with TRL {OLDEST} to {NEWEST}, and this is {trl.__version__}")
        for given in (*arguments, *options.values()):
            require(not isinstance(given, TrainingArguments) or isinstance(given, GRPOConfig),
                    f"CreditTrainer is a GRPOTrainer: its args are a GRPOConfig, not a {type(given).__name__}")
        super().__init__(*arguments, **options)
        told = {name for name, given in (("reference", self.beta), ("a reward for layout", format)) if given}
        self.credit = find_credit(credit, task, told, "TRL's trainer")
        require(self.importance_sampling_level == "token" or self.credit is CREDIT_FUNCTIONS["none"],
                "with importance_sampling_level='sequence' TRL gives all tokens of a response the mean of their "
                "credit: leave it at 'token'")
        require(advantage in ("theirs", *ADVANTAGES), f"advantage={advantage!r} is none of theirs, "
                f"{', '.join(ADVANTAGES)}")
        require(normalize in NORMALIZATIONS, f"normalize={normalize!r} is none of {', '.join(NORMALIZATIONS)}")
        for name in filter(None, (success, format)):
            require(not isinstance(name, str) or self.reward_func_names.count(name) == 1,
                    f"there is not one reward function {name!r}, but {', '.join(self.reward_func_names)}")
        self.advantage, self.success, self.format, self.normalize = advantage, success, format, normalize
        self.task, self.squares_are_asked, self.told = task, False, set()
        self.passes: list[tuple] | None = None  # what each of TRL's own over a batch found; None where it is not watched
        self.record = identity(self.credit) | {
            "advantage": advantage, "normalize": normalize, "success": success, "format": format,
            "run": gather_object([uuid4().hex[:8]])[0]}
        self.add_callback(CreditRecord(self.record))

    @cached_property
    def reader(self) -> Tokenizer:
        """The tokenizer, as texts are read here."""
        return read_tokenizer(self._tokenizer)

    # ------------------------------------------------------------------------------- what TRL says on the way

    def _generate(self, prompts: list) -> tuple:
        self.generated = super()._generate(prompts)  # tokens without padding, of this process
        return self.generated

    def _calculate_rewards(self, *arguments: Any) -> Tensor:
        self.parts = super()._calculate_rewards(*arguments)  # (B, R) of all processes
        return self.parts

    def _get_per_token_logps_and_entropies(self, model: Any, *inputs: Any, **options: Any) -> tuple:
        if self.passes is None or model is not self.model:
            return super()._get_per_token_logps_and_entropies(model, *inputs, **options)
        found = self.read(*inputs, **options)
        self.passes.append(found)
        logprob, entropy, *rest = found[0]
        return logprob, entropy if options.get("compute_entropy") else None, *rest

    def read(self, ids: Tensor, mask: Tensor, C: int, *inputs: Any, **options: Any) -> tuple[tuple, list]:
        """What TRL finds of the last C tokens of texts: log p and entropy, (b, C) each, and more; and log sum p^2, if it
        is asked for, (b, C) in parts."""
        model = self.accelerator.unwrap_model(self.model)
        with squares_of(model, C, self.temperature, self.squares_are_asked) as squares:
            found = super()._get_per_token_logps_and_entropies(self.model, ids, mask, C, *inputs,
                                                               **options | {"compute_entropy": True})
        return found, squares

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        """TRL's batch of this process's responses, with credit (b, C) as advantages; of an evaluation TRL's own."""
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self.passes = []
        output = super()._generate_and_score_completions(inputs)
        # The first pass was the policy's, if TRL made that at all. One with masked responses tells nothing of these.
        told = "old_per_token_logps" in output and not self.mask_truncated_completions
        seen, self.passes = self.passes[0] if told else None, None
        credit = self.assign(inputs, output, seen)  # (b, C)
        # Of whole responses only `none` is let through, whose credit is TRL's own advantage, but for rounding.
        return output | ({"advantages": credit} if self.importance_sampling_level == "token" else {})

    # ------------------------------------------------------------------------------- the batch and its credit

    @torch.no_grad()
    def assign(self, inputs: list, output: dict, seen: tuple | None) -> Tensor:
        """The credit (b, C) of this process's responses. Each process computes that of all B: groups may span them."""
        own = layout(*self.generated[1:3], output["completion_ids"].shape[1], self.accelerator.device)
        self.batch, step = self.gathered(inputs, output, seen, own), self.state.global_step + 1
        credit = assign_credit(self.batch, self.credit, step, self.advantage)  # (B, T)
        self.tell(credit)
        return own.spread(self.mine(credit)[:, : own.mask.shape[1]])

    def tell(self, credit: Tensor) -> None:
        """Log what the credit (B, T) is, and say at first what follows from it."""
        batch, log = self.batch, self._metrics["train"]
        paid, size = credit[batch.mask], credit[batch.mask].abs()  # (n,) each
        top = size.topk(-(-len(size) // 10)).values.sum() / size.sum().clamp(min=1e-30)
        found = {"mean": paid.mean(), "std": paid.std(), "top_tenth": top, "left_out": batch.left_out}
        if "logprob" in vars(batch):  # 1 - p is about the size of a token's gradient at the logits
            unsure = -batch.logprob[batch.mask].expm1()  # (n,)
            usual = batch.advantage[:, None].expand_as(credit)[batch.mask]  # (n,)
            if (length := (usual * unsure).norm()) > 0:
                found["grad_ratio"] = (paid * unsure).norm() / length
        for name, value in found.items():
            log[f"credit/{name}"].append(float(value))
        if self.accelerator.is_main_process:
            self.say_once("left_out", bool(batch.left_out), f"{batch.left_out} of {len(credit)} responses get no credit, as "
                          "they have no reward, or nothing to compare it with (credit/left_out in the logs)")
            ratio = float(found.get("grad_ratio", 1))
            self.say_once("grad_ratio", not 0.8 < ratio < 1.25, f"the gradient is about {ratio:.2g} times as long as with a "
                          "response's advantage on all its tokens: AdamW undoes that, at the same learning_rate, but "
                          f"max_grad_norm clips as often as before at {ratio * self.args.max_grad_norm:.2g}")

    def say_once(self, what: str, true: bool, sentence: str) -> None:
        """Print a sentence the first time that it is true."""
        if true and what not in self.told:
            self.told.add(what)
            print(sentence, flush=True)

    def log(self, logs: dict[str, float], *rest: Any) -> None:
        """TRL's, and whether the gradient was clipped."""
        if "grad_norm" in logs:
            logs["credit/clipped"] = float(float(logs["grad_norm"]) > self.args.max_grad_norm > 0)
        super().log(logs, *rest)

    def ends(self) -> set[int]:
        """The tokens that end a response."""
        ends = getattr(self, "eos_token_ids", [self._tokenizer.eos_token_id])  # before 1.15 TRL knew of one
        return {*ends, self._tokenizer.pad_token_id}

    def mine(self, values: Any) -> Any:
        """Those of this process, of values of all B responses."""
        b = len(self.generated[1])
        return values[self.accelerator.process_index * b :][:b]

    def everyone(self, x: Tensor) -> Tensor:
        """Values (b,) or (b, T) of the responses of all processes, (B,) or (B, T)."""
        wide = self.accelerator.pad_across_processes(x, dim=1) if x.dim() > 1 else x
        return self.accelerator.gather(wide)

    def gathered(self, inputs: list, output: dict, seen: tuple | None, own: Layout) -> ForeignBatch:
        """The batch of all B responses."""
        (prompts, ids), ends = self.generated[:2], self.ends()
        rows = gather_object([(prompt, said, Row({name: x for name, x in row.items() if "image" not in name}))
                              for prompt, said, row in zip(prompts, own.before, inputs)])  # B

        def read(name: str) -> dict[str, Any]:
            if name == "tokenizer":
                return {name: self.reader}
            return {name: self.everyone(own.compact(x)) for name, x in self.facts(output, name, seen).items()}

        everywhere = own._replace(tokens=self.everyone(own.tokens), mask=self.everyone(own.mask.int()).bool(),
                                  before=tuple(said for _, said, _ in rows))
        parts = dict(zip(self.reward_func_names, self.parts.double().T))  # (B,) each, for success and format
        weights = dict(zip(distinct(self.reward_func_names), self.reward_weights.tolist()))
        grades = dict(zip(weights, self.parts.double().T))
        paid = (self.parts.double() * self.reward_weights.to(self.parts).double()).nansum(1)  # (B,)
        grades["reward"] = paid.masked_fill(self.parts.isnan().all(1), torch.nan)  # as TRL takes it
        success = parts[self.success] if isinstance(self.success, str) else grades["reward"] > self.success
        ended = torch.tensor([int(row[-1] in ends) for row in ids], device=own.mask.device)  # (b,)
        ref = {"reference_logprob": lambda: self.everyone(own.compact(output["ref_per_token_logps"].float()))}
        batch = ForeignBatch(
            everywhere, read, grades, success, [i // self.num_generations for i in range(len(rows))],
            puzzles=[row for *_, row in rows], prompts=[prompt for prompt, *_ in rows],
            asks=lambda part, of: Asked(self.args.seed, self.state.global_step + 1, of, **(ref if self.beta else {})),
            parts=weights, ended=self.everyone(ended).bool(), task=self.task, normalize=self.normalize,
            **({"format": parts[self.format].float()} if self.format else {}))
        batch.advantage = self.everyone(output["advantages"])  # (B,)
        return batch

    def facts(self, output: dict, asked: str, seen: tuple | None) -> dict[str, Tensor]:
        """FACTS (b, C) of this process's responses: what TRL's own pass over them has found, or one more."""
        if asked == "logit_grad" and not self.squares_are_asked:
            self.ask_for_squares()
        tokens = output["completion_ids"]  # (b, C)
        if not seen or asked == "logit_grad" and not seen[1]:
            length = torch.tensor([[len(row)] for row in self.generated[1]], device=tokens.device)  # (b, 1)
            real = torch.arange(tokens.shape[1], device=tokens.device) < length  # (b, C) also of one that TRL masks
            seen = self.read(
                torch.cat((output["prompt_ids"], tokens), 1),
                torch.cat((output["prompt_mask"], real.to(output["prompt_mask"])), 1), tokens.shape[1],
                batch_size=self.args.per_device_train_batch_size,
                **{name: x for name, x in output.items() if name not in KNOWN})
        (logprob, entropy, *_), squares = seen
        found = {"logprob": logprob.float()}
        if entropy is not None:  # as of a patched method that finds none
            found["entropy"] = at_least_0(entropy.float())
        return found | ({"logit_grad": size_at_logits(found["logprob"], torch.cat(squares))} if squares else {})

    def ask_for_squares(self) -> None:
        """From now on a pass finds log sum p^2, too: by TRL's head, or, before 1.15, by the logits."""
        self.squares_are_asked = True
        if add_fused_lm_head:
            model = self.accelerator.unwrap_model(self.model)
            add_fused_lm_head(model.get_base_model() if hasattr(model, "peft_config") else model, self.temperature,
                              self.args.cast_lm_head_to_fp32, ("log_probs", "entropy", SQUARES))
