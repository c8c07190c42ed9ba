"""Predictions: read from their page, and judged by hand."""
from lab.study import predicted
from lab.study.test_tables import study_run

FACTS = "## What was measured\n\n|  |  |\n|--|--|\n| share of the sum of abs(A*) on filler | 12.5% |\n"
WITHIN = ("## Credit against A* and the solver, within responses\n\n| method | Spearman |\n|--|--|\n"
          "| none |  |\n| vineppo | 0.40 (0.30 to 0.50) |\n")


def test_every_prediction_names_something_that_is_measured():
    """Guards against a row that is read as another one."""
    rows = predicted.read_predictions()
    others = ("GRPO: end", "`vineppo` - RLOO with", "share of", "`vineppo`'s rank")
    known = [name for name, _ in rows if name in predicted.MINUS or name.startswith(others)]
    assert len(rows) == 10 and known == [name for name, _ in rows]
    assert rows[0] == ("GRPO: end - start", {"latin": (15, 40), "math": (15, 45)})
    assert all(len(x) == 2 and x[0] < x[1] for _, intervals in rows for x in intervals.values())


def test_predictions_are_judged_by_hand(tmp_path, monkeypatch):
    """Guards against the end for the area, the wrong baseline, and a share taken for percent."""
    monkeypatch.setattr(predicted, "TRUTH", tmp_path)
    for level in ("latin", "math"):
        (tmp_path / f"scores-{level}.md").write_text(FACTS + "\n" + WITHIN)
    ends = {"none": 0.5, "none advantage=rloo": 0.52, "entropy_ratio advantage=rloo": 0.4, "ppo": 0.6, "vineppo": 0.7,
            "token_type": 0.5, "random": 0.3, "none answers=24 advantage=rloo": 0.9}
    runs = [study_run(*label.partition(" ")[::2][:1], seed, end + 0.01 * seed, label.partition(" ")[2])
            for label, end in ends.items() for seed in range(2)]
    parts = {"main": runs[:-2], "budget": runs[-2:]}
    table = predicted.table_predictions({"latin": parts, "math": parts})
    found = {row[0]: row[1:4] for row in table.rows}
    assert found["GRPO: end - start"][1].startswith("40.5 ±") and found["GRPO: end - start"][2] == "no"  # up to 40
    assert found["RLOO - GRPO"][1].startswith("1.0 ±") and found["RLOO - GRPO"][2] == "yes"  # area is half of the end
    assert found["`entropy_ratio` on RLOO - RLOO"][1].startswith("-6.0 ±")
    assert found["`vineppo` - RLOO with 24 answers, equal cost"][1].startswith("-10.0 ±")
    assert [row[2] for row in (found["share of abs(A\\*) on words (line breaks in squares)"],
                               found["`vineppo`'s rank in response with A\\*"])] == ["no", "yes"]
    assert predicted.table_predictions({"latin": parts}) is None
