"""The rows of pictures.py and training.py: where GRPO's contribution went in a run of the toy, and the singular values
of a gradient under several credits. A gradient is that of sum credit * log p on the responses of lab/truth.

Run it:  python train.py --mitigation none
         python -m lab.original.rows runs/none-seed0        writes toy.csv and rank.csv
"""
from pathlib import Path
from typing import Iterator

import numpy as np
import torch

from analyze import position_bins, read_log
from lab.arms import write_rows
from lab.heads import credit_gradients
from lab.truth.score import TRUTH, Options, load_batch, read_truth
from plumbing.flags import new_parser
from plumbing.progress import follow, one_sentence
from tasks.text import REASONING

ROOM = Path(__file__).parent
SUMS = ("tokens", "contribution", "squares", "size", "log p")  # columns of toy.csv: sums over some tokens
EDGES = np.arange(-10.25, 10.5, 0.5)  # of the histogram; the outermost bins hold all beyond
CREDITS = ("GRPO", "true credit, A*", "random, A · Exp(1)", "noise, no reward")
STEP = 12  # groups in a step of the default run


def toy_rows(log: dict) -> Iterator[dict]:
    """The rows of toy.csv: sums over the tokens of each part of a table, by type."""
    x, reasoning = log["contribution"].astype(float), log["role"] == REASONING
    bins = np.digitize(x, EDGES[1:-1])  # (N,)
    answer, position, (early, late) = log["in_answer"] == 1, log["position"], np.quantile(log["position"], (0.2, 0.8))
    tables = {"tenths": position_bins(log, 10), "fifths": position_bins(log, 5),
              "section": [("answer", answer), ("thoughts", ~answer)],
              "absolute": [("early", position < early), ("late", position > late)],
              "steps": [(step, log["step"] == step) for step in np.unique(log["step"])],
              "histogram": [(EDGES[i] + 0.25, bins == i) for i in range(len(EDGES) - 1)]}
    for table, part, those in ((table, *part) for table, parts in tables.items() for part in parts):
        for kind, use in (("all", those), ("filler", those & ~reasoning), ("reasoning", those & reasoning)):
            own, logprob = x[use], log["logprob"][use].astype(float)
            sums = len(own), own.sum(), (own**2).sum(), np.abs(own).sum(), logprob.sum()
            yield {"table": table, "part": part, "type": kind} | {name: f"{y:.8g}" for name, y in zip(SUMS, sums)}


def rank_rows() -> Iterator[dict]:
    """The rows of rank.csv: the singular values of each group's gradients, responses x parameters, and of the gradient
    of the last layer's down_proj that the first STEP groups cause together."""
    truth = read_truth(TRUTH / "ground_truth.npz")
    batch = load_batch(truth, Options(), ())
    G, (*_, last) = len(batch.text) // len(batch.puzzles), batch.ask.policy.model.parameters()  # last: the down_proj
    advantage, a_star = (torch.from_numpy(truth[name]).float() for name in ("advantage", "a_star"))  # (N,) each
    generator, credits = torch.Generator().manual_seed(0), torch.zeros(4, *batch.mask.shape)  # (4, B, T)
    credits[:, batch.mask] = torch.stack([advantage, a_star, advantage * torch.empty_like(a_star).exponential_(
        generator=generator), torch.randn(len(a_star), generator=generator)])
    parts, step = credit_gradients(batch, credits, 1), 0  # B of (4, P)
    for q in follow("gradients", range(len(batch.puzzles))):
        own = torch.stack([next(parts) for _ in range(G)], 1)  # (4, G, P)
        step = step + own[..., -last.numel() :].sum(1) * (q < STEP)  # (4, p)
        if batch.advantage[q * G : q * G + G].any():
            yield from singular("responses x parameters", q, own)
    yield from singular("down_proj", 0, step.view(-1, *last.shape))


def singular(matrix: str, group: int, gradients: torch.Tensor) -> Iterator[dict]:
    """A row for each credit of the singular values of its matrix, gradients (4, m, n)."""
    for credit, values in zip(CREDITS, torch.linalg.svdvals(gradients.double()).tolist()):
        yield {"matrix": matrix, "group": group, "credit": credit, "values": " ".join(f"{x:.6g}" for x in values)}


@one_sentence()
def main() -> None:
    """Write toy.csv from a run, and rank.csv."""
    torch.set_num_threads(1)  # the matrices are so small that threads wait for each other
    parser = new_parser(description=__doc__)
    parser.add_argument("run", type=Path, help="a finished run folder with its credit log")
    run = parser.parse_args().run
    write_rows(list(toy_rows(read_log(run))), ROOM / "toy.csv")
    write_rows(list(rank_rows()), ROOM / "rank.csv")
    print(f"wrote toy.csv and rank.csv in {ROOM}")


if __name__ == "__main__":
    main()
