"""The truth about each token: values against the enumeration of all continuations, rollouts, the file, the command."""
import functools
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import countdown_task
from countdown_task import Puzzle, grade
from grpo import compare
from lab import heads, statistics
from lab.statistics import by_response, read_column
from lab.truth import measure as gt
from lab.truth.score import read_truth
from lab.truth.scoring import ALL, HALVES, RIGHT_SIZES, TAG, WITHIN
from methods.registry import CREDIT_FUNCTIONS
from rollout import Policy, rollout
from settings import Settings
from tests.fixtures import BUNDLED, Pieces, make_written
from tests.plain import exact_moments
from tests.test_grpo import tiny

PIECES = ("", "<answer>1+2</answer>", "<answer>2-1</answer>", " hm", " so")  # the last answer decides
PUZZLES = [Puzzle((1, 2), 3), Puzzle((1, 2), 1)]
LIMIT = 4


def tiny_policy():
    """A small random model that writes those tokens."""
    model = tiny(seed=1)
    model.real_vocab = len(PIECES)
    return Policy(model, Pieces(PIECES), countdown_task)


def described(policy, answers):
    """The columns of ground_truth.npz for responses of the tiny policy, before any rollout."""
    batch = rollout(policy, PUZZLES, Settings(responses=answers, max_new_tokens=LIMIT), step=1)
    batch.advantage = compare(batch)
    return gt.describe(batch, {})


def sampled(policy, truth, rollouts, seed=0, save=lambda: None):
    """What the rollouts come to; adds their columns, and the values that follow from them."""
    gt.sample_truth(policy, PUZZLES, truth, rollouts, seed, LIMIT, save)
    gt.add_values(truth)
    return outcome(truth)


def outcome(truth):
    """What the rollouts came to."""
    return truth["packets"].tolist(), truth["solved"].tolist(), int(truth["sampled"])


def test_values_backwards_by_hand():
    """Guards against a wrong recursion, wrong errors, and credit for a token without rollouts."""
    p, solved, tried = np.array([0.6, 0.9, 0.25]), np.array([1, 0, 3]), np.array([4, 0, 8])
    truth = dict(position=np.arange(3), logprob=np.log(p), success=np.ones(3, np.float32), packets=tried / 8,
                 solved=np.column_stack((solved, 0 * solved)))
    gt.add_values(truth)
    V, V_error, A, A_error = (truth[name] for name in ("value", "value_error", "a_star", "a_star_error"))
    # A* = (1 - p) (V behind the token - U): 0.75 (1 - 3/8) of the last, then 0.4 (0.53125 - 1/4) of the first
    assert A == pytest.approx([0.1125, 0, 0.46875])
    assert V == pytest.approx([0.41875, 0.53125, 0.53125])
    first, last = (1 + 0.53125) / 5, (3 + 1) / 9  # rates, each with one more rollout that succeeds as often as V says
    U_first, U_last = first * (1 - first) / 4, last * (1 - last) / 8  # variances
    V_last = 0.75**2 * U_last
    assert A_error**2 == pytest.approx([0.4**2 * (V_last + U_first), 0.1**2, 0.75**2 * U_last])
    assert V_error**2 == pytest.approx([0.6**2 * V_last + 0.4**2 * U_first, V_last, V_last])


def test_tokens_get_their_share_of_rollouts_in_chunks_that_fit():
    """Guards against a number that is not about rollouts * (1 - p), and chunks larger than what is sampled at once."""
    p = np.array([1.0, 0.9951, 0.9949, 0.9, 0.5, 0.04, 0.039, 1e-9])
    assert gt.packets_wanted(np.log(p), 100).tolist() == [0, 0, 1, 2, 7, 12, 13, 13]
    assert gt.packets_wanted(np.log(p), 1).tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    packets, position = np.random.default_rng(0).integers(0, [[30], [90]], (2, 60))
    parts = gt.chunks(packets, position)
    assert sorted(i for part in parts for i in part) == np.flatnonzero(packets).tolist()
    for part in parts:
        assert packets[part][1:].sum() * gt.PACKET <= gt.ROWS_AT_ONCE  # the first token may be larger by itself
    assert gt.chunks(0 * packets, position) == []


