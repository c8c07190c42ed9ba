"""TRL's settings and ours: the gradients of both on the same batch. Writes tables.md, which docs/trl.md shows.

The bundled model's responses to a few puzzles are handed to TRL's trainer in place of its sampling: it compares the
rewards, computes its loss and its gradient. Ours are those of `update`, and both are taken twice: with the model that
sampled, as in the first update on a batch, and with one that has moved since, as in a later one.

Run it:  pip install trl==1.16.0 datasets
         python -m lab.rollouts.trl
"""
import math
import shlex
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from grpo import compare, shape_reward, update
from methods import MITIGATIONS
from plumbing.files import replace_file
from plumbing.flags import new_parser
from plumbing.launch import BUNDLED
from plumbing.policy import Policy
from plumbing.progress import follow, one_sentence
from plumbing.registry import assign_credit
from plumbing.report import Table
from qwen2_model import save_model, to_checkpoint
from queries import Queries
from rollout import TokenBatch, rollout
from start import load_policy, parse_flags

Q, G, LIMIT, SEED = 6, 4, 60, 1
SPREAD = math.sqrt(G / (G - 1))  # of our standard deviation to theirs, the unbiased one


class Pair(NamedTuple):
    """A TRL setting, the flags here that are nearest to it, and what differs."""

    theirs: dict  # options of GRPOConfig
    flags: str
    differs: str
    ratio: Callable[[TokenBatch], float] | float = SPREAD  # of the norms, ours over theirs, as derived
    equal: int = 2  # updates that are equal: both, the first alone, none
    trainer: str = "GRPO"

    @property
    def name(self) -> str:
        """TRL's options as they are written in a call."""
        options = ", ".join(f"{name}={x!r}" for name, x in self.theirs.items())
        return options if options and self.trainer == "GRPO" else f"{self.trainer}Config({options})"


