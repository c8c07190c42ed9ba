"""The command line end to end: a whole run, kill and resume, Ctrl-C, and one sentence for what can't work."""
import copy
import csv
import functools
import json
import math
import os
import random
import re
import resource
import runpy
import shutil
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import countdown_task
import grpo
import sampler
import start
import train
from countdown_task import generate_puzzles, split
from grpo import ADVANTAGES, KL_GRADIENTS, LOSS_NORMS, LOSSES, SHAPINGS, compare, update
from methods.heads import HEADS, Critic
from methods.queries import Queries
from methods.registry import CREDIT_FUNCTIONS
from plumbing import launch, run_folder
from plumbing.checks import required
from plumbing.files import read_json
from plumbing.launch import MODELS
from plumbing.metrics import COLUMNS
from plumbing.optimizer import Optimizer
from plumbing.runs import read_metrics
from plumbing.task_file import load_puzzles
from plumbing.tokenizer import Tokenizer
from qwen2_model import load_model
from rollout import by_group, draw_puzzles, rollout
from settings import Settings
from tasks import guess_task
from tests import storm
from tests.fixtures import BUNDLED, make_batch, refused

SMALL = ["--questions", 3, "--responses", 4, "--eval_problems", 12, "--max_new_tokens", 50, "--pass_at", 0]
TINY = ["--questions", 2, "--responses", 3, "--eval_problems", 2, "--max_new_tokens", 30, "--eval_every", 2]
GENERATE = functools.cache(generate_puzzles)


@pytest.fixture(autouse=True, scope="module")
def puzzles_once():
    """Generate the 4,096 puzzles once for all runs of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(countdown_task, "generate_puzzles", GENERATE)
        yield


def run(*arguments):
    """Run train.py in this process."""
    sys.argv = ["train.py", *map(str, arguments)]
    train.main()


def rows(folder):
    """metrics.csv as a list of dicts."""
    return list(csv.DictReader((folder / "metrics.csv").open()))


def credit_log(folder, step=1):
    """The columns of a step's credit log, all of one length."""
    log = dict(np.load(folder / "credit" / f"step-{step:06d}.npz"))
    assert len(log.pop("puzzle_text")) == len(log.pop("puzzle_key")) == 1 + log["group"].max()
    assert len(log.pop("response_success")) == 1 + log["response"].max()
    return log


# ------------------------------------------------------------------------------------------------- a whole run


@pytest.mark.slow
def test_metrics_agree_with_the_credit_log(tmp_path, monkeypatch):
    """Each column is computed again from the flat log, which names the puzzles, as samples.txt does. Another seed
    differs, but for what is evaluated."""
    finished, other = tmp_path / "r", tmp_path / "other"
    monkeypatch.setattr(run_folder, "SAMPLE_EVERY", 2)
    run(*SMALL, "--steps", 4, "--eval_every", 2, "--out", finished)
    start, *table = rows(finished)
    training = load_puzzles(countdown_task, 12, "")[0]
    asked = {n: [*map(countdown_task.show, draw_puzzles(training, Settings(questions=3), n))] for n in (1, 2, 3, 4)}
    assert [row["step"] for row in (start, *table)] == ["0", "1", "2", "3", "4"]
    assert {name for name, value in start.items() if value} == {"step", "heldout_success", "heldout_stderr"}
    assert [bool(row["heldout_success"]) for row in table] == [False, True, False, True]
    for n, row in enumerate(table, 1):
        log, written = credit_log(finished, n), np.load(finished / "credit" / f"step-{n:06d}.npz")
        first = log["position"] == 0
        reward, groups = log["reward"][first], log["group"][first]
        solved = reward > 0.5  # 0.1 * format + success
        ended = [log["token"][log["response"] == i][-1] in Tokenizer(BUNDLED).end_tokens for i in range(12)]
        expected = {"reward": reward.mean(), "success": solved.mean(), "length": np.bincount(log["response"]).mean(),
                    "format": ((reward - solved) * 10).mean(), "entropy": log["entropy"].mean(),
                    "zero_variance_groups": sum(len(set(reward[groups == g])) == 1 for g in range(3)),
                    "truncated": 1 - np.mean(ended), "clip_fraction": 0}
        for name, value in expected.items():
            assert float(row[name]) == pytest.approx(value, rel=1e-4, abs=1e-6), name
        assert float(row["tokens_per_second"]) * float(row["seconds"]) == pytest.approx(len(log["token"]))
        assert float(row["ratio_error"]) < 1e-4
        assert row["kl"] == row["ratio_spread"] == ""
        assert sum(column.itemsize for column in log.values()) == 40  # bytes of a token
        assert written["response_success"].tolist() == solved.tolist() and [*written["puzzle_text"]] == asked[n]
    final = read_json(finished / "final.json")
    assert final["heldout_success"] == float(table[3]["heldout_success"]) and "pass@" not in str(final)
    for row in (start, table[1], table[3]):
        p = float(row["heldout_success"])
        assert float(row["heldout_stderr"]) == pytest.approx((p * (1 - p) / 11) ** 0.5)  # 12 puzzles, solved or not
    heads = re.findall(r"=== step (\d)  (.*?)  reward", (finished / "samples.txt").read_text())
    assert heads == [(str(n), puzzle) for n in (1, 2, 4) for puzzle in asked[n]]
    run(*SMALL, "--steps", 1, "--eval_every", 2, "--seed", 1, "--out", other)
    assert rows(other)[1]["loss"] != table[0]["loss"] and rows(other)[0] == start


