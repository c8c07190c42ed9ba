"""The table of many responses, against hand computations."""
import numpy as np

from lab.estimates import points
from lab.study.many import table_many
from lab.study.test_tables import area_runs, study_run
from plumbing.report import welch


def test_each_rate_has_its_own_rloo_and_all_have_the_same_longer_run():
    """Guards against RLOO at another rate, the longer run at equal steps, and GRPO with many responses."""
    def line(full, spent):  # success and cost, in proportion to the step
        return {"end": full, "curve": {0.0: 0.0, 3.0: full / 3, 9.0: full},
                "spent": {0.0: 0.0, 3.0: spent / 3, 9.0: spent}}

    longer = [study_run("none", seed, **line(end, 80.0), setting="steps=560 advantage=rloo")
              for seed, end in enumerate([0.5, 0.6])]
    many = [study_run("none", seed, **line(end, 40.0), setting="lr=0.00028 answers=45 advantage=rloo", area=end / 2)
            for seed, end in enumerate([0.7, 0.8])]
    parts = {"main": area_runs("none", 0.2, 0.3), "budget": longer + area_runs("none answers=45", 0.9, 0.9),
             "test": area_runs("none lr=0.00028 advantage=rloo", 0.25, 0.26, 0.27), "many": many}
    assert table_many(parts | {"budget": []}) is None
    table = table_many(parts)
    (row,) = table.rows
    found = dict(zip(table.header, row))
    assert row[:4] == ["RLOO answers=45", "0.00028", "2", "4.00"] and found["seeds of both"] == "2, 3"
    assert found["area - RLOO"] == points(welch(np.array([0.35, 0.4]), np.array([0.25, 0.26, 0.27])))
    assert found["area - 560 steps"] == points(welch(np.array([0.35, 0.4]), np.array([0.125, 0.15])))
    assert found["end - 560 steps"] == points(welch(np.array([0.7, 0.8]), np.array([0.25, 0.3])))
