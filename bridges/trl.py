"""TRL's GRPOTrainer, whose tokens get the credit of a function of mitigations.py, of methods/, or of your own.

    from bridges.trl import CreditTrainer
    trainer = CreditTrainer(model, reward_funcs, args=config, train_dataset=data, credit="entropy_ratio")

TRL samples, grades, compares and updates, with all that it has for that; `credit` takes the place of its advantages.
The function gets the whole step: the responses of all processes that were sampled together. It was written for
trl==1.16.0, and stands on four of its private methods.
"""
from functools import cached_property
from tempfile import TemporaryDirectory
from typing import Any, Callable

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from bridges import own_modules
from bridges.foreign import TASK, Asked, ForeignBatch, Layout, assign_credit, find_credit, layout

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
globals().update(CREDIT_FUNCTIONS)  # so that a script can import one by name: partial(token_type, filler=0.3)
HEAD = ("log_probs", "entropy", "log_sum_sq_probs")  # what TRL's head can tell of a token; the last one if asked


def watched(model: Callable, seen: list) -> Callable:
    """A model that keeps in `seen` what TRL's head says of the tokens it reads."""
    def read(**inputs: Any) -> Any:
        outputs = model(**inputs)
        seen.append([getattr(outputs, name) for name in HEAD])
        return outputs
    return read


