"""The tables of lab/real/report.py: their arithmetic by hand, and the page's table against the published arrays."""
import sys

import numpy as np
import pytest

from analyze import read_log, with_measures
from lab.real import report, twenty
from plumbing.comparison import Run
from tests.test_analyze import make_run


def test_a_ratio_is_that_of_mean_sizes():
    """Guards against a ratio of sums, of signed values, or of means over puzzles of unequal length."""
    log = {"puzzle": np.array([0, 0, 0, 7, 7]), "contribution": np.array([-4.0, 2.0, 1.0, 3.0, -1.0])}
    over, under = np.array([True, False, False, True, True]), np.array([False, True, True, False, False])
    assert report.ratio_of(log, "contribution", over, under).value == pytest.approx((8 / 3) / (3 / 2))


def test_the_tables_are_those_of_the_published_arrays(tmp_path, monkeypatch):
    """Guards against a table that its arrays no longer give."""
    for name in ("data", "runs.csv"):
        (tmp_path / name).symlink_to(report.ROOM / name)
    tracked = (report.ROOM / "tables.md").read_text(encoding="utf-8")
    monkeypatch.setattr(report, "ROOM", tmp_path)
    monkeypatch.setattr(report, "draw", lambda *_: None)
    monkeypatch.setattr(report, "draw_learning", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["report.py"])
    report.main()
    assert (tmp_path / "tables.md").read_text(encoding="utf-8") == tracked and " nan" not in tracked


def test_a_run_by_tens_of_steps_by_hand():
    """Guards against tokens counted as responses, groups of two steps taken for one, and a share of the reward."""
    def steps(step, rewards):
        """Two responses of two tokens each to one puzzle: a word of size 3 and a digit of size 1."""
        return ((step, response, 0, position, reward, (3.0, 1.0)[position], position)
                for response, reward in enumerate(rewards) for position in range(2))

    names = ("step", "response", "group", "position", "reward", "logprob", "role")
    columns = map(np.array, zip(*steps(1, (1.1, 0.05)), *steps(2, (0.1, 0.1)), *steps(11, (1.0, 1.1)), strict=True))
    log = dict(zip(names, columns))
    log |= {"credit": np.ones(12), "logit_grad": -log["logprob"], "entropy": np.full(12, 0.5),
            "in_answer": np.arange(12) % 4 == 3}
    table = report.table_learning("A run", with_measures(log), {name: np.array([x]) for name, x in (
        ("step", 11.0), ("heldout_success", 0.5), ("heldout_stderr", 0.1))})
    assert table.title == "A run while it learns" and "50.0% ± 19.6% at step 11" in table.note
    first, second = (dict(zip(table.header, row)) for row in table.rows)
    assert [*first.values()] == ["1-2", "4", "0.25", "0.88", "2", "0.500", "50%", "50.0%", "25.0%", "3.00", "3.00"]
    expected = {"steps": "11-11", "right": "1.00", "format": "0.50", "equal groups": "0%"}
    assert second.items() >= expected.items()


@pytest.mark.parametrize("inverse, verdict", [
    ((0.0, 0.02, 0.04), "-50.0 ± 4.5 *"), ((0.45, 0.47, 0.49), "-5.0 ± 4.5")])
def test_three_seeds_get_a_verdict_and_two_get_none(inverse, verdict):
    """Guards against a difference without its seeds, and a correction over other contrasts than were decided on: -5.0
    has p = 0.04, significant alone and not beside a contrast that is open. ± by hand, with four degrees of freedom and
    a spread of 2 points on either side: 2.776 * 2 * sqrt(2 / 3)."""
    figures = dict.fromkeys(("answered", "right of answered", "contribution, first / last",
                             "contribution, filler / reasoning", "gradient norm", "entropy", "seconds a step"), 0.5)
    ends = {"none": (0.5, 0.52, 0.54), twenty.INVERSE: inverse, "outcome_conditional": (0.3, 0.5),
            "none advantage=rloo": (0.5, 0.52, 0.54)}
    runs = [Run(f"{name}{seed}", f"{name} lr=5e-06", "", False, seed, figures | {"end": end})
            for name, listed in ends.items() for seed, end in enumerate(listed)]
    rank = [Run(f"{rate}{seed}", f"{twenty.LORA} lr={rate}", "", False, seed, figures | {"end": end})
            for rate, listed in (("5e-05", inverse), ("1.5e-05", (0.1,))) for seed, end in enumerate(listed)]
    mitigations, adapters = twenty.tables_twenty({"mitigations": runs, "rank": rank})
    assert {row[0]: row[4] for row in mitigations.rows} == {
        "GRPO": "", "`outcome_conditional`": "", "RLOO": "0.0 ± 4.5", f"`{twenty.INVERSE}`": verdict}
    assert sorted(row[3] for row in adapters.rows) == sorted(["", "", verdict])
    assert "deviation of 2.0 points" in mitigations.note
    higher = [run._replace(label=f"{twenty.LORA} lr=0.00015") for run in rank[:3]]  # a rate of no family
    _, adapters = twenty.tables_twenty({"mitigations": runs, "rank": rank + higher})
    assert sorted(row[3] for row in adapters.rows) == sorted(["", "", verdict, verdict.removesuffix(" *")])


def test_what_is_published_of_a_run_is_its_log_and_its_metrics(tmp_path, monkeypatch):
    """Guards against steps left out or in another order, and a file in place of an array."""
    run = make_run(tmp_path / "run", 0.75, steps=3, mitigation="none")
    monkeypatch.setattr(sys, "argv", ["report.py", "--publish", str(run), str(tmp_path / "data")])
    report.main()
    published, log = with_measures(dict(np.load(tmp_path / "data" / "credit.npz"))), read_log(run)
    assert published.keys() == log.keys() - {*report.UNPUBLISHED} and log["step"].max() == 3
    assert all(np.array_equal(published[name], log[name]) for name in published)
    assert (tmp_path / "data" / "metrics.csv").read_bytes() == (run / "metrics.csv").read_bytes()
