"""When a run leaves the reference, by hand."""
import csv
import json
import sys

import numpy as np
import pytest

from lab.study import collapse
from plumbing.metrics import ALWAYS, COLUMNS


def test_smooth_is_the_mean_of_the_last_five():
    """Guards against steps to come, and a first value divided by five."""
    values = np.array([1.0, 2, 3, 10, 0, 5, 5])
    expected = [np.mean(values[max(0, i - 4) : i + 1]) for i in range(7)]
    assert collapse.smooth(values) == pytest.approx(expected)


@pytest.mark.parametrize("start, length, expected", [(20, 3, (21, "down")), (20, 2, None), (0, 40, (1, "down"))])
def test_a_run_leaves_at_the_first_of_three_steps_far_away(start, length, expected):
    """Guards against a short excursion, a step too late, and the wrong direction."""
    values, mean = np.ones(40), np.ones(40)
    values[start : start + length] -= 0.31
    assert collapse.leaves(values, mean, 0.1) == expected
    assert collapse.leaves(mean - (values - mean), mean, 0.1) == (expected and (expected[0], "up"))
    assert collapse.leaves(values, mean, 0.2) is None


def test_the_reference_by_hand():
    """Guards against the spread over steps in place of seeds."""
    runs = [dict.fromkeys(collapse.MEASURES, np.array(row)) for row in ([1.0, 5, 9], [3.0, 5, 13])]
    mean, usual = collapse.reference(runs)["format"]
    assert mean.tolist() == [2, 5, 11]
    assert usual == pytest.approx(((2 + 0 + 8) / 3) ** 0.5)


def config(method, **settings):
    """A config.json."""
    return {"settings": {"mitigation": method, "seed": 0, "steps": 60} | settings, "method": {}}


def write_run(folder, method, success, length, **settings):
    """A run folder of sixty steps."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(method, **settings)))
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerow({"step": 0, "heldout_success": 0.3})
        for step in range(1, 61):
            row = dict.fromkeys({*collapse.MEASURES, *ALWAYS}, 0.5) | {"success": success(step), "length": length(step)}
            writer.writerow({"step": step} | row)


@pytest.mark.parametrize("changed, said", [({"advantage": "rloo"}, "at least two runs of GRPO"),
                                           ({"lr": 1e-4}, "same settings")])
def test_runs_with_other_settings_are_refused(changed, said, tmp_path):
    """Guards against RLOO's runs, whose method is `none` too, among those of GRPO, and runs of another level."""
    for i in range(3):
        write_run(tmp_path / f"{i}", "none" if i < 2 else "a", lambda step: 0.5, lambda step: 50)
    (tmp_path / "1" / "config.json").write_text(json.dumps(config("none", **changed)))
    with pytest.raises(ValueError, match=said):
        collapse.write_page([tmp_path / f"{i}" for i in range(3)])


def test_the_command(tmp_path, monkeypatch, capsys):
    """Guards against a run that learned more among those that fell, and steps of another measure."""
    for seed in (0, 1):
        write_run(tmp_path / f"none-seed{seed}", "none", lambda step: 0.5 + 0.01 * seed, lambda step: 50 + seed)
    write_run(tmp_path / "a-seed0", "a", lambda step: 0.5 * (step < 40), lambda step: 50 + 30 * (step >= 20))
    write_run(tmp_path / "b-seed0", "b", lambda step: 0.9, lambda step: 90)
    monkeypatch.setattr(collapse, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["collapse.py", *map(str, sorted(tmp_path.glob("*-seed*")))])
    collapse.main()
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "a, seed 0" in line)
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["a, seed 0", "40, down", "", "", "20, up", "", ""]
    row = next(line for line in out.splitlines() if line.startswith("| the other"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["the other 1", *"000", "1 up", *"00"]
    assert "b, seed 0" not in out and "1 of 2 runs fell" in out
    assert (tmp_path / f"collapse-{tmp_path.name}.png").is_file()


def test_levels_and_updates_are_told_apart(tmp_path, monkeypatch):
    """Guards against one reference for two levels, GRPO with several updates in the reference, and a lead that hides a
    fall."""
    for level, height in (("easy", 0.8), ("hard", 0.4)):
        for seed in (0, 1):
            write_run(tmp_path / level / f"none-seed{seed}", "none", lambda step: height + 0.01 * seed, lambda step: 50)
        write_run(tmp_path / level / "none-4", "none", lambda step: height + (0.1 if step < 30 else -0.2),
                  lambda step: 50, updates_per_batch=4, clip_high=0.28, answers=45)
    monkeypatch.setattr(collapse, "RESULTS", tmp_path)
    collapse.write_page(sorted(tmp_path.glob("*/*")))
    text = (tmp_path / "collapse-tables.md").read_text()
    assert text.count("1 of 1 runs fell") == 2
    rows = [line.split("|")[1:3] for line in text.splitlines() if "seed 0" in line]
    expected = ["GRPO, 45 responses, 4 updates, seed 0", "31, down"]
    assert [[cell.strip() for cell in row] for row in rows] == [expected] * 2
