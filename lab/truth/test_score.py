"""The score of one credit function: the batch rebuilt from its columns, published credit and scores, the command."""
from dataclasses import replace

import numpy as np
import pytest
import torch

import countdown_task
from grpo import compare
from lab.statistics import read_cell, read_column
from lab.truth import score as sc
from lab.truth.measure import describe
from methods.registry import CREDIT_FUNCTIONS
from methods.queries import Queries
from rollout import rollout
from settings import Settings

PUBLISHED = np.load(sc.TRUTH / "ground_truth.npz")["methods"].tolist()


@pytest.fixture(scope="module")
def published():
    """The truth that the command reads, and its batch."""
    truth = sc.read_truth(sc.TRUTH / "ground_truth.npz")
    return truth, sc.load_batch(truth, sc.Options(), ())


def test_a_batch_comes_back_from_its_columns(policy):
    """Guards against padding, ends, puzzles, limits or random numbers other than those of the sampled batch."""
    s = Settings(seed=3, responses=4, max_new_tokens=50, normalize="none")
    batch = rollout(policy, countdown_task.load("heldout", 2), s, step=0)
    batch.ask = Queries(policy, batch, s, 0)
    batch.advantage = compare(batch, "rloo")
    again = sc.rebuild(describe(batch, {"questions": 2, "max_new_tokens": 50, "seed": 3}), policy, "rloo", "none")
    assert 0 < batch.ended.sum() < len(batch.ended)
    plain = lambda x: x.tolist() if isinstance(x, torch.Tensor) else (
        {name: plain(y) for name, y in x.items()} if isinstance(x, dict) else x)
    for name, x in vars(batch).items():
        assert name == "ask" or plain(getattr(again, name)) == plain(x), name
    assert again.ask.s.max_new_tokens == 50
    assert torch.equal(CREDIT_FUNCTIONS["random"](again), CREDIT_FUNCTIONS["random"](batch))


def test_the_best_method_is_one_with_a_score():
    """Guards against a control, a measure or an empty cell as the best method."""
    ranks = {"none": np.nan, "random": 0.7, "ppo": -0.2, "ktae": 0.1, "A·abs(log p)": 0.9}
    assert sc.best_method({name: sc.Estimate(rank) for name, rank in ranks.items()}) == "ktae"


