"""The truth about each token: values against the enumeration of all continuations, rollouts, the file, the command."""
import functools
import itertools
import json
import shutil
import sys

import numpy as np
import pytest
import torch

import countdown_task
from countdown_task import Puzzle, grade
from grpo import compare
from lab import statistics
from lab.truth import critic as critic_quality
from lab.truth import measure as gt
from lab.truth import solver
from lab.truth.file import by_response, read_truth
from methods import MITIGATIONS
from qwen2_model import Qwen2, read_config
from rollout import Policy, rollout
from tests.fixtures import BUNDLED, make_written
from tests.plain import exact_moments
from train import Settings

PIECES = ("", "<answer>1+2</answer>", "<answer>2-1</answer>", " hm", " so")  # the last answer decides
PUZZLES = [Puzzle((1, 2), 3), Puzzle((1, 2), 1)]
LIMIT = 4


class Pieces:
    """A tokenizer of five tokens, each a whole piece of text; 0 ends a response."""

    end_tokens, size = [0], len(PIECES)

    def decode(self, tokens):
        stops = list(itertools.accumulate((len(PIECES[t]) for t in tokens), initial=0))
        return "".join(PIECES[t] for t in tokens), list(zip(stops, stops[1:]))


class Tiny(Policy):
    """A policy whose prompts are made of those tokens."""

    def prompt(self, puzzle):
        return [3, *puzzle.numbers, 4, puzzle.target]


def tiny_policy(seed):
    """A one-layer Qwen2 with a vocabulary of five."""
    torch.manual_seed(seed)
    size = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
    kind = dict(model_type="qwen2", vocab_size=5, num_hidden_layers=1, tie_word_embeddings=True)
    model = Qwen2(read_config(kind | size))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return Tiny(model, Pieces(), countdown_task)


def described(policy, answers):
    """The columns of ground_truth.npz for responses of the tiny policy, before any rollout."""
    batch = rollout(policy, PUZZLES, Settings(answers=answers, max_new_tokens=LIMIT), step=1)
    batch.advantage = compare(batch)
    return gt.describe(batch, {})


def sampled(policy, truth, rollouts, seed=0, save=lambda: None):
    """The columns with rollouts, and with the values that follow from them."""
    gt.sample_truth(policy, PUZZLES, truth, rollouts, seed, LIMIT, save)
    gt.add_values(truth)
    return truth


def test_values_converge_to_those_of_all_continuations():
    """Guards against rollouts with another limit, first token, prefix or puzzle, and errors that do not fit."""
    policy = tiny_policy(1)
    truth = sampled(policy, described(policy, 10), 500)
    policy.model.double()
    V, A = [], []

    @functools.cache
    def value(puzzle, prefix):
        return exact_moments(policy, puzzle, prefix, LIMIT, lambda *graded: grade(*graded)["answer"])[0]

    for rows in by_response(truth):
        tokens, puzzle = truth["token"][rows].tolist(), PUZZLES[truth["group"][rows[0]]]
        path = [value(puzzle, tuple(tokens[:t])) for t in range(len(tokens) + 1)]
        V, A = V + path[:-1], A + np.diff(path).tolist()
    assert len(np.unique(np.round(V, 6))) > 15
    lengths = np.bincount(truth["response"])
    assert lengths.min() < lengths.max() == LIMIT  # some end, some are cut off
    for name, exact in (("value", V), ("a_star", A)):
        error = truth[f"{name}_error"]
        z = (truth[name] - exact) / np.maximum(error, 1e-9)
        assert np.abs(truth[name] - exact).max() < 0.12
        assert 0.7 < np.sqrt(np.mean(z[error > 1e-4] ** 2)) < 1.3
    first, second = truth["a_star_halves"].T
    tried = truth["packets"] > 0
    assert (first + second) / 2 == pytest.approx(truth["a_star"], abs=1e-12)
    assert 0.8 < np.sqrt(np.mean(((first - second) / 2 / truth["a_star_error"])[tried] ** 2)) < 1.2  # independent


def test_values_backwards_by_hand():
    """Guards against a wrong recursion, wrong errors, and credit for a token without rollouts."""
    p, solved, tried = np.array([0.6, 0.9, 0.25]), np.array([1, 0, 3]), np.array([4, 0, 8])
    V, V_error, A, A_error = gt.values_and_errors(np.log(p), solved, tried, 1.0)
    # A* = (1 - p) (V behind the token - U): 0.75 (1 - 3/8) of the last, then 0.4 (0.53125 - 1/4) of the first
    assert A == pytest.approx([0.1125, 0, 0.46875])
    assert V == pytest.approx([0.41875, 0.53125, 0.53125])
    U_first, U_last = (2 / 6) * (4 / 6) / 4, (4 / 10) * (6 / 10) / 8  # variances, of the rates 2/6 and 4/10
    V_last = 0.75**2 * U_last
    assert A_error**2 == pytest.approx([0.4**2 * (V_last + U_first), 0.1**2, 0.75**2 * U_last])
    assert V_error**2 == pytest.approx([0.6**2 * V_last + 0.4**2 * U_first, V_last, V_last])


