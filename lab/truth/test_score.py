"""The score of one credit function: the batch rebuilt from its columns, published credit and scores, the command."""
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

import countdown_task
import grpo
from lab import statistics
from lab.estimates import read_cell
from lab.truth import measure as gt
from lab.truth import score as sc
from methods import MITIGATIONS
from qwen2_model import load_model
from rollout import Policy, TokenBatch, rollout
from train import BUNDLED, Settings

PUZZLES = countdown_task.load("heldout", 2)
SETTINGS = {"model": "countdown-tiny", "data": "", "questions": 2, "answers": 4, "max_new_tokens": 50, "seed": 3}
PUBLISHED = np.load(sc.TRUTH / "ground_truth.npz")["methods"].tolist()
CHEAP = [name for name in PUBLISHED if name not in ("attention_credit", "causal_ablation", "vineppo", "ppo", "dpo",
                                                    "value_change", "learned_importance")]


@pytest.fixture(scope="module")
def small(tokenizer):
    """Eight responses of the bundled model, some of them cut off, and their columns with a made-up truth."""
    model = load_model(BUNDLED)
    policy = Policy(model, tokenizer, countdown_task, reference=model)
    batch = rollout(policy, PUZZLES, Settings(seed=3, answers=4, max_new_tokens=50), step=0)
    batch.advantage = grpo.compare(batch)
    truth = gt.describe(batch, SETTINGS)
    truth["packets"] = (truth["logprob"] < -0.005) * 3
    solved = np.random.default_rng(0).integers(0, 13, (len(truth["token"]), 2))
    truth["solved"] = solved * (truth["packets"] > 0)[:, None]
    gt.add_values(truth)
    truth["a_star"] += 1e-6 * (truth["packets"] > 0)  # nowhere exactly 0 where there were rollouts
    return batch, truth | {"methods": np.array(["none"]), "credits": truth["advantage"][None],
                           "complete": np.array(True)}


@pytest.fixture(scope="module")
def published():
    """The truth that the command reads, and its batch."""
    truth = sc.read_truth(sc.TRUTH / "ground_truth.npz")
    return truth, sc.load_batch(truth, sc.Options(), ())


def content(batch):
    """Every field of a batch but `ask`."""
    values = {field.name: getattr(batch, field.name) for field in fields(TokenBatch) if field.name != "ask"}
    return {name: x.tolist() if isinstance(x, Tensor) else x for name, x in values.items()}


# ---------------------------------------------------------------------------------------------------- the batch


@pytest.mark.parametrize("advantage, normalize", [("grpo", "response"), ("rloo", "none")])
def test_a_batch_comes_back_from_its_columns(small, advantage, normalize):
    """Guards against padding, ends, puzzles, limits or random numbers other than those of the sampled batch."""
    batch, truth = small
    again = sc.rebuild(truth, batch.ask.policy, advantage=advantage, normalize=normalize)
    expected_advantage = grpo.compare(batch, advantage)
    expected = replace(batch, normalize=normalize, advantage=expected_advantage)
    assert 0 < batch.ended.sum() < len(batch.ended)
    assert content(again) == content(expected)
    assert again.ask.s.max_new_tokens == 50
    assert torch.equal(MITIGATIONS["random"](again), MITIGATIONS["random"](expected))


@pytest.mark.parametrize("name", CHEAP)
def test_published_credit_is_given_again(published, name):
    """Guards against a batch that looks the same and gets other credit: random draws and normalization included."""
    truth, batch = published
    credit = MITIGATIONS[name](batch)[batch.mask].numpy()
    assert credit == pytest.approx(truth["credits"][truth["methods"].tolist().index(name)], abs=1e-4)


# --------------------------------------------------------------------------------------------------- the scores