def facts_of(seen: list, C: int) -> dict[str, Tensor]:
    """FACTS of the last C tokens, (b, C) each, but for the logit gradient where the head was not asked for it."""
    logprob, entropy, square = (None if x[0] is None else torch.cat(x)[:, -C:].float() for x in zip(*seen))
    found = {"logprob": logprob, "entropy": entropy.clamp(min=0)}  # rounding takes it below 0
    if square is None:  # log sum p^2
        return found
    rest = -logprob.expm1()  # the probability of all other tokens, and the sum of its squares:
    others = (square.exp() - logprob.exp() ** 2).clamp(min=0).minimum(rest**2)
    return found | {"logit_grad": torch.hypot(rest, others.sqrt())}


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
            require(not isinstance(name, str) or name in self.reward_func_names,
                    f"there is no reward function {name!r}, but {', '.join(self.reward_func_names)}")
        self.advantage, self.success, self.format, self.normalize = advantage, success, format, normalize
        self.task, self.head_is_asked = task, False
        self.passes: list[list] | None = None  # what each of TRL's own over a batch saw; None where it is not watched

    @cached_property
    def reader(self) -> Tokenizer:
        """The tokenizer, as texts are read here."""
        with TemporaryDirectory() as folder:
            self._tokenizer.save_pretrained(folder)
            return Tokenizer(folder)

    # ------------------------------------------------------------------------------- what TRL says on the way

    def _generate(self, prompts: list) -> tuple:
        self.generated = super()._generate(prompts)  # tokens without padding, of this process
        return self.generated

    def _calculate_rewards(self, *arguments: Any) -> Tensor:
        self.parts = super()._calculate_rewards(*arguments)  # (B, R) of all processes
        return self.parts

    def _get_per_token_logps_and_entropies(self, model: Any, *inputs: Any, **options: Any) -> tuple:
        if self.passes is not None and model is self.model:
            self.passes.append([])
            model = watched(model, self.passes[-1])
        return super()._get_per_token_logps_and_entropies(model, *inputs, **options)

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        """TRL's batch of this process's responses, with credit (b, C) as advantages; of an evaluation TRL's own."""
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self.passes = []
        output = super()._generate_and_score_completions(inputs)
        # The first pass was the policy's, if TRL made that at all. One with masked responses tells nothing of these.
        told = "old_per_token_logps" in output and not self.mask_truncated_completions
        seen, self.passes = self.passes[0] if told else [], None
        credit = self.assign(inputs, output, seen)  # (b, C)
        # Of whole responses only `none` is let through, whose credit is TRL's own advantage, but for rounding.
        return output | ({"advantages": credit} if self.importance_sampling_level == "token" else {})

    # ------------------------------------------------------------------------------- the batch and its credit

    @torch.no_grad()
    def assign(self, inputs: list, output: dict, seen: list) -> Tensor:
        """The credit (b, C) of this process's responses. Each process computes that of all B: groups may span them."""
        own = layout(*self.generated[1:3], output["completion_ids"].shape[1], self.accelerator.device)
        self.batch, step = self.gathered(inputs, output, seen, own), self.state.global_step + 1
        credit = assign_credit(self.batch, self.credit, step, self.advantage)  # (B, T)
        self.tell(credit)
        return own.spread(self.mine(credit)[:, : own.mask.shape[1]])

    def tell(self, credit: Tensor) -> None:
        """Log what the credit (B, T) is, and say once that some responses have none."""
        paid, left_out, log = credit[self.batch.mask], self.batch.left_out, self._metrics["train"]
        for name, value in (("mean", paid.mean()), ("std", paid.std()), ("left_out", left_out)):
            log[f"credit/{name}"].append(float(value))
        if left_out and not any(log["credit/left_out"][:-1]) and self.accelerator.is_main_process:
            print(f"{left_out} of {len(credit)} responses get no credit, as they have no reward, or nothing to compare it "
                  "with (credit/left_out in the logs)", flush=True)

    def mine(self, values: Any) -> Any:
        """Those of this process, of values of all B responses."""
        b = len(self.generated[1])
        return values[self.accelerator.process_index * b :][:b]

    def everyone(self, x: Tensor) -> Tensor:
        """Values (b,) or (b, T) of the responses of all processes, (B,) or (B, T)."""
        wide = self.accelerator.pad_across_processes(x, dim=1) if x.dim() > 1 else x
        return self.accelerator.gather(wide)

    def gathered(self, inputs: list, output: dict, seen: list, own: Layout) -> ForeignBatch:
        """The batch of all B responses."""
        (prompts, ids), ends = self.generated[:2], (*self.eos_token_ids, self._tokenizer.pad_token_id)
        rows = gather_object([(prompt, said, {name: x for name, x in row.items() if "image" not in name})
                              for prompt, said, row in zip(prompts, own.before, inputs)])  # B

        def read(name: str) -> dict[str, Any]:
            if name == "tokenizer":
                return {name: self.reader}
            return {name: self.everyone(own.compact(x)) for name, x in self.facts(output, name, seen).items()}

        everywhere = own._replace(tokens=self.everyone(own.tokens), mask=self.everyone(own.mask.int()).bool(),
                                  before=tuple(said for _, said, _ in rows))
        weights = dict(zip(self.reward_func_names, self.reward_weights.tolist()))
        grades = dict(zip(weights, self.parts.double().T))  # (B,) each
        paid = (self.parts.double() * self.reward_weights.to(self.parts).double()).nansum(1)  # (B,)
        grades["reward"] = paid.masked_fill(self.parts.isnan().all(1), torch.nan)  # as TRL takes it
        success = grades[self.success] if isinstance(self.success, str) else grades["reward"] > self.success
        ended = torch.tensor([int(row[-1] in ends) for row in ids], device=own.mask.device)  # (b,)
        ref = {"reference_logprob": lambda: self.everyone(own.compact(output["ref_per_token_logps"].float()))}
        batch = ForeignBatch(
            everywhere, read, grades, success, [i // self.num_generations for i in range(len(rows))],
            puzzles=[row for *_, row in rows], prompts=[prompt for prompt, *_ in rows],
            asks=lambda part, of: Asked(self.args.seed, self.state.global_step + 1, of, **(ref if self.beta else {})),
            parts=weights, ended=self.everyone(ended).bool(), task=self.task, normalize=self.normalize,
            **({"format": grades[self.format].float()} if self.format else {}))
        batch.advantage = self.everyone(output["advantages"])  # (B,)
        return batch

    def facts(self, output: dict, asked: str, seen: list) -> dict[str, Tensor]:
        """FACTS (b, C) of this process's responses: what TRL's own pass over them has seen, or one more."""
        if asked == "logit_grad" and not self.head_is_asked:
            model = self.accelerator.unwrap_model(self.model)
            add_fused_lm_head(model.get_base_model() if hasattr(model, "peft_config") else model, self.temperature,
                              self.args.cast_lm_head_to_fp32, HEAD)
            self.head_is_asked = True
            seen.clear()
        tokens = output["completion_ids"]  # (b, C)
        if not seen:
            length = torch.tensor([[len(row)] for row in self.generated[1]], device=tokens.device)  # (b, 1)
            real = torch.arange(tokens.shape[1], device=tokens.device) < length  # (b, C) also of one that TRL masks
            super()._get_per_token_logps_and_entropies(
                watched(self.model, seen), torch.cat((output["prompt_ids"], tokens), 1),
                torch.cat((output["prompt_mask"], real.to(output["prompt_mask"])), 1), tokens.shape[1],
                batch_size=self.args.per_device_train_batch_size,
                **{name: x for name, x in output.items() if name not in KNOWN})
        return facts_of(seen, tokens.shape[1])