@pytest.mark.slow
def test_the_command_scores_and_draws_the_credit(published, run_program, tmp_path, monkeypatch, capsys):
    """Guards against hyper-parameters or an advantage that never reach the function, and credit of another token."""
    drawn, scored, draw = [], [], sc.draw
    monkeypatch.setattr(sc, "draw", lambda *arguments: (drawn.append(arguments), draw(*arguments)))
    monkeypatch.setattr(sc, "credit_scores", lambda credits, *_: scored.append(credits) or dict.fromkeys(
        credits, sc.Score(*[sc.Estimate(0.5)] * 6)))
    words = f"--mitigation outcome_conditional --think_discount 0 --advantage rloo --out {tmp_path / 'out'}"
    run_program(sc, *words.split())
    text = capsys.readouterr().out
    assert text.startswith("## Credit of outcome_conditional think_discount=0.0 advantage=rloo against A*\n")
    assert "| outcome_conditional think_discount=0.0 advantage=rloo (yours) |" in text
    (highest,) = (float(line.split("|")[4].split()[0]) for line in text.splitlines() if "whatever the credit" in line)
    order, square = np.argsort(-published[0]["entropy"], kind="stable"), published[0]["a_star_halves"].prod(1)
    assert highest == pytest.approx(square[order[: len(order) // 10]].sum() / square.sum(), abs=0.006)
    batch = sc.rebuild(published[0], published[1].ask.policy, advantage="rloo")
    expected = CREDIT_FUNCTIONS["outcome_conditional"](batch, think_discount=0.0)[batch.mask].numpy()
    plain = batch.advantage[:, None].expand_as(batch.mask)[batch.mask].numpy()
    assert drawn[0][2] == pytest.approx(expected)
    assert [*scored[0].values()] == [pytest.approx(expected), pytest.approx(plain)]
    assert "| none --advantage rloo " in text and "| GRPO " not in text and "| minus one on `</think>` " in text
    assert "in words: it finds places about as well as none --advantage rloo (0.50 beside 0.50)" in text
    assert drawn[0][3] == "credit of outcome_conditional think_discount=0.0 advantage=rloo"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"score-outcome_conditional.png"}


@pytest.mark.parametrize("location, rank, places, signs", [
    ((0.5, 0.4, 0.6), (np.nan, np.nan, np.nan), "better than GRPO (0.50 beside 0.20)", "no signs within a response: it is"),
    ((0.1, 0.0, 0.12), (0.1, -0.1, 0.3), "worse than GRPO", "no signs within a response that differ from chance (0.10"),
    ((0.25, 0.1, 0.4), (-0.3, -0.4, -0.2), "about as well as GRPO", "signs within a response that oppose A*'s, by rank -0.30"),
    ((0.25, 0.1, 0.4), (0.3, 0.2, 0.4), "about as well as GRPO", "signs within a response that agree with A*'s, by rank 0.30")])
def test_a_score_in_words(location, rank, places, signs):
    """Guards against a difference that its intervals do not bear, and a sign for its opposite."""
    own = sc.Score(*[sc.Estimate(0.5)] * 6)._replace(location=sc.Estimate(*location), within_spearman=sc.Estimate(*rank))
    said = sc.in_words(own, sc.Estimate(0.2, 0.15, 0.25), "GRPO")
    assert places in said and signs in said


@pytest.mark.slow
@pytest.mark.parametrize("words, fault, said", [
    ("mine", {}, "batch.grades has no letters: the grade of this task"),
    ("ppo", {}, "critic.safetensors"), ("none --truth nowhere", {}, "nowhere"),
    ("none", {"complete": np.array(False)}, "lacks some rollouts"),
    ("none", {"settings": np.array('{"model": "lost"}')}, "about the model lost, and there is no"),
    ("none", {"prompts": np.array(["[1, 2] -> 3"] * 256)}, "was it measured with --data?"),
    ("none", {"settings": np.array('{"model": "countdown-small", "questions": 32, "seed": 0, "max_new_tokens": 9}')},
     "other probabilities")])
def test_what_cannot_be_scored_is_one_sentence(words, fault, said, published, tmp_path, monkeypatch, refusal):
    """Guards against a traceback, and an untrained critic in place of one that is missing."""
    mine = replace(CREDIT_FUNCTIONS["none"], name="mine", function=lambda batch: batch.grades["letters"])
    monkeypatch.setitem(CREDIT_FUNCTIONS, "mine", mine)
    np.savez(tmp_path / "ground_truth.npz", **published[0] | fault)
    monkeypatch.setattr(sc, "TRUTH", tmp_path)
    assert said in refusal(sc, "--mitigation", *words.split(), "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_published_credit_and_scores_come_out_again(published):
    """Guards against a batch that looks the same and gets other credit, random draws and normalization included, and
    scores by another recipe than that of the table beside which they are shown."""
    truth, batch = published
    for name in ("none", "random", "token_type", "entropy_ratio", "tempo", "ktae"):
        credit = CREDIT_FUNCTIONS[name](batch)[batch.mask].numpy()
        assert credit == pytest.approx(truth["credits"][PUBLISHED.index(name)], abs=1e-4), name
    own = sc.credit_scores({"": truth["credits"][PUBLISHED.index("token_type")]}, batch, truth)[""]
    mine, entropy, *others = sc.table_scores("token_type", {"token_type": own}, sc.Estimate(0.39, 0.3, 0.5), sc.SCORES,
                                             "grpo").rows
    assert entropy == ["entropy, whatever the credit", "", "", "0.39 (0.30 to 0.50)", "", ""]
    assert [row[0] for row in others] == ["GRPO", "random (control)", "token_type (best rank in response)",
                                          "minus one on `</think>`", "A·abs(A*) (right sizes, one sign a response)", "half against half"]
    for found, written in zip(mine[1:], others[2][1:], strict=True):
        assert read_cell(found)[:3] == pytest.approx(read_cell(written)[:3], abs=0.0101, nan_ok=True)
    with pytest.raises(ValueError, match="of .*scores.md has no column place: an older version wrote it"):
        read_column(sc.SCORES, sc.ALL, "place")