@pytest.mark.slow
def test_every_flag_reaches_the_update(quick, tmp_path, monkeypatch):
    """Guards against clips or betas in the wrong order, a learning rate that is a step late, a trained reference."""
    begun, calls, rates = load_model(BUNDLED, dtype=torch.bfloat16), [], []
    given = dict(kl=0.02, clip_low=0.1, clip_high=0.3, loss_norm="constant", updates_per_batch=2, max_grad_norm=0.7,
                 micro_batch=5)

    def spy(policy, optimizer, batch, credit, s):
        calls.append(credit[batch.mask])
        model, adamw = policy.model, optimizer.adamw.param_groups[0]
        rates.append(adamw["lr"])
        assert (*adamw["betas"], adamw["weight_decay"]) == (0.8, 0.95, 0.03)
        assert model.temperature == policy.reference.temperature == 0.6
        assert {w.dtype for w in model.parameters()} == {torch.bfloat16}
        assert {w.dtype for w in optimizer.master.values()} == {torch.float32}
        assert model.checkpoint_activations
        assert vars(s).items() >= (given | {"max_new_tokens": 30}).items()
        assert batch.ask.s is s
        assert all(torch.equal(a, b) for a, b in zip(policy.reference.parameters(), begun.parameters()))
        return update(policy, optimizer, batch, credit, s)

    monkeypatch.setattr(train, "update", spy)
    monkeypatch.setattr(start, "try_step", lambda *_: ({}, ()))
    flags = ["--lr", 1e-3, "--warmup_steps", 1, "--linear_decay", "--beta1", 0.8, "--beta2", 0.95,
             "--weight_decay", 0.03, "--dtype", "bfloat16", "--checkpoint_activations", "--temperature", 0.6,
             *(x for k, v in given.items() for x in (f"--{k}", v))]
    run(*TINY, "--steps", 2, *flags, "--out", tmp_path / "r")
    assert rates == pytest.approx([1e-3, 5e-4])
    assert np.array_equal(calls[1], credit_log(tmp_path / "r", 2)["credit"])
    assert all(row["kl"] for row in rows(tmp_path / "r")[1:])


@pytest.mark.slow
def test_the_log_holds_the_credit_that_the_flags_ask_for(quick, tmp_path):
    method = ["--mitigation", "outcome_conditional", "--think_discount", 0.25, "--normalize", "none"]
    flags = [*method, "--advantage", "dr_grpo", "--shaping", "overlong", "--skip_unfinished", "--max_new_tokens", 75]
    run(*SMALL, "--steps", 1, *flags, "--out", tmp_path / "r")
    log = credit_log(tmp_path / "r")
    response, lengths, answer = log["response"], np.bincount(log["response"]), log["in_answer"]
    shaped = log["reward"][log["position"] == 0] - 0.1 * np.maximum(5 * lengths / 75 - 4, 0)  # (12,)
    deviation = shaped - shaped.reshape(3, 4).mean(1).repeat(4)
    np.testing.assert_allclose(log["advantage"], deviation[response], atol=1e-6)
    ended = np.isin(log["token"][np.cumsum(lengths) - 1], Tokenizer(BUNDLED).end_tokens)
    answered = np.bincount(response, answer) > 0
    weight = np.where((answer == 1) | ~answered[response], 1, 0.25) * ended[response]
    np.testing.assert_allclose(log["credit"], log["advantage"] * weight, rtol=1e-5)
    taught = log["advantage"] != 0
    assert set(log["credit"][taught] / log["advantage"][taught]) == {0, 0.25, 1}


@pytest.mark.slow
def test_a_bfloat16_run_learns_and_its_checkpoint_has_the_weights_that_it_samples_from(tmp_path, capsys, monkeypatch):
    """A run of no steps, which only evaluates, finds the same success at the checkpoint as the run at its end. Killed
    after its last step, that run measures nothing again: on another machine it would differ."""
    flags, again = [*SMALL, "--dtype", "bfloat16", "--eval_problems", 40], tmp_path / "again"
    run(*flags, "--steps", 3, "--lr", 0.02, "--out", tmp_path / "r")
    assert "analyze.py" in capsys.readouterr().out
    run(*flags, "--steps", 0, "--model", tmp_path / "r" / "checkpoint", "--out", again)
    assert "analyze.py" not in capsys.readouterr().out  # it has nothing to analyze
    start, end = (float(rows(tmp_path / "r")[i]["heldout_success"]) for i in (0, -1))
    assert start > 0 and end != start
    assert [(row["step"], float(row["heldout_success"])) for row in rows(again)] == [("0", end)]
    assert read_json(again / "final.json")["step"] == 0
    final, file = read_json(tmp_path / "r" / "final.json"), tmp_path / "r" / "final.json"
    file.unlink()
    monkeypatch.setattr(train, "evaluate", lambda *_: pytest.fail("measured again"))
    run("--resume", tmp_path / "r")
    assert read_json(file) == final


@pytest.mark.slow
def test_only_heldout_puzzles_are_measured(tmp_path, monkeypatch, capsys):
    """Guards against a pass@k of equal responses."""
    asked = []

    def one_in_two(policy, puzzles, answers, s):
        asked.append((len(puzzles), answers, s.eval_greedy))
        assert {split(p) for p in puzzles} == {"heldout"}
        solved = np.zeros((len(puzzles), answers))
        solved[::2, 0] = 1  # one right answer in three counts
        return solved

    monkeypatch.setattr(train, "evaluate", one_in_two)
    run(*TINY, "--eval_problems", 140, "--steps", 1, "--pass_at", 3, "--eval_greedy", "--out", tmp_path / "r")
    assert asked == [(140, 1, True), (140, 1, True), (128, 3, False)]
    assert "\npass@3 50.0%\n" in capsys.readouterr().out
    expected = {"heldout_problems": 140, "heldout_success": 0.5, "pass@3": 0.5, "pass@3_problems": 128}
    assert read_json(tmp_path / "r" / "final.json").items() >= expected.items()
    resumed = train.measure_end(SimpleNamespace(row={"heldout_success": 1.0}, policy=None, heldout=[None],  # one puzzle
                                                s=Settings(pass_at=0)))
    assert np.isnan(resumed["heldout_stderr"])
    unmeasured = SimpleNamespace(row={"step": 1}, policy=None, heldout=GENERATE(4, "heldout"), s=Settings(pass_at=0))
    assert train.measure_end(unmeasured)["heldout_success"] == 0.5


