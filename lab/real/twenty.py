"""Sections 7 and 8 of designs.md: twenty steps of the original's mitigations, and of LoRA, by the rows of runs.csv.

    python -m lab.real.report        has these tables
"""
from dataclasses import replace

import numpy as np

from lab.statistics import t_quantile
from lab.study.engine import BOTH, METHOD, MINUS, RLOO, Column, Pair, at_rates, make_table, select
from plumbing.comparison import Group, Run
from plumbing.report import Estimate, Table, pm, t_estimate

RATE, LORA = 5e-6, "none lora_rank=8 advantage=rloo"
INVERSE = "inverse_logprob detach=False normalize=none"
PRIMARY = ("outcome_conditional", INVERSE)  # of section 7, each minus GRPO
SEEDS = 3  # an arm of fewer gets no verdict
ENDS = Column("end, by seed", lambda pair: ", ".join(f"{100 * end:.1f}" for end in pair.a.values("end")))


def verdict(pair: Pair) -> Estimate | None:
    """The difference of two arms at the end; none between an arm and itself, or with fewer than SEEDS seeds."""
    few = pair.b is pair.a or min(len(group.rows) for group in pair[:2]) < SEEDS
    return None if few else t_estimate(*(group.values("end") for group in pair[:2]))


def beside(figure: str, scale: int = 1, digits: int = 2) -> Column:
    """A figure's mean, ± half of its interval from SEEDS seeds on."""
    def text(pair: Pair) -> str:
        e = t_estimate(scale * pair.a.values(figure))
        return pm(e.value, e.high - e.value if len(pair.a.rows) >= SEEDS else np.nan, digits)

    return Column(figure, text)


def spread(groups: list[Group]) -> tuple[float, int]:
    """The standard deviation of the end between seeds, pooled over arms, in points, and its degrees of freedom."""
    ends = [group.values("end") for group in groups]
    freedom = sum(len(x) - 1 for x in ends)
    return 100 * float(np.sqrt(sum(((x - x.mean()) ** 2).sum() for x in ends) / freedom)), freedom


def what_is_seen(groups: list[Group]) -> str:
    """What SEEDS seeds a side see, with the spread of these rows."""
    groups = [group for group in groups if group.values("climb").mean() > 0 and len(group.rows) > 1]
    if not groups:
        return ""
    points, freedom = spread(groups)
    alone, corrected = ((t_quantile(2 * SEEDS - 2, outside) + t_quantile(2 * SEEDS - 2, 0.4)) * points
                        * np.sqrt(2 / SEEDS) for outside in (0.05, 0.025))  # 0.4: on both sides, so 20% on one
    return (f"Between seeds the end has a standard deviation of {points:.1f} points, in arms that end above the start "
            f"({freedom} degrees of freedom). "
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
            "contribution's mean size, and the gradient's norm, over all steps. Means over seeds; with three seeds ± "
            "half of a 95% interval, Welch's for the difference, which fewer don't get. "
            f"{what_is_seen([*full.values()])}")
    decided = Column("minus it", verdict, lambda pair: "" if pair.a.label.startswith(PRIMARY) else None)
    others = [beside("answered", 100, 1), beside("right of answered", 100, 1), beside("contribution, first / last"),
              beside("contribution, filler / reasoning"), beside("gradient norm")]
    pairs = [Pair(group, full["none"]) for group in full.values()]
    found = [make_table("Twenty steps of the original's mitigations", note, pairs,
                        [METHOD, MINUS, BOTH, ENDS, decided, *others])]
    lora = [group for (name, _), group in arms.items() if name == LORA]
    if lora and RLOO in full:
        note = ("RLOO on word problems as above: rank 8 at two rates, and all weights at 5e-6. * as above, over both "
                f"rates. {what_is_seen([*lora, full[RLOO]])}")
        pairs = [Pair(group, full[RLOO]) for group in (*lora, full[RLOO])]
        found.append(make_table("Rank 8 beside all weights", note, pairs, [
            METHOD, BOTH, ENDS, Column("minus all weights", verdict, lambda pair: ""), beside("entropy"),
            beside("gradient norm"), beside("seconds a step")]))
    return found