def test_what_is_missing_is_announced_by_hand(capsys):
    """Guards against rollouts that are there, and ones as long as a whole response."""
    truth = {"position": np.array([0, 1, 2, 0]), "logprob": np.log([0.5, 1.0, 0.5, 0.2]), "packets": np.array([1, 0, 0, 1])}
    gt.announce(truth, 40, 4.0)  # packets 3, 0, 3, 4, of which two are there: 16, 0, 24 and 24 rollouts
    assert capsys.readouterr().out == f"64 rollouts are missing, about {16 * 3 + 24 + 24} tokens: at most about 0:24\n"


@pytest.mark.slow
def test_rollouts_are_the_same_however_they_are_sampled(tmp_path, monkeypatch):
    """Guards against random numbers that repeat, or shift with chunks, a second call or the other responses, and counts
    that are half written when a run is stopped."""
    policy, file, lengths, respond = tiny_policy(), tmp_path / "ground_truth.npz", [], gt.turns.respond
    whole, first, second, seeded = (described(policy, 6) for _ in range(4))
    rows = np.isin(whole["response"], (2, 7))
    few = {k: v[rows] for k, v in whole.items() if v.shape and len(v) == len(rows)} | {"sampled": np.array(0)}
    assert sampled(policy, seeded, 60, seed=1) != sampled(policy, whole, 60)
    assert sampled(policy, few, 60)[1] == whole["solved"][rows].tolist()
    assert whole["complete"] and len(np.unique(few["solved"])) > 3

    def interrupted(*arguments):
        if len(lengths) == 3:
            raise KeyboardInterrupt
        found = respond(*arguments)
        lengths.append(found.samples.mask.sum().item())
        return found

    monkeypatch.setattr(gt, "ROWS_AT_ONCE", 40)
    monkeypatch.setattr(gt, "SAVE_EVERY", 0.0)
    packets, _, tokens = sampled(policy, first, 24)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gt.turns, "respond", interrupted)
        sampled(policy, first, 60, save=lambda: gt.save_truth(first, file))
    saved = dict(np.load(file))
    assert sum(packets) < saved["packets"].sum() < whole["packets"].sum()
    assert saved["sampled"] == tokens + sum(lengths) and not saved["complete"]
    gt.read_rollouts(second, file)
    assert [sampled(policy, second, rollouts) for rollouts in (60, 30)] == [outcome(whole)] * 2


def test_columns_of_responses_labelled_by_hand():
    """Guards against verdicts on another token or response, on each piece of a number, or on words. (The verdicts
    themselves: tests/test_arithmetic.py.)"""
    written = [  # for (3, 4, 12) -> 5, which is 12 - 4 - 3 in any order: pieces, reachable before and after each
        (" Maybe| |1|2| -| 4| =| 8|,", "..1.11.1.", "..1.11.1."), (" 8| +| 3| =| 1|1|.", "110.0..", "100.0.."),
        (" How| 12| -| 3| =| 6|.", ".111.1.", ".111.0."), (" 3|*|4|=|12| </think>|\n|<ans|wer>|1|2", "110.0......",
                                                            "100.0......")]
    other = [(" Maybe| 4|*|2|=|8|.", ".111.1.", ".111.1.")]  # for (2, 4) -> 8
    pieces = [[piece for row in rows for piece in row[0].split("|")] for rows in (written, other)]
    before, after = ("".join(column) for column in list(zip(*written, *other))[1:])
    batch = make_written(pieces, [0.5] * 2, [0, 1], success=torch.tensor([0.0, 1.0]),
                         puzzles=[Puzzle((3, 4, 12), 5), Puzzle((2, 4), 8)])
    truth = gt.describe(batch, {"seed": 3})
    for name, expected in (("reachable_before", before), ("reachable", after)):
        assert truth[name].tolist() == [-1 if verdict == "." else int(verdict) for verdict in expected]
    assert truth["piece"].tolist() == sum(pieces, [])
    assert truth["prompts"].tolist() == ["[3, 4, 12] -> 5", "[2, 4] -> 8"]
    assert truth["success"].tolist() == [0] * len(pieces[0]) + [1] * len(pieces[1])
    task = SimpleNamespace(within_reach=lambda text, spans, puzzle: np.array([1, 1, 0]))
    assert gt.solver_columns("abc", [(0, 1), (1, 2), (2, 3)], None, task).tolist() == [[1, 1, 1], [1, 1, 0]]
    assert gt.solver_columns("abc", [(0, 3)], None, SimpleNamespace()).tolist() == [[-1], [-1]]