@pytest.mark.slow
def test_how_many_responses_are_evaluated_at_once_changes_nothing(monkeypatch):
    """Nor is there chance in greedy ones."""
    s, puzzles, widths, sample = Settings(questions=1, responses=4), GENERATE(9, "heldout"), [], train.respond
    policy = start.load_policy(s)
    monkeypatch.setattr(train, "respond", lambda *args: (widths.append(len(args[3])), sample(*args))[1])
    wide = train.evaluate(policy, puzzles, 2, s)
    greedy = train.evaluate(policy, GENERATE(12, "heldout"), 2, replace(s, eval_greedy=True))
    monkeypatch.setattr(sampler, "ROOM_BYTES", 0)
    assert np.array_equal(wide, train.evaluate(policy, puzzles, 2, s))
    assert widths == [18, 24, 4, 4, 4, 4, 2]
    assert train.evaluate(policy, puzzles[:2], 5, s).shape == (2, 5) and widths[-2:] == [5, 5]  # a step has but four
    assert wide.shape == (9, 2) and (wide[:, 0] != wide[:, 1]).any()
    assert (greedy[:, 0] == greedy[:, 1]).all()


@pytest.mark.parametrize("warmup, decay, shares", [
    (2, False, [1 / 2, 1, 1, 1, 1]), (0, True, [1, 4 / 5, 3 / 5, 2 / 5, 1 / 5]),
    (2, True, [1 / 2, 1, 3 / 4, 2 / 4, 1 / 4]), (5, True, [1 / 5, 2 / 5, 3 / 5, 4 / 5, 1])])
def test_the_learning_rate_by_hand(warmup, decay, shares):
    """Guards against a step of rate 0, the first one or the last, and a rate that never reaches --lr."""
    s = SimpleNamespace(lr=3e-4, warmup_steps=warmup, linear_decay=decay, steps=5)
    assert [train.learning_rate(s, step) for step in range(1, 6)] == pytest.approx([3e-4 * share for share in shares])



# ------------------------------------------------------------------------------------------- every credit function


@pytest.fixture(scope="module")
def everything():
    """A policy with all heads and a reference, an optimizer of it, and six responses to two puzzles."""
    policy = start.load_policy(Settings(), countdown_task, (*HEADS, "reference"))
    batch = rollout(policy, GENERATE(4096, "train")[:2], Settings(responses=3, max_new_tokens=80), step=1)
    batch.advantage = compare(batch)
    return policy, Optimizer(policy.model, 1e-3), batch


@pytest.mark.slow
@pytest.mark.parametrize("name, options", [
    *((name, {"k": 2} if name == "oracle" else {}) for name in CREDIT_FUNCTIONS), ("first_error", {"solver": True}),
    ("reward_decomposition", {"stepwise": True}), ("vineppo", {"cuts": "uncertain"}),
    ("inverted", {"of": "causal_ablation"}), ("vineppo", {"k": 2, "bfloat16": True})], ids=str)
def test_every_method_trains_on_what_it_needs_and_its_trial_leaves_no_trace(name, options, everything):
    """Guards against a method that asks for a head, a reference or a part of the task that it does not say it needs. No
    trace: also where somebody's code draws random numbers that nobody seeds again."""
    policy, optimizer, batch = everything
    if options.pop("bfloat16", False):
        policy = start.load_policy(Settings(dtype="bfloat16"), countdown_task, (*HEADS, "reference"))
        optimizer = Optimizer(policy.model, 1e-3)
    needs, s = required(CREDIT_FUNCTIONS[name], options), Settings(mitigation=name, questions=2, responses=3, max_new_tokens=80)
    noise, drawn = lambda: [float(torch.rand(())), np.random.random(), random.random()], []
    noisy = lambda batch: drawn.append(noise()) or CREDIT_FUNCTIONS[name](batch, **options)
    mine = policy._replace(heads={head: policy.heads[head] for head in HEADS if head in needs},
                           reference=policy.reference if "reference" in needs else None)
    both = torch.nn.ModuleList((policy.model, *policy.heads.values()))
    before = copy.deepcopy(both.state_dict())
    row, logged = start.try_step(mine, optimizer, GENERATE(4096, "train"), s, noisy)
    assert drawn == [noise(), *drawn[1:2] * 4]  # asked again, it draws the same numbers
    assert row["grad_norm"] > 0 and ("critic_loss" in row) == ("critic" in needs)
    assert all(torch.equal(x, before[key]) for key, x in both.state_dict().items())
    assert not any(learner.state for learner in (optimizer.adamw, *(head.optimizer for head in policy.heads.values())))
    assert all(p.grad is None and p.requires_grad for p in (*both.parameters(), *optimizer.master.values()))
    own = copy.copy(batch)
    own.ask, own.log = Queries(mine, own, s, step=1), {}
    assert CREDIT_FUNCTIONS[name](own, **options).isfinite().all()
    assert logged == own.log.keys() and (name != "curious" or logged == {"bonus"})


def test_a_reference_is_loaded_only_where_it_is_needed():
    for needs, options, needed in (((), {}, False), ((), {"kl": 0.1}, True), (("reference",), {}, True),
                                   ((), {"shaping": "overlong"}, False), ((), {"shaping": "kl"}, True)):
        assert (start.load_policy(Settings(**options), countdown_task, needs).reference is not None) == needed


