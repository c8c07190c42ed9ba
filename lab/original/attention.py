"""Attention credit: the documents' formula, that of their code, and ours, against the truth of lab/truth.

The answer's tokens pay attention to the tokens before them: a is what token t gets from them, by sum or by mean.

    documents       credit = A * a
    their code      credit = A * clamp(0.5 + scale * (1 + a) / (n + 1), 0.1, 3), with the a of token t - 1
    ours            credit = A * (1 + scale * a), with a scaled to mean 1 over the response (mitigations.py)

Their n counts the answer's tokens and the one before them. Without an answer (1 + a) / (n + 1) is 1, so all weights are
0.5 + scale. Their loss does not rescale weights: --normalize none.

Run it:  python -m lab.original.attention        writes attention.md
         python -m lab.original.attention --mitigation attention_as_coded --normalize none        as lab.truth.score
"""
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lab.estimates import cell
from lab.truth import score
from lab.truth.scoring import Score, credit_scores
from lab.truth.solver import KINDS
from mitigations import attention_credit, reweight, reweighting
from plumbing.progress import one_sentence
from plumbing.registry import require
from plumbing.report import Table, clustered_mean, pm
from queries import attention_paid
from rollout import TokenBatch
from sampler import read_responses

FILE = Path(__file__).with_name("attention.md")


def attention_as_coded(batch: TokenBatch, credit_scale: float = 2.0) -> Tensor:
    """credit = A * clamp(0.5 + credit_scale * (1 + a) / (n + 1), 0.1, 3): the answer pays a to the token before.

    As the original's code has it; n: see the head of this file. There the last token asks, too, in all but the longest
    response of a micro-batch; here it never does.
    """
    return input_weights(paid_from_prompt(batch), batch, credit_scale)[:, :-1]


@torch.no_grad()
def paid_from_prompt(batch: TokenBatch) -> Tensor:
    """`ask.attention` as (B, T + 1, T + 1): the prompt's last token stands before the response's."""
    require(not any(batch.before), "attention_as_coded knows no replies")
    last = torch.tensor([prompt[-1] for prompt in batch.prompts], device=batch.mask.device)[batch.group]  # (B,)
    tokens, mask = torch.cat((last[:, None], batch.tokens), 1), torch.cat((batch.mask[:, :1], batch.mask), 1)
    prompts = [prompt[:-1] for prompt in batch.prompts]
    return read_responses(attention_paid, batch.ask.policy.model, prompts, batch.group, tokens, mask, per_row=(mask,))


def input_weights(paid: Tensor, batch: TokenBatch, credit_scale: float) -> Tensor:
    """Their weight (B, T + 1) of the prompt's last token and the response's, from what each is paid, (B, T + 1, T + 1).

    The query of token s is the row that predicts token s + 1, so it is row s + 2 here. It asks about tokens before s,
    not about s.
    """
    length, token = batch.mask.sum(1), torch.arange(paid.shape[1])  # (B,), (T + 1,)
    answered = batch.in_answer.any(1)  # (B,)
    first = torch.where(answered, (batch.in_answer.int().argmax(1) - 1).clamp(min=0), length)  # (B,) one early
    asks = (token >= first[:, None] + 2) & (token <= length[:, None])  # (B, T + 1) rows
    a = (paid.tril(-2) * asks[:, :, None]).sum(1)  # (B, T + 1)
    share = torch.where(asks.any(1, keepdim=True), (1 + a) / (length - first + 1)[:, None], 1.0)
    return (0.5 + credit_scale * share).clamp(0.1, 3.0)


def forms(batch: TokenBatch) -> dict[str, Tensor]:
    """By whose formula it is, the credit (B, T)."""
    plain, weights = replace(batch, normalize="none"), input_weights(paid_from_prompt(batch), batch, 2.0)
    documents = (batch.ask.attention * batch.in_answer[:, :, None]).sum(1)  # (B, T)
    return {"documents": reweight(plain, documents * batch.mask),
            "their code": reweight(plain, weights[:, :-1] * batch.mask),
            "their code, each token its own": reweight(plain, weights[:, 1:] * batch.mask),
            "ours": attention_credit(batch)}


def size_on(kind: str, credit: np.ndarray, truth: dict) -> str:
    """Mean abs(credit) (N,) on a kind of token over that on all, ± half of its 95% interval, clustered by puzzle."""
    use, size = truth["kind"] == KINDS.index(kind), np.abs(credit)
    return pm(*clustered_mean(size[use] / size.mean(), truth["group"][use].astype(int)), 2)


def table_forms(scores: dict[str, Score], credits: dict[str, np.ndarray], batch: TokenBatch, truth: dict) -> Table:
    """The score of each form's credit (N,), and the range of their weights."""
    weights = attention_as_coded(batch)[batch.mask & batch.in_answer.any(1, keepdim=True)]
    rows = [[name, *map(cell, (s.location, s.within_spearman, s.within_pearson, s.cosine)),
             *(size_on(kind, credits[name], truth) for kind in ("operand", "operator"))] for name, s in scores.items()]
    return Table("Attention credit against A*", (
        "On the responses of lab/truth/scores.md, whose notes say what each score means; then mean abs(credit) on two "
        "kinds of token over that on all, ± half of its 95% interval. Their code gives a token what the one before it "
        f"was paid; its weights are {weights.min():.2f} to {weights.max():.2f} in responses with an answer, else 2.5."),
        ["formula", "location", "rank in response", "Pearson in response", "cosine of update", "operands", "operators"],
        rows)


@one_sentence()
def main() -> None:
    """Score one credit function, this one among them; without a flag, write attention.md."""
    reweighting(attention_as_coded)
    if len(sys.argv) > 1:
        return score.main()
    truth = score.read_truth(score.TRUTH / "ground_truth.npz")
    batch = score.load_batch(truth, score.Options(), ())
    credits = {name: credit[batch.mask].numpy() for name, credit in forms(batch).items()}
    FILE.write_text(str(table_forms(credit_scores(credits, batch, truth), credits, batch, truth)), encoding="utf-8")
    print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
