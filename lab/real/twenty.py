"""Sections 7 and 8 of designs.md: twenty steps of the original's mitigations, and of LoRA, by the rows of runs.csv.

    python -m lab.real.report        has these tables
"""
from dataclasses import replace

import numpy as np

from lab.study.engine import BOTH, METHOD, MINUS, RLOO, Column, Pair, at_rates, make_table, mean, plain, select
from plumbing.comparison import Run
from plumbing.report import Estimate, Table, t_estimate

RATE, LORA = 5e-6, "none lora_rank=8 advantage=rloo"
INVERSE = "inverse_logprob detach=False normalize=none"
PRIMARY = ("outcome_conditional", INVERSE,  # of section 7, each minus GRPO
           f"{LORA} lr=5e-05", f"{LORA} lr=1.5e-05")  # of section 8, minus all weights; higher rates came afterwards
SEEDS = 3  # an arm of fewer gets no verdict
ENDS = Column("end, by seed", lambda pair: ", ".join(f"{100 * end:.1f}" for end in pair.a.values("end")))


def verdict(pair: Pair) -> Estimate | None:
    """The difference of two arms at the end, none of an arm and itself. With seeds, but fewer than SEEDS, it stays
    open, and counts for Holm's correction as a p-value of 1."""
    if pair.b is pair.a:
        return None
    few = min(len(group.rows) for group in pair[:2]) < SEEDS
    return Estimate(np.nan, p=1.0) if few else t_estimate(*(group.values("end") for group in pair[:2]))


def against(header: str) -> Column:
    """The verdicts of a table, corrected over those of its contrasts that were decided on."""
    return Column(header, verdict, lambda pair: "" if pair.a.label in PRIMARY else None)


def tables_twenty(parts: dict[str, list[Run]]) -> list[Table]:
    """The tables of both sections from the runs of level `twenty` by part."""
    arms = at_rates(select(parts, "mitigations", "rank"))
    full = {name: replace(group, label=name) for (name, rate), group in arms.items() if rate == RATE}
    deviation = 100 * np.std(full["none"].values("end"), ddof=1)
    note = ("Word problems, 4 x 8 responses a step at 5e-6. End: success on the same 512 held-out problems. * is "
            "significant at 5% after Holm's correction over the two contrasts that were decided on; one without a "
            "verdict counts as not significant. Answered: of the responses of steps 11 to 20, those with an answer; "
            "right: of those, in percent. Then ratios of contribution's mean size, and the gradient's norm, over all "
            "steps. Means over seeds; with three seeds ± half of a 95% interval, Welch's for the difference, which "
            "fewer don't get; it is not corrected, and may exclude 0 without a *. No permutation test of three seeds "
            "against three falls below 0.1, so a * rests on normal ends. GRPO's ends have a standard "
            f"deviation of {deviation:.1f} points between seeds. With it on both sides three seeds see a difference of "
            "3.5 deviations four times in five, and of 4.6 at Holm's first step.")
    others = [mean("answered"), mean("right of answered"), plain("contribution, first / last", 2),
              plain("contribution, filler / reasoning", 2), plain("gradient norm", 2)]
    pairs = [Pair(group, full["none"]) for group in full.values()]
    found = [make_table("Twenty steps of the original's mitigations", note, pairs,
                        [METHOD, MINUS, BOTH, ENDS, against("minus it"), *others])]
    lora = [arms[key] for key in sorted(arms) if key[0] == LORA]  # by rate
    if lora and RLOO in full:
        note = ("RLOO as above: rank 8, and all weights at 5e-6. * as above, over 1.5e-5 and 5e-5; the higher rates "
                "were added one by one, when lower ones were known, and have no verdict. Entropy: of the last ten "
                "steps. Seconds: of one core, the other one busy, too; they depend on what else ran.")
        pairs = [Pair(group, full[RLOO]) for group in (*lora, full[RLOO])]
        found.append(make_table("Rank 8 beside all weights", note, pairs, [
            METHOD, BOTH, ENDS, against("minus all weights"), plain("entropy", 2), plain("gradient norm", 2),
            plain("seconds a step", 0)]))
    return found