def test_every_seed_step_and_name_has_its_own_random_numbers():
    """Guards against credit functions, steps or seeds that share random numbers, and numbers of another call."""
    drawn = {}
    for seed, step in ((0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (0, 11), (1, 11), (11, 1), (1, 0), (0, 1)):
        ask = Queries(start.Policy(None, None, None), make_batch([1], [0.0]), Settings(seed=seed), step)
        for name in ("random", "rollouts", "random1") * 2:
            drawn.setdefault((seed, step, name), set()).add(torch.rand((), generator=ask.generator(name)).item())
    assert len(set().union(*drawn.values())) == len(drawn) == 27


@pytest.mark.slow
def test_values_come_before_the_critic_learns_from_their_rewards(quick, tmp_path, monkeypatch):
    """The values of step 1 are those of an untrained critic, and those of step 2 follow the reward, here -1."""
    seen, values = [], Queries.head
    monkeypatch.setattr(Queries, "head", lambda *args: (seen.append(values(*args)), seen[-1])[1])
    monkeypatch.setattr(countdown_task, "grade", lambda *_: {"answer": 1, "format": 0})
    run(*TINY, "--mitigation", "ppo", "--steps", 2, "--lr", 0, "--reward_weights", "answer=-1", "--out", tmp_path / "r")
    *in_trial, first, second = seen
    assert not any(values.any() for values in in_trial) and not first.any() and second.sum() < 0
    folder = tmp_path / "r" / "checkpoint"
    inner, file = (folder / part / "critic.safetensors" for part in ("heads", ""))
    # Loaders that read every file of weights in a folder find those of the model alone.
    assert set().union(*map(load_file, folder.glob("*.safetensors"))) == {*load_file(BUNDLED / "model.safetensors")}
    for critic in (inner, file):  # the next run starts with it; earlier versions wrote it beside the weights
        inner.replace(critic)
        trained = start.load_policy(Settings(model=str(folder)), countdown_task, ("critic",))
        assert trained.heads["critic"].value.outer.weight.any()
        assert any("critic" in name for name in run_folder.checksums(vars(Settings(model=str(folder))), {}))


# ------------------------------------------------------------------------------------- what others bring to a step


def loss_that_adds(**columns):
    """ppo, and columns made from the log-probs."""
    return lambda logprob, *others: (*LOSSES["cispo"](logprob, *others), {k: f(logprob) for k, f in columns.items()})


@pytest.mark.slow
def test_columns_of_a_head_a_loss_and_a_grade(quick, tmp_path, monkeypatch, refusal):
    """Guards against a column that is lost, or averaged over padding, and a resumed run whose rows don't fit."""
    grade = lambda text, puzzle: {"answer": np.bool_(len(text) % 2), "format": True, "letters": np.int64(len(text)),
                                  "odd": len(text) if len(text) % 2 else None}
    monkeypatch.setattr(countdown_task, "grade", grade)
    place = lambda logprob: torch.arange(logprob.shape[1]).expand(logprob.shape)
    monkeypatch.setitem(LOSSES, "ppo", loss_that_adds(place=place))
    monkeypatch.setattr(Critic, "learn", lambda self, batch: {"seen": batch.reward.sum(), "unseen": None})
    flags = ["--mitigation", "ppo", "--updates_per_batch", 2, "--micro_batch", 2, "--state_every", 1]
    run(*TINY, *flags, "--steps", 2, "--out", tmp_path / "r")
    assert [*rows(tmp_path / "r")[0]] == [*COLUMNS, "place", "seen", "unseen", "letters", "odd"]
    tokenizer = Tokenizer(BUNDLED)
    for step in (1, 2):
        row, log = rows(tmp_path / "r")[step], credit_log(tmp_path / "r", step)
        texts = [tokenizer.decode(log["token"][log["response"] == i].tolist())[0] for i in range(6)]
        lengths = np.array([len(text) for text in texts])
        assert float(row["letters"]) == pytest.approx(lengths.mean())
        assert float(row["odd"]) == pytest.approx(lengths[lengths % 2 == 1].mean())
        updated = np.isin(log["response"], log["response"][log["credit"] != 0])  # others have no gradient
        assert float(row["place"]) == pytest.approx(log["position"][updated].mean())
        assert float(row["seen"]) == pytest.approx((lengths % 2).sum() + 0.6) and row["unseen"] == ""
    monkeypatch.setattr(Critic, "learn", lambda self, batch: None)
    run("--resume", tmp_path / "r", "--steps", 3)
    assert rows(tmp_path / "r")[3]["seen"] == "" and rows(tmp_path / "r")[3]["letters"]
    monkeypatch.setattr(Critic, "learn", lambda self, batch: {"late": 1} if batch.mask.shape[1] > 8 else None)
    assert "metrics.csv has no column late" in refusal(train, "--resume", tmp_path / "r", "--steps", 4)
    assert read_metrics(tmp_path / "r")["place"].shape == (4,)


ANOTHER = "gives a response another number when others stand elsewhere"


def remembering(function):
    """`function` with state: its answers less the running mean of their sizes; of a loss, times a count."""
    sizes = []

    def changed(*given):
        found = function(*given)
        sizes.append(found[0] if isinstance(found, tuple) else found.abs().mean())
        return (len(sizes) * found[0], *found[1:]) if isinstance(found, tuple) else found - sum(sizes) / len(sizes)
    return changed


def collecting(value):
    """A credit function with a value for each response, or for all, by the texts and rewards of earlier batches."""
    seen = set()

    def credit(batch):
        found = torch.tensor(value(batch, seen), dtype=torch.float64).expand(len(batch.text))
        seen.update(batch.text, batch.reward.tolist())
        return found[:, None] * batch.mask
    return credit


@pytest.mark.parametrize("place, name, stand_in, said", [
    *((place, name, remembering(place[name]), f"--{flag} {name} gives another answer to the same question")
      for flag, place, name in (
          ("shaping", SHAPINGS, "overlong"), ("advantage", ADVANTAGES, "rloo"), ("mitigation", CREDIT_FUNCTIONS, "none"),
          ("loss", LOSSES, "ppo"), ("loss_norm", LOSS_NORMS, "token"), ("kl_gradient", KL_GRADIENTS, "k3"))),
    *((CREDIT_FUNCTIONS, "none", function, "--mitigation none gives another answer to the same question") for function in (
        remembering(lambda batch: batch.entropy), collecting(lambda batch, seen: [x not in seen for x in batch.text]),
        collecting(lambda batch, seen: max(x for x in [*seen, *batch.reward.tolist()] if type(x) is float)))),
    (ADVANTAGES, "grpo", lambda r, s: r + np.random.default_rng().random(), "a generator of its own"),
    (CREDIT_FUNCTIONS, "none", lambda batch: batch.grades["letters"][:, None],
     "batch.grades has no letters: the grade of this task returns answer, format, reward"),
    (ADVANTAGES, "grpo", lambda r, s: r - r.mean(1), "--advantage grpo fails on 3 responses to each of 2 puzzles"),
    *((ADVANTAGES, "grpo", lambda r, s, base=base: r - base(r), f"--advantage grpo {ANOTHER}")
      for base in (lambda r: r.mean(0), lambda r: r[:, :1])),
    (ADVANTAGES, "grpo", lambda r, s: r - r.mean(1, keepdim=True), None),
    (ADVANTAGES, "grpo", lambda r, s: torch.randn_like(r), None),
    (ADVANTAGES, "grpo", lambda r, batch: (r - r.mean(1, keepdim=True)) / by_group(batch, batch.mask).sum(2), None),
    (LOSS_NORMS, "token", lambda mask, s: mask / mask.view(s.questions, s.responses, -1).sum(), None),
    (LOSS_NORMS, "token", lambda mask, s: mask / mask.sum(0).clamp(min=1) / torch.arange(1, len(mask) + 1)[:, None],
     f"--loss_norm token {ANOTHER}"),
    (LOSSES, "ppo", lambda lp, old, c, mask, s: (lp * (c - c.mean(0)), ~mask), f"--loss ppo {ANOTHER}"),
    (LOSSES, "ppo", lambda logprob, *_: logprob, "--loss ppo must return two tensors"),
    (LOSSES, "ppo", lambda logprob, *_: (logprob, logprob > 0, logprob), "and may add a dict of others"),
    (LOSSES, "ppo", loss_that_adds(mine=torch.mean), "and may add a dict of others"),
    (LOSSES, "ppo", loss_that_adds(kl=torch.exp), "the loss gives a column kl, but metrics.csv has one"),
    (LOSSES, "ppo", lambda logprob, *_: (logprob / 0, logprob > 0), "--loss divides by 0"),
    (LOSS_NORMS, "token", lambda mask, s: mask.sum(1), "--loss_norm token must give each token"),
    (LOSS_NORMS, "token", lambda mask, s: mask / 0, "--loss_norm token must give each token"),
    (LOSSES, "ppo", loss_that_adds(critic_loss=torch.exp), "learn of the head critic gives a column critic_loss"),
    (Critic, "learn", lambda *_: {"reward": 1.0}, "learn of the head critic gives a column reward"),
    (Critic, "learn", lambda *_: {"a\nb": 1.0}, "names a column 'a\\\\nb'"),
    (Critic, "learn", lambda *_: {"low": "0.5"}, "learn of the head critic: low must be a number, not '0.5'"),
    (Critic, "learn", lambda *_: 0.5, "must return a dict of columns, or nothing, not float")])
def test_a_mistake_is_seen_before_the_run_begins(place, name, stand_in, said, everything, monkeypatch):
    """Also in a loss, which is not asked about responses without credit: in a trial step all have the same reward. And
    guards against a mean over the wrong axis, which equal rewards and a square step hide."""
    patch = monkeypatch.setitem if isinstance(place, dict) else monkeypatch.setattr
    patch(place, name, stand_in)
    s = Settings(questions=8, shaping="overlong", advantage="rloo" if name == "rloo" else "grpo")
    policy = everything[0]._replace(heads={"critic": everything[0].heads["critic"]}, reference=None)
    with pytest.raises((ValueError, FloatingPointError), match=said) if said else nullcontext():
        start.try_step(policy, everything[1], GENERATE(4096, "train"), s, CREDIT_FUNCTIONS["none"])


class RunningMean(torch.nn.Module):
    """A head without an optimizer, which remembers rewards."""

    def __init__(self, hidden_size):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def read(self, hidden, mask):
        return self.mean * mask

    def learn(self, batch):
        self.mean.lerp_(batch.reward.mean().float(), 0.1)
        return {"baseline": self.mean}


@pytest.mark.slow
def test_the_memory_of_a_head_begins_with_the_run_and_is_resumed(quick, tmp_path, monkeypatch):
    """A mean that moves by a tenth towards rewards of -1 is -(1 - 0.9^k) after step k."""
    monkeypatch.setattr(countdown_task, "grade", lambda *_: {"answer": 1, "format": 0})
    monkeypatch.setitem(HEADS, "running", RunningMean)
    less = lambda batch: batch.reward[:, None] - batch.ask.head("running")
    monkeypatch.setitem(CREDIT_FUNCTIONS, "none", replace(CREDIT_FUNCTIONS["none"], function=less, needs=("running",)))
    flags = [*TINY, "--reward_weights", "answer=-1", "--out", tmp_path / "r"]
    run(*flags, "--steps", 2)
    run("--resume", tmp_path / "r", "--steps", 4)
    found = [float(row["baseline"]) for row in rows(tmp_path / "r")[1:]]
    assert found == pytest.approx([-(1 - 0.9**k) for k in (1, 2, 3, 4)])


# ---------------------------------------------------------------------------------------------- kill and resume


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_writes_is_the_same_in_the_end(tmp_path):
    """Again and again: between a model and its state, in a checkpoint, before final.json. Guards against what depends on a
    buffer, or on half a file."""
    flags = [*TINY, "--mitigation", "ppo", "--task", "guess", "--kl", 0.1, "--temperature", 0.8, "--linear_decay",
             "--steps", 4, "--eval_greedy", "--state_every", 2, "--checkpoint_every", 3, "--pass_at", 0, "--out", "run"]
    whole, often = tmp_path / "whole", tmp_path / "often"
    assert storm.killed(flags, whole, 0) == 0
    for last in (30, 50, 33, 51, 0):
        words = ["--resume", "run"] if often.exists() else flags
        assert storm.killed(words, often, last) == (-signal.SIGKILL if last else 0)
    assert storm.contents(often) == storm.contents(whole) and not [*tmp_path.rglob("*.part")]
    start, end = (load_model(model).output_weight for model in (MODELS / "guess-tiny", often / "run" / "checkpoint"))
    assert not torch.equal(start, end)


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_loses_no_state(quick, undisturbed, tmp_path, monkeypatch, capsys):
    """It is full before the run begins, or with its first state. (capsys: what is printed goes into no file.)"""
    monkeypatch.chdir(tmp_path)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room, said in ((100, r"\[Errno 27\] .*"), (6_000_000, r"run/state.pt can't be written, is the disk full\? .*; "
                       "what finished before is in run, which --resume continues")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, unlimited[1]))
        try:
            assert re.fullmatch(f"error: {said}", refused(run, *STOPPED))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert Path("run").exists() == (room > 100)
    run("--resume", "run")
    assert storm.contents(Path()) == undisturbed