PLAIN = dict(loss_type="dr_grpo", scale_rewards="none")  # the same units: no deviation, and N no random number
SEQUENCE, PLAIN_KL = dict(importance_sampling_level="sequence"), dict(beta=0.1, use_bias_correction_kl=False)
CONSTANT, SUM = "--loss_norm constant", "--advantage dr_grpo --loss_norm constant"
PAIRS = [
    Pair({}, "", "TRL's `dapo`, its default. Its deviation is the unbiased one: √(G/(G − 1)), with G = 4"),
    Pair(dict(loss_type="bnpo"), "", "the same, but N is that of a micro-batch: equal where that is the step"),
    Pair(dict(loss_type="grpo"), "--loss_norm sequence", "as above"),
    Pair(dict(loss_type="dr_grpo"), CONSTANT, "as above; TRL's still divides by the deviation"),
    Pair(PLAIN, SUM, "nothing", 1.0),
    Pair(dict(scale_rewards="batch"), "--advantage dr_grpo",
         "TRL's divides by the deviation of all rewards of the step", lambda batch: batch.reward.std().item() + 1e-4),
    Pair(dict(multi_objective_aggregation="normalize_then_sum"), "--advantage gdpo",
         "the deviation of the step, of Q · G responses", math.sqrt(Q * G / (Q * G - 1))),
    Pair(dict(epsilon=0.1, epsilon_high=0.28), "--clip_low 0.1 --clip_high 0.28", "the deviation"),
    Pair(dict(loss_type="cispo", epsilon_high=1.2), "--loss cispo --clip_low 0.999",
         "TRL's epsilon_high is the cap itself, ours the cap − 1"),
    Pair(dict(loss_type="cispo"), "--loss cispo --clip_low 0.999",
         "TRL's default cap of 0.2 makes every ratio 0.2 in the first update: a gradient of a fifth", 5 * SPREAD, 1),
    Pair(dict(loss_type="grpo") | SEQUENCE, "--loss gspo --loss_norm sequence", "the deviation"),
    Pair(SEQUENCE, "--loss gspo", "the deviation"),
    Pair(dict(loss_type="luspo") | SEQUENCE, f"--loss gspo {CONSTANT}",
         "TRL's does not divide by max_completion_length, here 60", SPREAD / LIMIT),
    Pair(dict(loss_type="sapo"), "--loss_norm sequence", "no equal: a sigmoid instead of the clip", equal=1),
    Pair(dict(loss_type="vespo"), "", "no equal: a weight for a response by its ratio", equal=1),
    Pair(dict(delta=1.1), "", "no equal: a cap of the ratio where the advantage is negative", equal=1),
    Pair(dict(off_policy_mask_threshold=0.001), "",
         "no equal: drops responses with negative advantage that the policy has left", equal=1),
    Pair(PLAIN | dict(beta=0.1), f"--kl 0.1 --kl_gradient unbiased {SUM}", "nothing", 1.0),
    Pair(PLAIN | PLAIN_KL, f"--kl 0.1 {SUM}", "nothing", 1.0),
    Pair(dict(beta=0.1), f"--kl {0.1 * SPREAD:.7f} --kl_gradient unbiased",
         "the deviation divides A but not the KL: --kl is beta · √(G/(G − 1))"),
    Pair(PLAIN | SEQUENCE | PLAIN_KL, f"--loss gspo --kl 0.1 {SUM}", "nothing", 1.0),
    Pair(PLAIN | SEQUENCE | dict(beta=0.1), f"--loss gspo --kl 0.1 {SUM}",
         "no equal: TRL's multiplies the KL by the ratio of the response", 1.0, 0),
    Pair(dict(mask_truncated_completions=True), "--skip_unfinished", "TRL's N is without the responses cut off",
         lambda batch: SPREAD * batch.mask[batch.ended].sum().item() / batch.mask.sum().item()),
    Pair(dict(top_entropy_quantile=0.2), "--mitigation entropy_masking --mask_percentile 80 --normalize none",
         "TRL's reads entropy anew in each update, ours once, while sampling", equal=1),
    Pair(dict(beta=0.1), f"--advantage rloo --shaping kl {CONSTANT}",
         "no equal later: TRL's clips the ratio of whole responses, a product", 1 / LIMIT, 1, "RLOO"),
]


def sampled(folder: Path) -> tuple[TokenBatch, list[Policy]]:
    """A batch, and two policies in float64: the one that sampled it, and one that has moved; both are saved, too."""
    policies = []
    for i in range(3):  # the third one is the reference
        policy = load_policy(replace(parse_flags([])[0], model=str(BUNDLED)))
        policy.model.double()
        generator = torch.Generator().manual_seed(i)
        for weight in policy.model.parameters() if i else ():
            weight.data += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
        save_model(policy.model, folder / str(i))
        policies.append(policy)
    s = replace(parse_flags([])[0], answers=G, questions=Q, max_new_tokens=LIMIT, seed=SEED)
    policies = [policy._replace(reference=policies[2].model) for policy in policies]
    batch = rollout(policies[0], policies[0].task.load("train", Q), s, 1)
    batch.ask = Queries(policies[0], batch, s, 1)
    return batch, policies[:2]


def our_gradient(batch: TokenBatch, policy: Policy, flags: str) -> dict[str, Tensor]:
    """The gradient of our update, under a checkpoint's names."""
    s, hyper_parameters, *_ = parse_flags([*shlex.split(flags), f"--max_new_tokens={LIMIT}", "--micro_batch=999"])
    batch = replace(batch, advantage=compare(batch, s.advantage, shape_reward(batch, s)), normalize=s.normalize)
    batch.ask.computed.clear()
    credit = assign_credit(batch, partial(MITIGATIONS[s.mitigation], **hyper_parameters), s)  # (B, T)
    still = SimpleNamespace(zero_grad=policy.model.zero_grad, step=lambda norm: 0.0)
    update(policy, still, batch, credit, s)
    return to_checkpoint({name: weight.grad for name, weight in policy.model.named_parameters()}, policy.model.config)


