"""Rows of lab/study/runs.csv, names of methods, and which of them are compared."""
import pytest

from lab.study import rows as study_rows
from lab.study.run import ROOT
from plumbing.report import Estimate, write_csv
from plumbing.runs import Run


def test_asterisks_are_corrected_for_all_differences():
    """Guards against an asterisk for p = 0.04 beside another difference."""
    differences = {p: Estimate(0.02, 0.01, 0.03, p) for p in (0.001, 0.04, 0.5)}
    assert list(study_rows.with_asterisks(differences).values()) == ["2.0 ± 1.0 *", "2.0 ± 1.0", "2.0 ± 1.0"]
    assert study_rows.with_asterisks({"a": Estimate(0.02)}) == {"a": "2.0"}  # a single seed has no interval


def test_two_forms_are_compared_beside_the_main_table():
    """Guards against all other forms among the methods, and a level without forms or longer runs."""
    def run(label):
        return Run(label, label, "", label == "none", 0, {"end": 0.5})

    forms = [run(label) for label in (study_rows.CHEAPER, study_rows.RATIO, "ppo gamma=0.99")]
    found = study_rows.compared_groups({"main": [run("none")], "forms": forms, "budget": [run("none steps=400")]})
    assert {group.label for group in found} == {"none", "none steps=400", study_rows.CHEAPER, study_rows.RATIO}
    assert [group.label for group in study_rows.compared_groups({"main": [run("none")]})] == ["none"]


def test_hard_rows_alone_are_refused_in_one_sentence(tmp_path):
    """Guards against a traceback where nothing was trained on easy puzzles, which have most tables."""
    row = study_rows.read_rows(ROOT / "lab/study/runs.csv")[-1] | {"level": "hard", "part": "main", "method": "none"}
    write_csv([row], tmp_path / "runs.csv")
    for file in ("runs.csv", "nowhere.csv"):
        with pytest.raises(ValueError, match="^there is no run of none on easy puzzles[^\n]*$"):
            study_rows.read_versions(tmp_path / file)


def test_a_torn_table_of_runs_is_refused_in_one_sentence(tmp_path):
    """Guards against a traceback where a merge conflict was left."""
    (tmp_path / "runs.csv").write_text("run,version\n<<<<<<< HEAD\n")
    with pytest.raises(ValueError, match="^[^\n]*merge conflict[^\n]*$"):
        study_rows.read_versions(tmp_path / "runs.csv")