STOPPED = [*TINY, "--mitigation", "ppo", "--steps", 5, "--state_every", 0, "--updates_per_batch", 2, "--pass_at", 0,
           "--out", "run"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The files of a run in which nothing happens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "evaluate", lambda policy, puzzles, k, s: np.zeros((len(puzzles), k)))
        patch.chdir(tmp_path_factory.mktemp("undisturbed"))
        run(*STOPPED)
        return storm.contents(Path())


@pytest.mark.slow
@pytest.mark.parametrize("number, owner, name, step, kept", [
    ("SIGINT", train, "rollout", 3, 2), ("SIGTERM", train, "rollout", 1, 0), ("SIGTERM", train, "update", 3, 3),
    ("SIGHUP", Optimizer, "round_into_model", 3, 3), ("SIGTERM", run_folder, "append_row", 4, 4),
    ("SIGTERM", Critic, "learn", 3, 3), ("SIGINT", grpo, "clip_grad_norm_", 3, 3),
    ("SIGINT", train, "measure_heldout", 4, 4)])
def test_a_run_that_is_stopped_resumes_after_its_last_whole_step(number, owner, name, step, kept, quick, undisturbed,
                                                                 interruptible, tmp_path, monkeypatch):
    """No state is due before. Guards against half a step in it: of weights, a critic's, or a row. A signal comes twice
    where a launcher hands it on."""
    monkeypatch.chdir(tmp_path)
    original, rate, now = getattr(owner, name), train.learning_rate, [0]  # the rate is asked for once a step

    def stopped(*arguments, **options):
        if now[-1] == step:
            now.append(0)
            for _ in range(1 + (step == 4)):
                os.kill(os.getpid(), getattr(signal, number))
        return original(*arguments, **options)
    with monkeypatch.context() as patch:
        patch.setattr(train, "learning_rate", lambda s, step: now.append(step) or rate(s, step))
        patch.setattr(owner, name, stopped)
        said = refused(run, *STOPPED)
    after = f" after step {kept}" * (kept > 0)
    assert said == f"error: interrupted{after}; continue with: python train.py --resume run"
    assert run_folder.load_state(Path("run"))["step"] == kept
    run("--resume", "run")
    assert storm.contents(Path()) == undisturbed