def test_published_scores_come_out_again(published):
    """Guards against scores by another recipe than that of the table beside which they are shown."""
    truth, batch = published
    credit = truth["credits"][PUBLISHED.index("token_type")]
    own, *others = sc.table_scores("token_type", credit, batch, truth, sc.SCORES).rows
    assert [row[0] for row in others] == ["GRPO", "random (control)", "token_type (best rank in response)",
                                          "half against half"]
    for found, written in zip(own[1:], others[2][1:], strict=True):
        assert read_cell(found)[:3] == pytest.approx(read_cell(written)[:3], abs=0.0101, nan_ok=True)


def test_columns_and_the_best_method_by_hand():
    """Guards against a figure under another heading, and a control, a measure or an empty cell as the best method."""
    ranks = {"none": "", "random": "0.70", "ppo": "-0.20", "ktae": "0.10 (-0.90 to 0.80)", "A*abs": "0.90"}
    pooled = ["method", "Spearman", "cosine of update"], [[name, "0.9", "0.8"] for name in ranks]
    within = (["method", "Spearman", "Pearson", "solver", "effective sample size"],
              [[name, rank, "-", "0.3", "0.6"] for name, rank in ranks.items()])
    cells = sc.by_method(pooled, within)
    assert cells["ppo"] == ["0.9", "0.8", "-0.20", "0.3", "0.6"]
    assert sc.best_method(cells) == "ktae"


# --------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def folder(small, tmp_path, monkeypatch):
    """A folder with the small truth, which the command reads in place of the published one."""
    np.savez(tmp_path / "ground_truth.npz", **small[1])
    monkeypatch.setattr(sc, "TRUTH", tmp_path)
    monkeypatch.setattr(statistics, "RESAMPLES", 50)
    return tmp_path


def test_the_command_prints_the_table_and_draws_the_credit(small, folder, monkeypatch, capsys):
    """Guards against hyper-parameters or an advantage that never reach the function, and credit of another token."""
    drawn, batch = [], sc.rebuild(small[1], small[0].ask.policy, advantage="rloo")
    draw = sc.draw
    monkeypatch.setattr(sc, "draw", lambda *arguments: (drawn.extend(arguments), draw(*arguments)))
    words = f"--mitigation outcome_conditional --think_discount 0 --advantage rloo --out {folder / 'out'}"
    monkeypatch.setattr(sys, "argv", ["score.py", *words.split()])
    sc.main()
    text = capsys.readouterr().out
    title = text.splitlines()[0]
    assert title == "## Credit of outcome_conditional think_discount=0.0 advantage=rloo against A*"
    assert "| outcome_conditional think_discount=0.0 advantage=rloo (yours) |" in text
    expected = MITIGATIONS["outcome_conditional"](batch, think_discount=0.0)[batch.mask]
    assert drawn[0]["credit"] == pytest.approx(expected.numpy())
    assert {path.name for path in (folder / "out").iterdir()} == {"score-outcome_conditional.png"}


@pytest.mark.parametrize("words, said", [
    ("magic", "magic"), ("none --power 1", "takes no --power"), ("vineppo --k 0", "--k must be"),
    ("ppo", "critic.safetensors"), ("none --truth nowhere", "nowhere")])
def test_what_cannot_work_is_one_sentence(words, said, folder, refusal):
    """Guards against a traceback, and an untrained critic in place of one that is missing."""
    assert said in refusal(sc, "--mitigation", *words.split(), "--out", folder / "out")
    assert not (folder / "out").exists()


@pytest.mark.parametrize("fault, said", [
    ({"complete": np.array(False)}, "lacks some rollouts"), ({"a_star_error": None}, "has no a_star_error"),
    ({"settings": np.array('{"model": "lost"}')}, "about the model lost, and there is no"),
    ({"piece": np.array([{}] * 9)}, "can't be read")])
def test_a_truth_that_can_not_be_used_is_one_sentence(fault, said, small, folder, refusal):
    """Guards against a traceback for an unfinished file, another program's, or that of a model that is gone."""
    columns = {name: column for name, column in (small[1] | fault).items() if column is not None}
    np.savez(folder / "ground_truth.npz", **columns)
    assert said in refusal(sc, "--mitigation", "none", "--out", folder / "out")
