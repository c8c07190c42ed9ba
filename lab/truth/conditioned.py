"""Is credit from one's own successes close to the truth? By Bayes' rule, of a policy pi and its value V,

    pi(token | prefix, success) / pi(token | prefix) = V_{t+1} / V_t

So a model that imitates its own successes perfectly, and its log ratio to the model it came from, would give the credit
log V_{t+1} - log V_t: another function of the same values as A* = V_{t+1} - V_t. Here both are scored: that ideal, from
the recorded truth, and one stand-in that can be trained, a copy of the model tuned on its own right answers. (SDPO,
2601.20802, conditions the model by a hint in its prompt instead; the bundled model has never seen one.)

Run it:  python -m lab.truth.conditioned        writes lab/truth/conditioned.md
"""
import copy
from pathlib import Path

import numpy as np
import torch

from lab.estimates import cell
from lab.heads import SIZE, sample
from lab.truth.file import read_truth
from lab.truth.score import TRUTH, rebuild
from lab.truth.scoring import Score, all_credit, credit_scores
from plumbing.progress import Progress, one_sentence
from plumbing.report import Table
from plumbing.shared_prompts import PromptCache, ResponseCache, shared_logprobs
from qwen2_model import Qwen2
from rollout import Policy
from train import Settings, load_policy

LEAST = 0.01  # values below it count as it, so that their logarithm stays finite
BATCHES, LR = 100, 1e-4  # of 96 responses to training puzzles; one step of AdamW on the right ones of each
METHODS = ("none", "token_type", "vineppo", "ppo")  # beside the two


def ideal(truth: dict) -> np.ndarray:
    """log V_{t+1} - log V_t (N,)."""
    after, before = truth["value"] + truth["a_star"], truth["value"]
    return np.log(np.clip(after, LEAST, 1.0)) - np.log(np.clip(before, LEAST, 1.0))


def tuned(policy: Policy, batches: int) -> Qwen2:
    """A copy of the model after supervised steps on its own right answers."""
    model, progress = copy.deepcopy(policy.model), Progress("tuning a copy on successes", batches)
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.0)
    puzzles = policy.task.load("train", SIZE * batches)
    for i in range(batches):
        batch = sample(policy, puzzles[SIZE * i : SIZE * i + SIZE], 1, (0, i + 1))
        right = (batch.success > 0).nonzero()[:, 0]  # (n,)
        if len(right):
            cache = ResponseCache(PromptCache(model, batch.ask.prompts), batch.group[right])
            logprob = shared_logprobs(model, cache, batch.tokens[right], batch.mask[right])  # (n, T)
            optimizer.zero_grad()
            (-logprob.sum() / batch.mask[right].sum()).backward()
            optimizer.step()
        progress.show(i + 1)
    return model


def table_conditioned(scores: dict[str, Score]) -> Table:
    """The scores of both credits, and of some methods."""
    rows = [[name, cell(s.within_spearman), cell(s.within_pearson), cell(s.spearman), cell(s.cosine)]
            for name, s in scores.items()]
    return Table("Success-conditioned credit", (
        f"As in scores.md, on the same responses. V is clipped to [{LEAST}, 1]; the copy was tuned on the right ones "
        f"of {BATCHES * SIZE:,} responses. In brackets, 95% intervals over puzzles."),
        ["credit", "rank in response", "Pearson in response", "rank, all tokens", "cosine of update"], rows)


@one_sentence()
def main() -> None:
    """Tune a copy, score it and the ideal, and write the table."""
    truth, policy = read_truth(TRUTH / "ground_truth.npz"), load_policy(Settings())
    batch, model = rebuild(truth, policy), tuned(policy, BATCHES)
    with torch.no_grad():
        ratio = (batch.ask.read(shared_logprobs, model) - batch.logprob)[batch.mask].numpy()  # (N,)
    credits = {"log V ratio, the ideal": ideal(truth), "a copy tuned on successes": ratio}
    credits |= {name: all_credit(truth)[name] for name in METHODS}
    table = table_conditioned(credit_scores(credits, batch, truth))
    file = Path(__file__).with_suffix(".md")
    file.write_text(str(table), encoding="utf-8")
    print(f"{table}\nwrote {file}")


if __name__ == "__main__":
    main()