@pytest.mark.slow
def test_a_run_is_resumed_with_less_memory_and_says_so(quick, tmp_path, capsys, refusal):
    """Guards against a run that is stuck where memory ran out, other random numbers, and a change nobody can see."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        run(*SMALL, "--steps", 2, "--mitigation", "ppo", "--out", folder)
    changes = {"steps": [2, 4], "eval_every": [25, 3], "pass_at": [0, 2], "checkpoint_every": [0, 4],
               "micro_batch": [32, 1], "checkpoint_activations": [False, True], "optimizer_device": ["", "cpu"]}
    less = [f"--{name}={new}" for name, (_, new) in changes.items()] + ["--device", "cpu"]
    assert "takes no --lr, only" in refusal(train, "--resume", two, *less, "--lr", 1)
    run("--resume", two, *less)
    assert "eval_every=3 (it was 25), pass_at=2 (it was 0)" in capsys.readouterr().out
    assert (two / "checkpoints" / "step-000004").is_dir() and rows(two)[3]["heldout_success"]
    for folder in (one, two):
        run("--resume", folder, "--steps", 5)
    config = read_json(two / "config.json")
    assert config["settings"]["micro_batch"] == 1 and "resumed" not in read_json(one / "config.json")
    assert config["resumed"] == [{"after_step": 2, **changes}]
    for step in range(1, 6):
        a, b = (credit_log(folder, step) for folder in (one, two))
        assert np.array_equal(a["token"], b["token"])
        np.testing.assert_allclose(a["credit"], b["credit"], atol=1e-4)


@pytest.mark.slow
def test_a_run_of_an_older_version_is_resumed(quick, tmp_path):
    """Which has a setting that is gone, and lacks columns of metrics.csv: they begin with the next step."""
    one, old = tmp_path / "one", tmp_path / "old"
    for folder in (one, old):
        run(*SMALL, "--steps", 2, "--out", folder)
    config = read_json(old / "config.json")
    config["settings"]["reading"] = "shared"
    (old / "config.json").write_text(json.dumps(config))
    lines = [line.split(",")[:-3] for line in (old / "metrics.csv").read_text().splitlines()]
    assert COLUMNS[-3:] == ["gradient_filler", "gradient_reasoning", "gradient_structure"]
    (old / "metrics.csv").write_text("".join(",".join(line) + "\n" for line in lines), newline="")
    state = torch.load(old / "state.pt", weights_only=True)
    state["lengths"]["metrics.csv"] = (old / "metrics.csv").stat().st_size
    torch.save(state, old / "state.pt")
    for folder in (one, old):
        run("--resume", folder, "--steps", 3)
    known, found = (read_metrics(folder) for folder in (one, old))
    for name in COLUMNS:
        if name not in ("seconds", "tokens_per_second"):
            added = name in COLUMNS[-3:]
            assert np.isnan(found[name][: 3 * added]).all()
            np.testing.assert_array_equal(found[name][3 * added :], known[name][3 * added :])


@pytest.mark.slow
def test_what_a_run_rests_on_may_move(quick, tmp_path, monkeypatch, refusal):
    """It is known by its checksum. Guards against another file in its place, in silence, too."""
    here, there = tmp_path / "here", tmp_path / "far" / "there"
    shutil.copytree(BUNDLED, here / "weights" / "m")
    shutil.copy(REVERSE, here / "mine.py")
    (here / "words.txt").write_text("abc")  # which this task doesn't read
    monkeypatch.chdir(here)
    flags = [*TINY, "--lora_rank", 2, "--steps", 1, "--pass_at", 0]
    run(*flags, "--out", "first")
    run(*flags, "--task", "mine.py", "--data", "words.txt", "--model", "weights/m", "--adapter",
        "first/checkpoint/adapter", "--out", "runs/r")
    monkeypatch.chdir(tmp_path)
    shutil.move(here, there)
    resume = ["--resume", there / "runs" / "r", "--steps"]
    assert "m, which is not there: say where it is now with --model" in refusal(train, *resume, 2)
    (there / "weights" / "m").rename("q")
    Path("link").symlink_to("q")
    run(*resume, 3, "--model", "link", "--data", there / "words.txt", "--task", there / "mine.py", "--adapter",
        there / "first" / "checkpoint" / "adapter")
    Path("words.txt").write_text("abd")
    assert "words.txt is not what" in refusal(train, *resume, 4, "--data", "words.txt")
    Path("mine.py").write_text(Path(REVERSE).read_text().replace('"abcdefgh", repeat', '"hgfedcba", repeat'))
    assert "words.txt is not what" in refusal(train, *resume, 4, "--data", "words.txt", "--task", "mine.py")
    Path("q/tokenizer_config.json").write_text("{}")
    assert "link/tokenizer_config.json is not what" in refusal(train, *resume, 4)


def test_a_test_file_is_held_out_and_nothing_of_it_trained_on(tmp_path, capsys, refusal):
    """Guards against one in training, even beyond --eval_problems, and a tenth of --data that is not used, too."""
    mine = generate_puzzles(60, "train") + generate_puzzles(20, "heldout")
    test = [*mine[50:70], *generate_puzzles(10, "new_numbers")]
    data, eval_data, wrong = (tmp_path / f"{name}.jsonl" for name in ("mine", "test", "wrong"))
    one = SimpleNamespace(numbers=[1, 1, 1], target=99)
    for file, puzzles in ((data, mine), (eval_data, test + test[:3]), (wrong, [one])):
        file.write_text("".join(json.dumps({"nums": p.numbers, "target": p.target}) + "\n" for p in puzzles))
    ids = lambda puzzles: {p.id for p in puzzles}
    training, heldout = load_puzzles(countdown_task, 12, str(data), str(eval_data))
    said = capsys.readouterr().out
    assert "20 of 80 training puzzles are in" in said and "12 of the 30 puzzles" in said
    assert ids(training) == ids(mine[:50] + mine[70:]) and len(ids(heldout)) == 12 and ids(heldout) <= ids(test)
    training, heldout = load_puzzles(countdown_task, 20, str(data))
    assert ids(training) == ids(mine[:60]) and ids(heldout) == ids(mine[60:])
    inputs = run_folder.checksums(vars(Settings(model=str(BUNDLED), data=str(data), eval_data=str(eval_data))), {})
    assert {str(data), str(eval_data), str(BUNDLED / "model.safetensors")} <= inputs.keys()
    for flags, said in (["--eval_data", wrong], f"{wrong}: [1, 1, 1] can't make 99"), (
            ["--data", eval_data, "--eval_data", eval_data], "all puzzles to train on are in"):
        assert said in refusal(train, *TINY, *flags, "--out", tmp_path / "r") and not (tmp_path / "r").exists()


# ------------------------------------------------------------------------------------------------- bad inputs


def test_a_prompt_and_response_that_just_fit_are_accepted(policy):
    puzzles, config = GENERATE(9, "heldout"), policy.model.config
    room = config.max_position_embeddings - max(len(policy.prompt(p)) for p in puzzles)
    launch.check_lengths(policy, puzzles, Settings(max_new_tokens=room))
    with pytest.raises(ValueError, match="--max_new_tokens"):
        launch.check_lengths(policy, puzzles, Settings(max_new_tokens=room + 1))
    policy.model.config = replace(config, vocab_size=policy.tokenizer.size - 1)
    with pytest.raises(ValueError, match="tokenizer"):
        launch.check_lengths(policy, puzzles, Settings())


def test_a_run_is_told_once_what_it_can_not_show(capsys):
    """192 puzzles are the first whose difference of two rates has a 95% interval of +- 10 points, by hand 1.96 *
    sqrt(0.5 / 0.01 / 10000)."""
    for heldout, told in ((193, 0), (192, 1)):
        launch.announce([], {}, 9, heldout, "r", {}, None)
        assert capsys.readouterr().out.count("would not show") == told


REVERSE = str(Path(__file__).parent / "reverse_task.py")
OTHER_TASK = ["--task", REVERSE, "--model", BUNDLED]


@pytest.mark.parametrize("flags, said", [
    *((flags, flags[0]) for flags in (
        ["--responses", 1], ["--responses", 10**5], ["--beta1", 1.0], ["--clip_high", 1e308], ["--questions", 0],
        ["--lr", "nan"], ["--max_new_tokens", 9999], ["--device", "nonsense"], ["--device", "meta"],
        ["--k", 0, "--mitigation", "vineppo"], ["--temperature", 0], ["--max_grad_norm", "inf"],
        ["--warmup_steps", 101])),
    *((["--on_step", name], said) for name, said in (
        ("gone:log", "--on_step gone:log: No module"), ("json", "name module:function"),
        (":log", "name module:function"), ("json:log", "has no attribute 'log'"), ("json:__doc__", "is no function"))),
    (["--model", "nowhere"], "no folder nowhere"), (["--eval_data", "nowhere"], "no data file nowhere"),
    ([*OTHER_TASK, "--mitigation", "first_error"], "needs calculations, which is neither a function of the task"),
    ([*OTHER_TASK, "--task", "sudoku"], "tasks/NAME_task.py"),
    ([*OTHER_TASK, "--task", "tests/reverse"], "tasks/NAME_task.py"),
    ([*OTHER_TASK, "--task", "gone.py"], "no task file gone.py"), (["--task", "gone.py"], "no task file gone.py"),
    ([*OTHER_TASK, "--data", "gone.txt"], "no data file gone.txt"),  # which this task does not look for
    *((["--reward_weights", text], "such as answer=1,format=0.1") for text in ("answer", "answer=nan", "answer:1")),
    (["--advantage", "gdpo", "--reward", "random"], "a coin has not"),
    (["--advantage", "gdpo", "--shaping", "kl"], "compares the parts of the reward"),
    ([*OTHER_TASK, "--task", __file__], "has no function load"), ([*OTHER_TASK, "--model", ""], "has no model in"),
    *(((function, value), said) for function, value, said in (  # what a task should not return
        ("grade", {"answer": math.nan, "format": 1.0}, "answer must be a finite number, not nan"),
        ("grade", {"answer": 2.0, "format": 1.0}, "answer and format must be from 0 to 1"),
        ("grade", 1.0, "must be an object with answer"),
        ("grade", {"answer": 1, "format": 1, "why": "no"}, "why must be a number, not 'no'"),
        ("grade", {"answer": 1, "format": 1, "loss": 0}, "the task's grade gives a column loss"),
        ("PARTS", {"letters": 1}, "what the task's grade returns has no letters"), ("PARTS", {}, "must be weights"),
        ("PARTS", {"reward": 1}, "has no reward, of which the task's PARTS"),
        ("PARTS", {"answer": "1"}, "must be weights"),
        ("roles", 0, "roles must return two arrays"),
        ("roles", (np.full(1, 9), np.ones(1, bool)), "roles must return two"),
        ("prompt", None, "prompt must return text, not None"),
        ("reply", 7, "reply must return text, not 7"), ("reply", ("a", 7), "reply must return text, not ('a', 7)"),
        ("load", [], "has no puzzles to train on"),
        ("load", ["abc"], "puzzles without an id that is text, such as 'abc'"),
        ("load", [SimpleNamespace(id="abc")] * 4, "more than the 2 held-out puzzles asked for, or one twice"),
        ("load", [SimpleNamespace(id="abc")], "abc is held out, and trained on")))], ids=str)
def test_what_cannot_work_is_refused_in_one_sentence(flags, said, tmp_path, monkeypatch, refusal):
    """Guards against NaN that turns up later, roles that don't exist, and held-out puzzles that are trained on, too."""
    if isinstance(flags, tuple):
        function, value = flags
        in_trial = ["--task", "guess", "--max_new_tokens", 1]  # which tries a reply, though no turn ends in it
        task, flags = (guess_task, in_trial) if function == "reply" else (countdown_task, [])
        monkeypatch.setattr(task, function, value if function == "PARTS" else lambda *_, **__: value)
    refused = refusal(train, *TINY, *flags, "--out", tmp_path / "r")
    assert said in refused and not re.search(r"line \d+ of", refused) and not (tmp_path / "r").exists()