def test_certain_tokens_get_no_rollouts_and_others_their_share():
    """Guards against a number of rollouts that is not about rollouts * (1 - p)."""
    p = np.array([1.0, 0.9951, 0.9949, 0.9, 0.5, 0.04, 0.039, 1e-9])
    assert gt.packets_wanted(np.log(p), 100).tolist() == [0, 0, 1, 2, 7, 12, 13, 13]
    assert gt.packets_wanted(np.log(p), 1).tolist() == [0, 0, 1, 1, 1, 1, 1, 1]


def test_chunks_hold_every_token_once():
    """Guards against tokens left out or sampled twice, and chunks larger than what is sampled at once."""
    packets, position = np.random.default_rng(0).integers(0, [[30], [90]], (2, 60))
    parts = gt.chunks(packets, position)
    assert sorted(i for part in parts for i in part) == np.flatnonzero(packets).tolist()
    for part in parts:
        assert packets[part][1:].sum() * gt.PACKET <= gt.ROWS_AT_ONCE  # the first token may be larger by itself
    assert gt.chunks(0 * packets, position) == []


def outcome(truth):
    """What the rollouts came to."""
    return truth["packets"].tolist(), truth["solved"].tolist(), int(truth["sampled"])


def test_rollouts_do_not_depend_on_what_else_is_sampled_or_when(monkeypatch):
    """Guards against random numbers that repeat, or shift with chunks, a second call or the other responses."""
    policy = tiny_policy(3)
    whole, later, chunked, seeded = (described(policy, 6) for _ in range(4))
    rows = np.isin(whole["response"], (2, 7))
    few = {k: v[rows] for k, v in whole.items() if v.shape and len(v) == len(rows)} | {"sampled": np.array(0)}
    sampled(policy, few, 60)
    assert len(np.unique(few["solved"])) > 3
    assert few["solved"].tolist() == sampled(policy, whole, 60)["solved"][rows].tolist()
    for rollouts, complete in ((24, False), (60, True), (30, True)):
        sampled(policy, later, rollouts)
        assert (outcome(later) == outcome(whole)) == complete
    assert outcome(sampled(policy, seeded, 60, seed=1)) != outcome(whole)
    monkeypatch.setattr(gt, "ROWS_AT_ONCE", 40)
    assert outcome(sampled(policy, chunked, 60)) == outcome(whole)
    assert whole["complete"] and sampled(policy, whole, 60)["complete"]


def test_an_interruption_loses_nothing_that_was_saved(tmp_path, monkeypatch):
    """Guards against counts that are half written when a run is stopped, and rollouts made twice or never."""
    policy, file, lengths, respond = tiny_policy(3), tmp_path / "ground_truth.npz", [], gt.generate_and_grade
    whole, first, second = (described(policy, 6) for _ in range(3))

    def interrupted(*arguments):
        if len(lengths) == 3:
            raise KeyboardInterrupt
        samples, *others = respond(*arguments)
        lengths.append(samples.mask.sum().item())
        return samples, *others

    monkeypatch.setattr(gt, "ROWS_AT_ONCE", 64)
    monkeypatch.setattr(gt, "SAVE_EVERY", 0.0)
    sampled(policy, whole, 60)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gt, "generate_and_grade", interrupted)
        sampled(policy, first, 60, save=lambda: gt.save_truth(first, file))
    saved = dict(np.load(file))
    assert 0 < saved["packets"].sum() < whole["packets"].sum()
    assert saved["sampled"] == sum(lengths)
    assert not saved["complete"]
    gt.read_rollouts(second, file)
    assert outcome(second) == outcome(saved)
    assert outcome(sampled(policy, second, 60)) == outcome(whole)


