"""Sections 7 and 8 of designs.md: twenty steps of the original's mitigations, and of LoRA, by the rows of runs.csv.

    python -m lab.real.report        has these tables
"""
from dataclasses import replace

import numpy as np

from lab.statistics import t_quantile
from lab.study.engine import BOTH, METHOD, MINUS, RLOO, Column, Pair, at_rates, make_table, mean, plain, select
from plumbing.comparison import Group, Run
from plumbing.report import Estimate, Table, t_estimate

RATE, LORA = 5e-6, "none lora_rank=8 advantage=rloo"
INVERSE = "inverse_logprob detach=False normalize=none"
PRIMARY = ("outcome_conditional", INVERSE)  # of section 7, each minus GRPO
SEEDS = 3  # an arm of fewer gets no verdict


def verdict(pair: Pair) -> Estimate | None:
    """The difference of two arms at the end; none between an arm and itself, or with fewer than SEEDS seeds."""
    few = pair.b is None or pair.b is pair.a or min(len(g.rows) for g in pair[:2]) < SEEDS
    return None if few else t_estimate(*(g.values("end") for g in pair[:2]))


def spread(groups: list[Group]) -> tuple[float, int]:
    """The standard deviation of the end between seeds, pooled over arms, in points, and its degrees of freedom."""
    ends = [group.values("end") for group in groups]
    freedom = sum(len(x) - 1 for x in ends)
    return 100 * float(np.sqrt(sum(((x - x.mean()) ** 2).sum() for x in ends) / freedom)), freedom


def what_is_seen(groups: list[Group]) -> str:
    """What SEEDS seeds a side see, with the spread of these rows."""
    if not any(len(group.rows) > 1 for group in groups):
        return ""
    points, freedom = spread(groups)
    alone, corrected = ((t_quantile(2 * SEEDS - 2, outside) + t_quantile(2 * SEEDS - 2, 0.4)) * points
                        * np.sqrt(2 / SEEDS) for outside in (0.05, 0.025))  # 0.4: on both sides, so 20% on one
    return (f"Between seeds the end has a standard deviation of {points:.1f} points ({freedom} degrees of freedom). "
            f"With it, three seeds a side find a difference of {alone:.0f} points four times in five, of "
            f"{corrected:.0f} after the correction.")


def tables_twenty(parts: dict[str, list[Run]]) -> list[Table]:
    """The tables of both sections from the runs of level `twenty` by part."""
    arms = at_rates(select(parts, "mitigations", "rank"))
    full = {name: replace(group, label=name) for (name, rate), group in arms.items() if rate == RATE}
    if "none" not in full:
        return []
    note = ("Word problems, 4 x 8 responses a step at 5e-6. End: success on the same 512 held-out problems. * is "
            "significant at 5% after Holm's correction over the two contrasts that were decided on. Answered: of the "
            "responses of steps 11 to 20, those with an answer; right: of those, in percent. Then ratios of "
            "contribution's mean size, and the gradient's norm, over all steps. Difference: Welch's interval; none "
            f"with fewer than three seeds. {what_is_seen([*full.values()])}")
    own = [mean("end"), Column("minus it", verdict, lambda pair: "" if pair.a.label.startswith(PRIMARY) else None)]
    beside = [mean("answered"), mean("right of answered"), plain("contribution, first / last"),
              plain("contribution, filler / reasoning"), plain("gradient norm")]
    found = [make_table("Twenty steps of the original's mitigations", note,
                        [Pair(group, full["none"]) for group in full.values()], [METHOD, MINUS, BOTH, *own, *beside])]
    lora = [group for (name, _), group in arms.items() if name == LORA]
    if lora and RLOO in full:
        note = ("RLOO on word problems as above: rank 8 at two rates, and all weights at 5e-6. * as above, over both "
                f"rates. {what_is_seen([*lora, full[RLOO]])}")
        pairs = [Pair(group, full[RLOO]) for group in (*lora, full[RLOO])]
        found.append(make_table("Rank 8 beside all weights", note, pairs, [
            METHOD, BOTH, mean("end"), Column("minus all weights", verdict, lambda pair: ""), plain("entropy"),
            plain("gradient norm"), plain("seconds a step")]))
    return found