BUGS = {"FileNotFoundError": "open('nowhere')", "JSONDecodeError": "json.loads('1 2')",
        "ValueError": "raise ValueError('this')", "BrokenPipeError": "raise BrokenPipeError"}


@pytest.mark.slow
@pytest.mark.parametrize("kind, owner, name", [(kind, *place) for kind, place in zip(cycle(BUGS), [
    *((countdown_task, name) for name in ("load", "prompt", "grade", "roles", "key", "show")), (guess_task, "reply"),
    (SHAPINGS, "none"), (ADVANTAGES, "grpo"), (LOSSES, "ppo"), (LOSS_NORMS, "token"), (KL_GRADIENTS, "k3"),
    (CREDIT_FUNCTIONS, "ppo"), (HEADS, "critic"), (Critic, "read"), (Critic, "learn"), (None, "on_step")])])
def test_an_error_in_somebody_s_function_has_its_place(kind, owner, name, tmp_path, monkeypatch, refusal):
    """Whoever calls it, and whatever it raises: also what a library does, and a pipe that is not the terminal's."""
    file = tmp_path / "of_mine.py"
    file.write_text(f"import json\n\n\ndef broken(*_, **__):\n    {BUGS[kind]}\n")
    broken = runpy.run_path(file)["broken"]
    monkeypatch.setitem(sys.modules, "of_mine", SimpleNamespace(broken=broken))
    if isinstance(owner, dict):
        mine = replace(CREDIT_FUNCTIONS["none"], function=lambda batch: broken()) if owner is CREDIT_FUNCTIONS else broken
        monkeypatch.setitem(owner, name, mine)
    elif owner:
        monkeypatch.setattr(owner, name, broken, raising=False)
    flags = ["--mitigation", "ppo", "--kl", 1] if owner else ["--on_step", "of_mine:broken"]
    flags += ["--task", "guess"] if owner is guess_task else []
    said = refusal(train, *TINY, *flags, "--out", tmp_path / "r")
    assert f"({kind} in broken, line 5 of {file})" in said