def test_columns_by_hand():
    """Guards against pieces, successes and prompts of another token or response."""
    rows = [[" Maybe", " 4", "*", "2", "=", "8", ""], [" No", "."]]
    puzzles = [Puzzle((2, 4), 8), Puzzle((5, 9), 4)]
    batch = make_written(rows, [0.5, -0.5], [0, 1], success=torch.tensor([1.0, 0.0]), puzzles=puzzles)
    truth = gt.describe(batch, {"seed": 3})
    assert truth["piece"].tolist() == rows[0] + rows[1]
    assert truth["success"].tolist() == [1] * 7 + [0] * 2
    assert [solver.KINDS[k] for k in truth["kind"][:3]] == ["opening", "operand", "operator"]
    assert truth["reachable_before"].tolist() == [-1, 1, 1, 1, -1, 1, -1, -1, -1]
    assert truth["reachable"].tolist() == [-1, 1, 1, 1, -1, 1, -1, -1, -1]
    assert truth["prompts"].tolist() == ["[2, 4] -> 8", "[5, 9] -> 4"]
    assert json.loads(str(truth["settings"])) == {"seed": 3}
    assert "credit" not in truth


def test_the_table_of_facts_by_hand():
    """Guards against an error over tokens without rollouts, and packets counted as rollouts."""
    truth = dict(group=np.array([0, 0, 0, 2]), position=np.array([0, 1, 0, 0]), packets=np.array([2, 0, 1, 0]),
                 sampled=np.array(1234), a_star_error=np.array([0.3, 0.1, 0.5, 0.1]),
                 a_star=np.array([0.4, 0.0, -0.4, 0.2]), role=np.array([0, 0, 1, 2]))
    facts = [row[1] for row in gt.table_facts(truth).rows]
    assert facts == ["2, 3, 4", "24, 1,234", "50.0%", f"{np.sqrt((0.09 + 0.25) / 2):.3f}", "40.0%"]


TINY = ("--questions", 2, "--answers", 2, "--critic_batches", 1, "--max_new_tokens", 40)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """A folder of the smallest run, which the tests below copy, and the arrays in its file."""
    folder = tmp_path_factory.mktemp("truth") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(critic_quality, "SIZE", 4)
        patch.setattr(statistics, "RESAMPLES", 100)
        patch.setattr(sys, "argv", ["measure.py", *map(str, TINY), "--rollouts", "8", "--out", str(folder)])
        gt.main()
    return folder, dict(np.load(folder / "ground_truth.npz", allow_pickle=False))


def test_the_files_of_a_run(first_run):
    """Guards against columns that a reader lacks, methods left out, and paths of this machine in them."""
    folder, _ = first_run
    assert {p.name for p in folder.iterdir()} == {
        "ground_truth.npz", "critic.safetensors", "importance.safetensors", "scores.md", "scores.png",
        "truth.png"}
    truth = read_truth(folder / "ground_truth.npz")
    scored = [name for name in MITIGATIONS if name not in ("oracle", "ppo_process")]  # the truth, and a head not fitted
    assert truth["methods"].tolist() == scored
    assert truth["credits"].shape == (len(scored), len(truth["token"]))
    assert truth["credits"][0] == pytest.approx(truth["advantage"])  # that of `none`
    settings = {"model": BUNDLED.name, "data": "", "questions": 2, "answers": 2, "max_new_tokens": 40, "seed": 0}
    assert json.loads(str(truth["settings"])) == settings
    text = (folder / "scores.md").read_text(encoding="utf-8")
    assert all(f"| {name} " in text for name in scored)
    assert "nan" not in text


@pytest.mark.parametrize("changed, sentence", [
    ({"token": np.ones(9, int)}, "about other responses"), ({"settings": np.array("{}")}, "about other responses"),
    ({}, "can't be read")])
def test_rollouts_that_do_not_fit_are_refused(changed, sentence, first_run, tmp_path):
    """Guards against rollouts of other responses that are mixed in, and a traceback for a broken file."""
    file, truth = tmp_path / "ground_truth.npz", first_run[1]
    np.savez(file, **truth | changed)
    if not changed:
        file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match=f"{file}.* {sentence}"):
        gt.read_rollouts(truth, file)


def test_a_second_call_resumes_and_its_interruption_names_the_folder(first_run, tmp_path, monkeypatch, refusal):
    """Guards against a second call that begins again, or fits the critic again, and a traceback on Ctrl-C."""
    folder, resumed = shutil.copytree(first_run[0], tmp_path / "copy"), []

    def interrupted(policy, puzzles, truth, *_):
        resumed.append(truth)
        raise KeyboardInterrupt

    monkeypatch.setattr(critic_quality, "fit", lambda *_: pytest.fail("the critic is there"))
    monkeypatch.setattr(gt, "sample_truth", interrupted)
    sentence = refusal(gt, *TINY, "--rollouts", 30, "--out", folder)
    assert "interrupted" in sentence and str(folder) in sentence
    assert outcome(resumed[0]) == outcome(first_run[1])
    assert resumed[0]["credits"] == pytest.approx(first_run[1]["credits"], abs=1e-5)
