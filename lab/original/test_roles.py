"""Other types of tokens: by hand, and in the tables that they change."""
import sys

import numpy as np
import pytest
import tokenizers

import analyze
from lab.original import roles
from tests.test_analyze import make_run, number, table_of


def test_lone_spaces_are_left_out_of_their_type_alone(tmp_path):
    """Guards against a space with a word or a digit in its token, and one that vanishes from the other tables."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"Ġ": 0, "Ġ5": 1, "a": 2, "ĠĠ": 3, "<|im_end|>": 4}, []))
    library.add_special_tokens(["<|im_end|>"])
    (tmp_path / "checkpoint").mkdir()
    library.save(str(tmp_path / "checkpoint" / "tokenizer.json"))
    log = {"token": np.array([0, 1, 2, 3, 0]), "role": np.array([0, 1, 0, 0, 2])}
    assert roles.no_spaces(log, tmp_path).tolist() == [-1, 1, 0, 0, -1]


def test_tags_count_as_filler_in_tables_of_one_run_and_of_several(tmp_path, monkeypatch, capsys):
    """Guards against end tokens that stay a type of their own, positions that change, and a flag that only one of the
    two kinds of tables follows."""
    runs = [make_run(tmp_path / name, 0.75, mitigation=name) for name in ("none", "m")]
    assert analyze.read_log(runs[0])["role"].tolist() == [0, 2, 0, 1, 1, 2] * 2
    assert roles.read_log(runs[0], "original")["role"].tolist() == [0, 0, 0, 1, 1, 0] * 2
    expected = ((1 + 0.5 + 1 + 0) / 4) / (2.125 / 2)  # of contribution, filler / reasoning
    monkeypatch.setattr(sys, "argv", ["roles.py", "--types", "original", str(runs[0])])
    roles.main()
    assert f"Filler / reasoning: {expected:.2f} by contribution" in (runs[0] / "analysis" / "tables.md").read_text()
    monkeypatch.setattr(sys, "argv", [*sys.argv, str(runs[1])])
    roles.main()
    assert number(table_of(runs[0])["m"]["contribution, filler / reasoning"]) == pytest.approx(expected, abs=6e-4)
