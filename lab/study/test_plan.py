"""The runs that stage one decides, by hand.

Run it:  python -m pytest lab/study/test_plan.py
"""
from lab.study import plan


def rows_of(best, outwards=()):
    """Rows in which each method is best at one of the three rates, and at the ones further out where they were run."""
    areas = {(name, rate): 0.5 - 100 * abs(rate - best[name]) for name in plan.TUNED for rate in plan.RATES}
    areas |= dict(outwards)
    return {plan.run_name("easy", plan.with_rate(name, rate), seed): {"area": str(area + 0.01 * seed)}
            for (name, rate), area in areas.items() for seed in plan.SEEDS}


def test_what_follows_from_stage_one():
    """Guards against a decision before the last run, an edge tried twice or not at all, and another method's rate."""
    best = dict.fromkeys(plan.TUNED, 2e-4) | {"ppo": 2.8e-4, "vineppo": 1.4e-4}
    rows = rows_of(best)
    assert plan.decided_parts(dict(list(rows.items())[1:])) == {}
    edge = plan.decided_parts(rows)
    assert edge == {"edge": [("easy", ("ppo --lr 0.0004 --step_length true", "vineppo --lr 0.0001 --step_length true"),
                              plan.SEEDS)]}
    parts = plan.decided_parts(rows_of(best, {("ppo", 4e-4): 0.9, ("vineppo", 1e-4): 0.1}.items()))
    assert parts["edge"] == edge["edge"]
    twenty, ten = parts["test"]
    assert len(twenty[1]) == 5 and twenty[2] == range(30, 50) and ten[2] == range(30, 40)
    assert "ppo --lr 0.0004 --step_length true --eval_every 10" in twenty[1]
    assert ten[1] == ("vineppo --lr 0.00014 --step_length true --eval_every 10",)
    assert {flags.split("--lr ")[1].split()[0] for _, listed, _ in parts["many"][:3] for flags in listed} == {
        "0.0002", "0.0003", "0.0004"}
    assert sum(len(listed) * len(seeds) for _, listed, seeds in parts["oracle"]) == 7 * 5 + 2 * 3 + 2