def their_gradient(batch: TokenBatch, folder: Path, pair: Pair, moved: bool) -> dict[str, Tensor]:
    """The gradient of TRL's loss, by name. moved: the model moves between sampling and update."""
    import trl
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    load = lambda i: Qwen2ForCausalLM.from_pretrained(folder / str(i), dtype=torch.float64)
    config = getattr(trl, f"{pair.trainer}Config")(
        output_dir=str(folder / "out"), per_device_train_batch_size=Q * G, num_generations=G, use_cpu=True, bf16=False,
        max_completion_length=LIMIT, num_iterations=2, report_to=[], gradient_checkpointing=False,
        reward_weights=[*batch.weights.values()], **pair.theirs)
    prompts = [f"{i}" for i in range(Q) for _ in range(G)]
    parts = [lambda completions, rewards=part.tolist(), **_: rewards for part in map(batch.grades.get, batch.weights)]
    trainer = getattr(trl, f"{pair.trainer}Trainer")(
        load(0), reward_funcs=parts, args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(BUNDLED))
    if "beta" in pair.theirs:
        trainer.ref_model.load_state_dict(load(2).state_dict())
    ids = [row[mask].tolist() for row, mask in zip(batch.tokens, batch.mask)]
    start = [batch.prompts[q] for q in batch.group.tolist()], ids
    trainer._generate = lambda _: (*start, list(batch.text)) if pair.trainer == "RLOO" else (
        *start, None, list(batch.text), None, {}, None, [])
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in prompts])
    trainer.model.load_state_dict(load(int(moved)).state_dict())
    trainer.compute_loss(trainer.model, inputs).backward()
    return {name: weight.grad for name, weight in trainer.model.named_parameters()}


def compared(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, float]:
    """Cosine of two gradients, and the norm of the first over that of the second."""
    a, b = (torch.cat([x[name].flatten() for name in sorted(theirs)]) for x in (ours, theirs))
    return (a @ b / a.norm() / b.norm()).item(), (a.norm() / b.norm()).item()


def measure(pairs: list[Pair] = PAIRS) -> list[tuple[Pair, float, list[tuple[float, float]]]]:
    """Each pair with the ratio as derived, and cosine and ratio as measured in a first and in a later update."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        batch, policies = sampled(Path(folder))
        for pair in follow("TRL", pairs):
            derived = pair.ratio(batch) if callable(pair.ratio) else pair.ratio
            found.append((pair, derived, [compared(our_gradient(batch, policy, pair.flags),
                                                   their_gradient(batch, Path(folder), pair, bool(moved)))
                                          for moved, policy in enumerate(policies)]))
    return found


@one_sentence()
def main() -> None:
    """Measure all pairs, print the table and write it."""
    new_parser(description=__doc__).parse_args()
    try:
        import trl
    except ImportError:
        raise ValueError("this compares with TRL: pip install trl==1.16.0 datasets") from None
    rows = [[f"`{pair.name}`", f"`{pair.flags}`" if pair.flags else "the default",
             *(f"{cosine:.6f}, {ratio:.4g}" for cosine, ratio in measured), pair.differs]
            for pair, _, measured in measure()]
    note = (f"Written by `python -m lab.rollouts.trl` with TRL {trl.__version__}: {Q} puzzles, {G} responses each, the "
            "bundled model in float64. Cosine of the two gradients, and the norm of ours over TRL's; *later*: the "
            "model has moved since it sampled.")
    header = ["TRL", "here", "first update", "later update", "what differs"]
    text = f"# TRL's settings and ours\n\n{Table('Gradients beside TRL', note, header, rows)}"
    file = Path(__file__).with_name("tables.md")
    replace_file(file, lambda part: part.write_text(text, encoding="utf-8"))
    print(f"{text}\nwrote {file}")


if __name__ == "__main__":
    main()