@pytest.mark.slow
def test_a_run_that_fails_ends_in_one_sentence(quick, tmp_path, monkeypatch, refusal):
    """Ctrl-C before the first step, credit that is infinite where the rehearsal does not look, a loss that diverges,
    and no memory."""
    with monkeypatch.context() as patch:
        patch.setattr(start, "try_step", Mock(side_effect=KeyboardInterrupt))
        assert "interrupted before training began" in refusal(train, *TINY, "--out", tmp_path / "runs" / "r")
        assert not [*tmp_path.iterdir()]
    late = lambda batch: batch.advantage[:, None] * batch.mask / (batch.mask.shape[1] <= 8)
    new = lambda batch: batch.log.update({"new": batch.entropy} if batch.mask.shape[1] > 8 else {}) or batch.logprob
    old = lambda batch: batch.log.update({"old": batch.entropy} if batch.mask.shape[1] <= 8 else {}) or batch.logprob
    for function, said in ((late, str(tmp_path / "late")), (new, "batch.log has new in step 1, unlike in the trial"),
                           (old, "batch.log lacks old in step 1, unlike in the trial")):
        with monkeypatch.context() as patch:
            patch.setitem(CREDIT_FUNCTIONS, "none", replace(CREDIT_FUNCTIONS["none"], function=function))
            assert said in refusal(train, *TINY, "--max_new_tokens", 80, "--out", tmp_path / "late")
            shutil.rmtree(tmp_path / "late")
    message = refusal(train, *SMALL, "--steps", 3, "--lr", 1e9, "--out", tmp_path / "lr")
    assert "--lr" in message and str(tmp_path / "lr") in message
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        monkeypatch.setattr(train, "update", Mock(side_effect=error))
        assert "not enough memory" in refusal(train, *TINY, "--out", tmp_path / type(error).__name__)
    monkeypatch.setattr(train, "update", Mock(side_effect=RuntimeError("illegal memory access")))
    with pytest.raises(RuntimeError, match="illegal"):
        run(*TINY, "--out", tmp_path / "r")


def test_the_check_of_the_puzzles_ends_with_the_last_of_them():
    """Guards against a billion steps that are drawn before the first one, and against a puzzle that is not checked."""
    policy, puzzles = start.load_policy(Settings()), GENERATE(4096, "train")[:30]
    checked = []
    policy = policy._replace(task=SimpleNamespace(check=checked.append, prompt=countdown_task.prompt))
    for steps, count in ((2, 14), (10**9, 30)):
        checked.clear()
        s = Settings(data="x", questions=7, steps=steps, seed=3)
        launch.check_puzzles(policy, start.puzzles_of_run(puzzles, s), [], s)
        drawn = [puzzle for step in range(1, min(steps, 5) + 1) for puzzle in draw_puzzles(puzzles, s, step)]
        assert set(checked) == set(drawn) and len(checked) == count