@pytest.mark.slow
def test_values_converge_to_those_of_all_continuations():
    """Guards against rollouts with another limit, first token, prefix or puzzle, and errors that do not fit."""
    policy = tiny_policy()
    truth = described(policy, 10)
    sampled(policy, truth, 500)
    policy.model.double()
    V, A = [], []

    @functools.cache
    def value(puzzle, prefix):
        return exact_moments(policy, puzzle, prefix, LIMIT, lambda *graded: grade(*graded)["answer"])[0]

    for rows in by_response(truth):
        tokens, puzzle = truth["token"][rows].tolist(), PUZZLES[truth["group"][rows[0]]]
        path = [value(puzzle, tuple(tokens[:t])) for t in range(len(tokens) + 1)]
        V, A = V + path[:-1], A + np.diff(path).tolist()
    lengths = np.bincount(truth["response"])
    assert len(np.unique(np.round(V, 6))) > 15 and lengths.min() < lengths.max() == LIMIT  # some end, some are cut off
    for name, exact in (("value", V), ("a_star", A)):
        error = truth[f"{name}_error"]
        z = (truth[name] - exact) / np.maximum(error, 1e-9)
        assert np.abs(truth[name] - exact).max() < 0.12
        assert 0.7 < np.sqrt(np.mean(z[error > 1e-4] ** 2)) < 1.3
    first, second = truth["a_star_halves"].T
    tried = truth["packets"] > 0
    assert (first + second) / 2 == pytest.approx(truth["a_star"], abs=1e-12)
    assert 0.8 < np.sqrt(np.mean(((first - second) / 2 / truth["a_star_error"])[tried] ** 2)) < 1.2  # independent
    truth["packets"][0], truth["a_star_error"][0], tried[0] = 0, 0.9, False  # a token without rollouts
    assert [text for _, text in gt.table_facts(truth).rows] == [
        f"2, 20, {len(tried)}", f"{8 * truth['packets'].sum():,}, {truth['sampled']:,}", f"{100 * tried.mean():.1f}%",
        f"{np.linalg.norm(truth['a_star_error'][tried]) / tried.sum() ** 0.5:.3f}"]


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, run_program, refusal):
    """Guards against columns that a reader lacks, methods left out, a second call that begins again or fits the critic
    again, rollouts of other responses, a picture of another method's credit, and a traceback on Ctrl-C."""
    folder, resumed, drawn = tmp_path / "out", [], []
    words = ["--questions", 2, "--responses", 2, "--critic_batches", 1, "--max_new_tokens", 40, "--out", folder]
    monkeypatch.setattr(heads, "SIZE", 4)
    monkeypatch.setattr(statistics, "RESAMPLES", 100)
    run_program(gt, *words, "--rollouts", 8)
    assert {p.name for p in folder.iterdir()} == {
        "ground_truth.npz", "critic.safetensors", "importance.safetensors", "scores.md", "truth.png"}
    truth, saved = read_truth(folder / "ground_truth.npz"), dict(np.load(folder / "ground_truth.npz"))
    scored = [name for name in CREDIT_FUNCTIONS if name not in ("oracle", "ppo_process")]  # the truth, and a head not fitted
    assert truth["methods"].tolist() == scored
    assert truth["credits"].shape == (len(scored), len(truth["token"]))
    assert truth["credits"][0] == pytest.approx(truth["advantage"])  # that of `none`
    settings = {"model": BUNDLED.name, "data": "", "questions": 2, "answers": 2, "max_new_tokens": 40, "seed": 0}
    assert json.loads(str(truth["settings"])) == settings  # no path of this machine
    tables = [read_column(folder / "scores.md", *where) for where in ((ALL, "location"), (WITHIN, "solver"))]
    assert all(list(table) == [*scored, TAG, RIGHT_SIZES, HALVES] for table in tables)
    assert "nan" not in (folder / "scores.md").read_text(encoding="utf-8")

    def interrupted(policy, puzzles, truth, *_):
        resumed.append(truth)
        raise KeyboardInterrupt

    monkeypatch.setattr(heads, "sample", lambda *_: pytest.fail("the critic is there"))
    with monkeypatch.context() as patch:
        patch.setattr(gt, "draw", lambda *arguments: drawn.extend(arguments[2:]))
        run_program(gt, *words, "--rollouts", 8, "--methods", "ppo", "none")
    assert drawn[1] == "credit of ppo"
    assert drawn[0] == pytest.approx(saved["credits"][scored.index("ppo")], abs=1e-5)
    monkeypatch.setattr(gt, "sample_truth", interrupted)
    sentence = refusal(gt, *words, "--rollouts", 30, "--methods", "ppo", "none")
    assert "interrupted" in sentence and str(folder) in sentence
    assert outcome(resumed[0]) == outcome(saved)
    assert resumed[0]["methods"].tolist() == ["ppo", "none"]
    assert resumed[0]["credits"] == pytest.approx(saved["credits"][[scored.index("ppo"), 0]], abs=1e-5)
    assert f"{folder / 'ground_truth.npz'} is about other responses" in refusal(gt, *words, "--seed", 1)
    monkeypatch.setattr(gt, "sample_truth", lambda policy, puzzles, truth, *_: truth["solved"].fill(0))
    assert "none of 4 responses and of their rollouts succeeded" in refusal(gt, *words, "--rollouts", 8)
    with pytest.raises(ValueError, match="about other responses"):
        gt.read_rollouts(saved | {"token": saved["token"][::-1]}, folder / "ground_truth.npz")


