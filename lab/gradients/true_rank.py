"""Does credit per token raise the rank of a group's gradient? Section 4 of lab/archive/headline-designs.md.

Run it:  python -m lab.gradients.true_rank        writes true_rank.md, in a minute
"""
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from grpo import compare
from lab.statistics import holm
from lab.truth.file import read_truth
from lab.truth.score import TRUTH, Options, load_batch
from lab.updates import credit_gradients
from methods import MITIGATIONS
from plumbing.progress import follow
from plumbing.report import Estimate, Table, pm, t_estimate
from qwen2_model import to_checkpoint
from rollout import TokenBatch

MATRICES = ("responses x parameters", "q_proj", "down_proj")
MEASURES = ("effective rank", "stable rank", "components for 90%")


def measures(matrix: Tensor) -> list[float]:
    """Effective rank, stable rank, and how many components hold 90% of the squares, of a matrix (m, n)."""
    s = torch.linalg.svdvals(matrix.double())  # (min(m, n),) from the largest
    share, squares = s[s > 0] / s.sum(), s.square()
    held = squares.cumsum(0) / squares.sum()
    return [share.log().mul(-share).sum().exp().item(), (squares.sum() / squares[0]).item(),
            float((held < 0.9).sum() + 1)]


def credits_of(truth: dict, batch: TokenBatch) -> dict[str, Tensor]:
    """The credits (B, T) that are compared."""
    a_star = batch.logprob.new_zeros(batch.mask.shape)  # (B, T)
    a_star[batch.mask] = torch.from_numpy(truth["a_star"]).to(a_star)
    order = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(0)).masked_fill(~batch.mask, 2.0)
    places = batch.mask.float().cumsum(1).masked_fill(~batch.mask, 1e9).argsort(1)  # (B, T) own tokens first
    shuffled = torch.zeros_like(a_star).scatter(1, places, a_star.gather(1, order.argsort(1)))  # (B, T)
    return {"A\\*": a_star, "GRPO": MITIGATIONS["none"](batch),
            "RLOO": compare(batch, "rloo").float()[:, None] * batch.mask, "A\\*, shuffled": shuffled * batch.mask}


def ranks(truth: dict, batch: TokenBatch) -> np.ndarray:
    """The measures (puzzles, credits, matrices, measures) of each puzzle whose rewards differ, and behind them, as if
    of a matrix, the number of responses that have a gradient."""
    model, found = batch.ask.policy.model, []
    names, sizes = zip(*((name, w.numel()) for name, w in model.named_parameters()))
    G, last = len(batch.text) // len(batch.puzzles), f"layers.{model.config.num_hidden_layers - 1}."
    parts = credit_gradients(batch, torch.stack([*credits_of(truth, batch).values()]), 1)  # B of (4, P)
    for q in follow("gradients", range(len(batch.puzzles))):
        own = torch.stack([next(parts) for _ in range(G)], 1)  # (4, G, P)
        if batch.advantage[q * G : q * G + G].any():
            found.append([])
            for rows in own:  # (G, P)
                weights = {name: x.view(w.shape) for (name, w), x in zip(model.named_parameters(), rows.sum(0).split(sizes))}
                named = to_checkpoint(weights, model.config)
                of_layer = {name: x for name, x in named.items() if last in name}
                chosen = [rows, *(next(x for name, x in of_layer.items() if part in name) for part in MATRICES[1:])]
                found[-1].append([measures(x) for x in chosen] + [[rows.any(1).sum().item()] * 3])
    return np.array(found)


def table(found: np.ndarray, credits: list[str]) -> Table:
    """The mean of each measure, and its difference from GRPO's."""
    grpo, rows = credits.index("GRPO"), []
    for m, matrix in enumerate(MATRICES):
        for c, credit in enumerate(credits):
            cells = []
            for k in range(len(MEASURES)):
                cells.append(shown(t_estimate(found[:, c, m, k])))
                cells += [shown(t_estimate(found[:, c, m, k] - found[:, grpo, m, k]))] * (k == 0)
            rows.append([matrix, credit, f"{found[:, c, -1, 0].mean():.1f}", *cells])
    primary = {matrix: t_estimate(found[:, 0, m, 0] - found[:, grpo, m, 0]).p for m, matrix in enumerate(MATRICES)}
    return Table("Rank of a group's gradient under true credit", (
        f"{len(found)} of the bundled model's puzzles, 8 responses each. Means over puzzles, ± half of a 95% interval; "
        "minus GRPO: paired by puzzle. With a gradient: responses. A\\* minus GRPO in effective rank differs from 0 "
        f"at 5%, after Holm's correction over the three matrices, in: {', '.join(sorted(holm(primary))) or 'none'}."),
        ["matrix", "credit", "with a gradient", "effective rank", "minus GRPO", *MEASURES[1:]], rows)


def shown(e: Estimate) -> str:
    """An estimate with half of its interval."""
    return pm(e.value, e.high - e.value, 2)


def main() -> None:
    """Measure and write the table."""
    truth = read_truth(TRUTH / "ground_truth.npz")
    batch = load_batch(truth, Options(), ())
    text = str(table(ranks(truth, batch), list(credits_of(truth, batch))))
    Path(__file__).with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
