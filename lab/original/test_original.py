"""The original's undetached weights: by hand, by autograd, in a run; and its types of tokens, in tables."""
import math

import numpy as np
import pytest
import tokenizers
import torch

import analyze
from lab.original import roles, undetached
from methods import MITIGATIONS
from mitigations import reweighting
from tests.fixtures import make_batch
from tests.test_analyze import make_run, number, table_of

LN2 = math.log(2)


def test_weights_by_hand_and_by_autograd():
    """Guards against an epsilon at the wrong place, and a gradient that is not the one their loss had."""
    logprob = torch.tensor([[0.0, -LN2, -2 * LN2], [-LN2, 0, 0]], requires_grad=True)  # p is 1, 1/2, 1/4 and 1/2, 1
    batch = make_batch([3, 2], [1.0, 1.0], logprob=logprob.detach(), normalize="none")
    function = reweighting(undetached.inverse_undetached)
    MITIGATIONS.pop(function.name)
    credit = function(batch, epsilon=0.5)
    with pytest.raises(ValueError, match="^--epsilon "):
        function(batch, epsilon=0.0)
    half, quarter = 0.5 / (LN2 + 0.5) ** 2, 0.5 / (2 * LN2 + 0.5) ** 2
    torch.testing.assert_close(credit, torch.tensor([[2, half, quarter], [half, 2, 0]]))
    (logprob / (0.5 - logprob))[batch.mask].sum().backward()  # what their loss had; |log p| is -log p
    torch.testing.assert_close(logprob.grad, credit)


def test_the_command_trains_with_it(run_program, tmp_path):
    """Guards against a flag that reaches nothing, and weights that are rescaled."""
    words = ("--mitigation inverse_undetached --epsilon 0.2 --normalize none --steps 1 --questions 2 --answers 4 "
             f"--max_new_tokens 24 --eval_problems 4 --pass_at 0 --out {tmp_path / 'run'}")
    run_program(undetached, *words.split())
    MITIGATIONS.pop("inverse_undetached")
    log = np.load(tmp_path / "run" / "credit" / "step-000001.npz")
    weight = 0.2 / (np.abs(log["logprob"]) + 0.2) ** 2
    np.testing.assert_allclose(log["credit"], log["advantage"] * weight, rtol=1e-5)
    assert np.ptp(weight) > 1 and log["advantage"].any()


def test_lone_spaces_are_left_out_of_their_type_alone(tmp_path):
    """Guards against a space with a word or a digit in its token, and one that vanishes from the other tables."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"Ġ": 0, "Ġ5": 1, "a": 2, "ĠĠ": 3, "<|im_end|>": 4}, []))
    library.add_special_tokens(["<|im_end|>"])
    (tmp_path / "checkpoint").mkdir()
    library.save(str(tmp_path / "checkpoint" / "tokenizer.json"))
    log = {"token": np.array([0, 1, 2, 3, 0]), "role": np.array([0, 1, 0, 0, 2])}
    assert roles.no_spaces(log, tmp_path).tolist() == [-1, 1, 0, 0, -1]


def test_tags_count_as_filler_in_tables_of_one_run_and_of_several(run_program, tmp_path):
    """Guards against end tokens that stay a type of their own, positions that change, and a flag that only one of the
    two kinds of tables follows."""
    runs = [make_run(tmp_path / name, 0.75, mitigation=name) for name in ("none", "m")]
    log = analyze.read_log(runs[0])
    assert log["role"].tolist() == [0, 2, 0, 1, 1, 2] * 2
    assert roles.tags_as_filler(log, runs[0]).tolist() == [0, 0, 0, 1, 1, 0] * 2
    expected = ((1 + 0.5 + 1 + 0) / 4) / (2.125 / 2)  # of contribution, filler / reasoning
    run_program(roles, "--types", "original", runs[0])
    assert f"Filler / reasoning: {expected:.2f} by contribution" in (runs[0] / "analysis" / "tables.md").read_text()
    run_program(roles, "--types", "original", *runs)
    assert number(table_of(runs[0])["m"]["contribution, filler / reasoning"]) == pytest.approx(expected, abs=6e-4)