@pytest.mark.slow
def test_the_task_and_the_command_of_a_readers_own_prompts(tmp_path, monkeypatch, run_program):
    """Those of docs/trl.md, with fewer rollouts: guards against another prompt or grade than that of the rows."""
    page = (Path(gt.__file__).parents[2] / "docs" / "trl.md").read_text(encoding="utf-8")
    words = shlex.split(re.search(r"lab\.truth\.measure (--task path/to/my_task.py --data problems.jsonl .*)", page)[1])
    rows = [{"prompt": f"Using the numbers [{x}, 7], create", "answer": x} for x in (" 3", " 4", " 5")]
    monkeypatch.chdir(tmp_path)
    Path("my_task.py").write_text(re.search(r"```python\n(# my_task.py\n.*?)```", page, re.S)[1])
    Path("my_rewards.py").write_text("def right(texts, answer): return [a in text for a, text in zip(answer, texts)]")
    Path("problems.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run_program(gt, *words, "--task", "my_task.py", "--model", BUNDLED, "--questions", 2, "--max_new_tokens", 30,
                "--rollouts", 1, "--only_rollouts")
    truth = read_truth(Path("runs/deserved/ground_truth.npz"))
    assert truth["methods"].tolist() == ["entropy_ratio", "none"] and Path("runs/deserved/truth.png").is_file()
    for tokens in by_response(truth):
        row = rows[truth["group"][tokens[0]]]
        assert truth["prompts"][truth["response"][tokens[0]]] == row["prompt"]
        assert (truth["success"][tokens] == (row["answer"] in "".join(truth["piece"][tokens]))).all()
    assert len({*truth["success"]}) == 2
