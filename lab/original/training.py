"""The documents' figures over training, by their groupings: of the toy, by one run; of two runs of a real model.

Contribution is credit * log p; tags count as filler; tenths and fifths are of a response, but `absolute` compares the
first 20% of all positions with the last, as the original's script does.

masking.csv has grad_norm of `python train.py --steps 1 --seed SEED --mitigation ...`; GRPO is `none`.

Run it:  python -m lab.original.training        writes training.md from toy.csv, masking.csv and lab/real/data
"""
import numpy as np

from analyze import position_bins, with_measures
from lab.original.pictures import read_rows, read_toy
from lab.original.rows import ROOM
from lab.statistics import bootstrap, cell, share, sums
from plumbing.progress import one_sentence
from plumbing.report import Estimate, Table, early_over_late, pm, t_estimate
from tasks.text import REASONING

DATA = ROOM.parent / "real" / "data"
RUNS = {"Countdown, 60 steps": DATA / "original", "word problems, 40 steps": DATA / "learning" / "none-seed0"}
TYPES = ("filler", "reasoning")
FACTS = {"filler, share of tokens": "0.678", "filler / reasoning": "1.31", "first tenth / last": "1.63",
         "first 20% of absolute positions / last": "", "answer / thoughts": "",
         "log p: filler": "-0.555", "log p: reasoning": "-0.489",
         "mean contribution: filler": "0.0786", "mean contribution: reasoning": "0.0793"}


def parts_of(log: dict) -> dict[tuple[str, str], np.ndarray]:
    """The tokens (N,) bool of each part that FACTS compares, in its order, by table and part of toy.csv."""
    tenths, answer, position = position_bins(log, 10), log["in_answer"] == 1, log["position"]
    early, late = np.quantile(position, (0.2, 0.8))
    return {("tenths", "0-10%"): tenths[0][1], ("tenths", "90-100%"): tenths[-1][1],
            ("absolute", "early"): position < early, ("absolute", "late"): position > late,
            ("section", "answer"): answer, ("section", "thoughts"): ~answer,
            ("type", "filler"): log["role"] != REASONING, ("type", "reasoning"): log["role"] == REASONING}


def real_column(log: dict) -> list[str]:
    """FACTS of a run, with intervals over puzzles."""
    x, puzzle, parts = log["contribution"].astype(float), log["puzzle"], parts_of(log)

    def mean(y: np.ndarray, use: np.ndarray, digits: int) -> str:
        return cell(bootstrap(share, sums(puzzle, y * use, use.astype(float))), digits)

    def ratio(a: np.ndarray, b: np.ndarray) -> str:
        columns = [y for use in (a, b) for y in (np.abs(x) * use, use.astype(float))]
        return cell(bootstrap(lambda s: share(s[..., :2]) / share(s[..., 2:]), sums(puzzle, *columns)))

    use = list(parts.values())
    assert ratio(use[2], use[3]).startswith(f"{early_over_late(x, log['position']):.2f}")
    return [mean(use[6], use[6] | True, 3), ratio(*use[6:]), *(ratio(*use[i : i + 2]) for i in (0, 2, 4)),
            *(mean(log["logprob"], part, 3) for part in use[6:]), *(mean(x, part, 4) for part in use[6:])]


def toy_column(rows: dict[tuple[str, str], np.ndarray]) -> list[str]:
    """FACTS of the toy, from sums over parts (5,)."""
    n, x, _, size, logprob = np.stack([rows[part] for part in (
        ("type", "filler"), ("type", "reasoning"), ("tenths", "0-10%"), ("tenths", "90-100%"), ("absolute", "early"),
        ("absolute", "late"), ("section", "answer"), ("section", "thoughts"))], 1)  # (8,) each
    size = size / n
    return [f"{n[0] / n[:2].sum():.3f}", *(f"{size[i] / size[i + 1]:.2f}" for i in (0, 2, 4, 6)),
            *(f"{y:.3f}" for y in (logprob / n)[:2]), *(f"{y:.4f}" for y in (x / n)[:2])]


def toy_tables(rows: dict[tuple[str, str], np.ndarray]) -> list[Table]:
    """Appendix A's two tables, of the toy."""
    def cells(sums_of_part: np.ndarray, spread: bool) -> list[str]:
        n, x, squares, size, logprob = sums_of_part
        first = [f"{x / n:.3f}", f"{np.sqrt(squares / n - (x / n) ** 2):.3f}"] if spread else []
        return [*first, f"{size / n:.3f}", f"{logprob / n:.3f}", f"{n:,.0f}"]

    fifths = [f"{i}-{i + 20}%" for i in range(0, 100, 20)]
    return [Table("By position, toy", "Contribution by tenths of a response.", [
        "position", "mean", "standard deviation", "mean of abs", "log p", "tokens"],
        [[part, *cells(found, True)] for (table, part), found in rows.items() if table == "tenths"]),
        Table("By type and position, toy", "By fifths of a response; tags count as filler.", ["position", *(
            f"{kind}, {what}" for kind in TYPES for what in ("abs(contribution)", "log p", "tokens"))],
            [[part, *(text for kind in TYPES for text in cells(rows[kind, part], False))]
             for part in fifths])]


def table_masking(rows: list[dict[str, str]]) -> Table:
    """The gradient's norm at the first step, by the divisor of hard masking."""
    def estimate(norms: list[float]) -> str:
        e: Estimate = t_estimate(np.array(norms))
        return pm(e.value, e.high - e.value)

    names = list(dict.fromkeys(row["method"] for row in rows))
    return Table("Hard masking: gradient norm of the first step", (
        "Of the same batches, by seed, then their mean ± half of its 95% interval. `--normalize none` divides by all "
        "tokens, the paper's equation; `step` by those that are kept, as the original's code did in a micro-batch."),
        ["method", *(f"seed {seed}" for seed in range(5)), "mean"],
        [[name, *norms, estimate(list(map(float, norms)))] for name in names
         for norms in [[row["norm"] for row in rows if row["method"] == name]]])


def toy_sums() -> dict[tuple[str, str], np.ndarray]:
    """The sums (5,) of toy.csv by table and part; those of a type by type and fifth, and over all under `type`."""
    toy = read_toy()
    found = {(table, part): x for (table, kind), parts in toy.items() if kind == "all" for part, x in parts.items()}
    for kind in TYPES:
        found |= {(kind, part): x for part, x in toy["fifths", kind].items()}
        found["type", kind] = sum(toy["fifths", kind].values())
    return found


@one_sentence()
def main() -> None:
    """Write training.md."""
    rows = toy_sums()
    logs = [with_measures(dict(np.load(run / "credit.npz"))) for run in RUNS.values()]
    columns = [list(FACTS), list(FACTS.values()), toy_column(rows), *map(real_column, logs)]
    facts = Table("Over training", (
        "GRPO in the toy, one run, without intervals; a real model, GRPO on Countdown and RLOO on word problems, a run "
        "each, with 95% intervals over puzzles. Ratios are of the contribution's mean size; tags count as filler."),
        ["", "the original", "toy, 100 steps", *RUNS], [list(row) for row in zip(*columns)])
    tables = [facts, *toy_tables(rows), table_masking(read_rows(ROOM / "masking.csv"))]
    (ROOM / "training.md").write_text("\n".join(map(str, tables)), encoding="utf-8")
    print(f"wrote {ROOM / 'training.md'}")


if __name__ == "__main__":
    main()
