"""The command line end to end: run folder, determinism, Ctrl-C, going on, and one clear sentence for every bad input.

Run it:  python -m pytest tests/test_train.py
"""

import copy
import csv
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import critic as critic_file
import grpo
import mitigations
import qwen2_model
import train
from countdown_task import generate_problems, split
from critic import Critic, load_critic
from mitigations import MITIGATIONS
from qwen2_model import Qwen2, load_model, replace_file
from train import BUNDLED, COLUMNS, Settings

ROOT = Path(train.__file__).parent
SMALL = ["--questions", "3", "--answers", "4", "--eval_problems", "12", "--max_new_tokens", "50"]
TIMINGS = {"seconds", "tokens_per_second"}


def run(*arguments):
    """Run train.py in this process."""
    sys.argv = ["train.py", *map(str, arguments)]
    train.main()


def rows(folder):
    """metrics.csv as a list of dicts."""
    return list(csv.DictReader((folder / "metrics.csv").open()))


def figures(folder):
    """metrics.csv without what a clock says."""
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows(folder)]


def error_of(capsys, *arguments):
    """The message with which train.py refuses its arguments; it must be one line, and the exit status not 0."""
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    message = str(stop.value.code)
    assert message.startswith("error: ") and "\n" not in message and len(message) < 400
    return message


# ------------------------------------------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("runs") / "none-seed0"
    run(*SMALL, "--steps", 4, "--eval_every", 2, "--checkpoint_every", 2, "--sample_every", 2, "--out", folder)
    return folder


def test_run_folder_is_complete(finished):
    """Guards against a file of design.md that is not written."""
    names = {str(p.relative_to(finished)) for p in finished.rglob("*") if p.is_file()}
    model = {"config.json", "model.safetensors", "tokenizer.json"}
    assert names >= {
        "config.json",
        "metrics.csv",
        "samples.txt",
        "final.json",
        *(f"credit/step-{i:06d}.npz" for i in (1, 2, 3, 4)),
        *(f"checkpoint/{m}" for m in model),
        *(f"checkpoints/step-{i:06d}/{m}" for i in (2, 4) for m in model),
    }
    config = json.loads((finished / "config.json").read_text())
    assert (
        config["settings"]["questions"] == 3
        and config["versions"]["torch"] == torch.__version__
        and "--steps 4" in config["command"]
    )
    final = json.loads((finished / "final.json").read_text())
    assert final["heldout_success"] == float(rows(finished)[4]["heldout_success"]) and 0 <= final["pass@16"] <= 1


def test_metrics_agree_with_the_credit_log(finished):
    """Guards against a column that means something else than its name: recomputed from the flat log."""
    table = rows(finished)
    assert list(table[0]) == COLUMNS and [r["step"] for r in table] == ["0", "1", "2", "3", "4"]
    assert [bool(r["heldout_success"]) for r in table] == [True, False, True, False, True]
    assert all(table[0][name] == "" for name in COLUMNS if name != "step" and not name.startswith("heldout"))
    for row in table[1:]:
        log = np.load(finished / "credit" / f"step-{int(row['step']):06d}.npz")
        first = log["position"] == 0
        groups = {g: log["reward"][first & (log["group"] == g)] for g in set(log["group"])}
        expected = {
            "reward": log["reward"][first].mean(),
            "length": len(log["token"]) / first.sum(),
            "entropy": log["entropy"].mean(),
            "zero_variance_groups": sum(len(set(r)) == 1 for r in groups.values()),
        }
        for name, value in expected.items():
            assert float(row[name]) == pytest.approx(value, rel=1e-5)
        reward = log["reward"][first]
        solved = reward > 0.5  # 0.1 * format + success
        assert float(row["success"]) == pytest.approx(solved.mean())
        assert float(row["format"]) == pytest.approx(((reward - solved) * 10).mean(), abs=1e-4)
        assert float(row["tokens_per_second"]) * float(row["seconds"]) == pytest.approx(len(log["token"]))
        assert float(row["ratio_error"] or 0) < 1e-4 and float(row["clip_fraction"] or 0) == 0 and row["kl"] == ""


def test_heldout_error_is_that_of_a_share(finished):
    """Guards against a standard deviation in place of the standard error: 12 puzzles, each solved or not."""
    for row in rows(finished)[::2]:
        p = float(row["heldout_success"])
        assert float(row["heldout_stderr"]) == pytest.approx((p * (1 - p) / 11) ** 0.5)


def test_same_seed_same_metrics_and_another_seed_others(finished, tmp_path):
    """Guards against hidden chance, and against a run that depends on how many steps are to come."""
    run(*SMALL, "--steps", 3, "--eval_every", 2, "--out", tmp_path / "again")
    run(*SMALL, "--steps", 1, "--eval_every", 2, "--seed", 1, "--out", tmp_path / "other")
    strip = [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows(finished)[:3]]
    assert strip == [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows(tmp_path / "again")[:3]]
    assert rows(tmp_path / "other")[1]["loss"] != rows(finished)[1]["loss"]
    assert rows(tmp_path / "other")[0]["heldout_success"] == rows(finished)[0]["heldout_success"]


def test_micro_batch_does_not_change_the_run(finished, tmp_path):
    """Guards against results that depend on memory settings (the original's entropy weighting)."""
    run(*SMALL, "--steps", 2, "--eval_every", 2, "--micro_batch", 5, "--out", tmp_path / "r")
    for one, other in zip(rows(finished)[1:3], rows(tmp_path / "r")[1:3]):
        assert one["reward"] == other["reward"] and float(one["grad_norm"]) == pytest.approx(
            float(other["grad_norm"]), rel=1e-3
        )


def test_checkpoint_loads_in_transformers_with_the_same_logits(finished):
    """Guards against a checkpoint that only we can read, or that is not the trained model."""
    tokens = torch.arange(40)[None]
    theirs = AutoModelForCausalLM.from_pretrained(finished / "checkpoint", dtype=torch.float32)
    ours, start = load_model(finished / "checkpoint"), load_model(BUNDLED)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
        assert not torch.allclose(ours(tokens), start(tokens), atol=1e-4)
    text, tokenizer = "Using the numbers [4, 3, 5]", PreTrainedTokenizerFast.from_pretrained(finished / "checkpoint")
    assert tokenizer(text).input_ids == train.Codec(BUNDLED).tokenizer.encode(text).ids


def test_zero_steps_only_evaluate(tmp_path):
    """Guards against a loop that must run once."""
    run(*SMALL, "--steps", 0, "--out", tmp_path / "r")
    assert [r["step"] for r in rows(tmp_path / "r")] == ["0"]
    assert json.loads((tmp_path / "r" / "final.json").read_text())["step"] == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--kl", "0.1"],
        ["--updates_per_batch", "2"],
        ["--skip_unfinished"],
        ["--dtype", "bfloat16"],
        ["--loss_norm", "sequence", "--advantage", "rloo"],
        ["--mitigation", "outcome_conditional", "--think_discount", "0.3", "--normalize", "batch"],
    ],
    ids=" ".join,
)
def test_every_option_runs(flags, tmp_path):
    """Guards against a flag that is accepted and crashes."""
    run(*SMALL, "--steps", 2, "--out", tmp_path / "r", *flags)
    assert len(rows(tmp_path / "r")) == 3 and (rows(tmp_path / "r")[1]["kl"] != "") == ("--kl" in flags)


def test_every_flag_reaches_the_update(tmp_path, monkeypatch):
    """Guards against a valid flag that is ignored, swapped clips or betas, and a reference that trains along."""
    calls, original = [], grpo.update

    def spy(model, optimizer, *rest, **options):
        kinds = {w.dtype for w in model.parameters()}, {w.dtype for w in optimizer.master.values()}
        calls.append((dict(optimizer.adamw.param_groups[0]), options, kinds, model.checkpoint_activations))
        return original(model, optimizer, *rest, **options)

    monkeypatch.setattr(grpo, "update", spy)
    given = dict(
        kl=0.02,
        clip_low=0.1,
        clip_high=0.3,
        loss_norm="constant",
        updates_per_batch=2,
        max_grad_norm=0.7,
        micro_batch=5,
    )
    adam = ["--lr", 1e-3, "--beta1", 0.8, "--beta2", 0.95, "--weight_decay", 0.03]
    adam += ["--dtype", "bfloat16", "--checkpoint_activations"]
    run(*SMALL, "--steps", 2, *adam, *(x for k, v in given.items() for x in (f"--{k}", v)), "--out", tmp_path / "r")
    assert len(calls) == 2
    for group, options, kinds, checkpointed in calls:
        assert group["lr"] == 1e-3 and tuple(group["betas"]) == (0.8, 0.95) and group["weight_decay"] == 0.03
        assert kinds == ({torch.bfloat16}, {torch.float32}) and checkpointed
        assert {k: v for k, v in options.items() if k != "reference"} == given | {"max_new_tokens": 50}
        start = load_model(BUNDLED, dtype=torch.bfloat16).parameters()
        assert all(torch.equal(a, b) for a, b in zip(options["reference"].parameters(), start))


def test_the_log_holds_the_method_that_was_asked_for(tmp_path):
    """Guards against --mitigation, its own flags, --normalize or --advantage without effect."""
    method = [
        "--mitigation",
        "outcome_conditional",
        "--think_discount",
        0.25,
        "--normalize",
        "none",
        "--advantage",
        "dr_grpo",
    ]
    run(*SMALL[:-1], 140, "--steps", 1, *method, "--out", tmp_path / "r")
    log = np.load(tmp_path / "r" / "credit" / "step-000001.npz")
    assert log["credit"].any() and set(log["in_answer"].tolist()) == {0, 1}
    answered = np.bincount(log["response"], log["in_answer"])[log["response"]] > 0
    weight = np.where((log["in_answer"] == 1) | ~answered, 1, 0.25)
    np.testing.assert_allclose(log["credit"], log["advantage"] * weight, rtol=1e-5)
    for group in range(3):
        here = (log["position"] == 0) & (log["group"] == group)
        reward = log["reward"][here]
        np.testing.assert_allclose(log["advantage"][here], reward - reward.mean(), atol=1e-6)
    assert json.loads((tmp_path / "r" / "config.json").read_text())["method"] == {"think_discount": 0.25}


def test_only_heldout_puzzles_are_measured(tmp_path, monkeypatch):
    """Guards against success on training puzzles, and a pass@16 that is not one right answer in sixteen."""
    asked = []

    def fake(model, codec, problems, answers, *_):
        asked.append((problems, answers))
        solved = np.zeros((len(problems), answers))
        solved[::2, 0] = 1
        return solved

    monkeypatch.setattr(grpo, "evaluate", fake)
    run(*SMALL, "--steps", 1, "--out", tmp_path / "r")
    *single, sixteen = [answers for _, answers in asked]  # at the start, and at the end
    assert len(single) >= 2 and set(single) == {1} and sixteen == 16
    assert all(len(problems) == 12 and {split(p) for p in problems} == {"heldout"} for problems, _ in asked)
    final = json.loads((tmp_path / "r" / "final.json").read_text())
    assert final["pass@16"] == 0.5 and final["heldout_problems"] == 12


def test_samples_stand_under_their_own_puzzle(finished):
    """Guards against samples of one question only, at the wrong steps, or under another puzzle."""
    heads = re.findall(r"=== step (\d+)  (\[.*?\]) -> (\d+)", (finished / "samples.txt").read_text())
    s, puzzles = Settings(questions=3), generate_problems(4096, "train")
    asked = [(step, p) for step in (1, 2, 4) for p in train.draw_problems(puzzles, s, step)]
    assert heads == [(str(step), str(list(p.numbers)), str(p.target)) for step, p in asked]


def test_broken_weights_end_the_run_in_one_sentence(tmp_path, capsys):
    """Guards against an index error, far from its cause, when training diverges."""
    message = error_of(capsys, *SMALL, "--steps", 3, "--lr", 1e9, "--out", tmp_path / "r")
    assert "--lr" in message and str(tmp_path / "r") in message and len(rows(tmp_path / "r")) >= 1


def test_bfloat16_samples_from_the_weights_it_trains(tmp_path):
    """Guards against float32 weights that learn while the model samples from its old ones: the checkpoint of a run
    solves as many puzzles in a run of its own as it did at the end of the first."""
    flags = [*SMALL, "--dtype", "bfloat16", "--eval_problems", 40]
    run(*flags, "--steps", 3, "--lr", 0.02, "--out", tmp_path / "r")
    run(*flags, "--steps", 0, "--model", tmp_path / "r" / "checkpoint", "--out", tmp_path / "again")
    start, end = (float(rows(tmp_path / "r")[i]["heldout_success"]) for i in (0, -1))
    assert start > 0 and end != start and float(rows(tmp_path / "again")[0]["heldout_success"]) == end


def test_skip_unfinished_gives_no_credit_to_the_cut_off(tmp_path):
    """Guards against a flag without effect: with 20 tokens every response is cut off."""
    run(*SMALL[:-1], "20", "--steps", 1, "--skip_unfinished", "--out", tmp_path / "r")
    assert not np.load(tmp_path / "r" / "credit" / "step-000001.npz")["credit"].any()
    assert float(rows(tmp_path / "r")[1]["truncated"]) == 1


def test_ctrl_c_leaves_a_usable_run(tmp_path):
    """Guards against an interruption that loses the log or the checkpoint."""
    command = [sys.executable, "train.py", *SMALL, "--steps", "5000", "--eval_every", "0", "--out", str(tmp_path / "r")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.time() + 120
    while len(list((tmp_path / "r" / "credit").glob("*.npz"))) < 2 and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "stopping after this step" in output and "Traceback" not in output
    done = int(rows(tmp_path / "r")[-1]["step"])
    final = json.loads((tmp_path / "r" / "final.json").read_text())
    assert 2 <= done < 5000 and final["step"] == done and 0 <= final["heldout_success"] <= 1 and "pass@16" not in final
    assert len(list((tmp_path / "r" / "credit").glob("*.npz"))) == done
    load_model(tmp_path / "r" / "checkpoint")


# ------------------------------------------------------------------------------------------------- every method

GENERATE, CALLABLES = functools.cache(generate_problems), grpo.callables
TINY = ["--steps", "2", "--questions", "2", "--answers", "2", "--eval_problems", "2", "--eval_every", "0"]


@pytest.fixture
def quick(monkeypatch):
    """Without what takes long and these tests do not look at: 4096 puzzles each time, and held-out success."""
    monkeypatch.setattr(train, "generate_problems", GENERATE)
    monkeypatch.setattr(grpo, "evaluate", lambda model, codec, problems, k, *_: np.zeros((len(problems), k)))


@pytest.mark.parametrize("name", MITIGATIONS)
def test_every_method_trains(name, quick, tmp_path, monkeypatch):
    """Guards against a method that only works on made-up batches, a log of other credit than the update's, and a critic
    or start model that is there for nothing, or not there."""
    asked, copied, used, update, deepcopy = set(), [], [], grpo.update, copy.deepcopy

    def spy_callables(*args):
        def told(what, ask):
            return lambda *inputs: (asked.add(what), ask(*inputs))[1]
        return {what: told(what, ask) for what, ask in CALLABLES(*args).items()}

    def spy_update(model, optimizer, prompts, batch, credit, **options):
        used.append((batch, credit))
        return update(model, optimizer, prompts, batch, credit, **options)

    def spy_deepcopy(x, *memo):
        copied.extend([x] * isinstance(x, Qwen2))
        return deepcopy(x, *memo)

    monkeypatch.setattr(grpo, "callables", spy_callables)
    monkeypatch.setattr(grpo, "update", spy_update)
    monkeypatch.setattr(copy, "deepcopy", spy_deepcopy)
    run(*TINY, "--answers", 3, "--max_new_tokens", 80, "--mitigation", name, "--out", tmp_path / "r")
    assert [row["step"] for row in rows(tmp_path / "r")] == ["0", "1", "2"] and len(used) == 2
    empty = {"kl", "clip_fraction", "ratio_error", "heldout_success", "heldout_stderr"}
    for row in rows(tmp_path / "r")[1:]:
        assert all(np.isfinite(float(row[column])) for column in COLUMNS if row[column] or column not in empty)
    for step, (batch, credit) in enumerate(used, 1):
        log = np.load(tmp_path / "r" / "credit" / f"step-{step:06d}.npz")
        assert np.array_equal(log["credit"], credit[batch.mask].numpy()) and not credit[~batch.mask].any()
        assert np.isfinite(log["credit"]).all()
    assert any(batch.advantage.any() for batch, _ in used) and any(credit.any() for _, credit in used)
    assert (tmp_path / "r" / "checkpoint" / "critic.safetensors").exists() == ("values" in asked)
    assert bool(copied) == ("reference_logprob" in asked)
    assert asked == {"none": set(), "ppo": {"values"}, "dpo": {"reference_logprob"}}.get(name, asked)  # the spy sees it


@pytest.mark.parametrize("method", [["random"], ["vineppo", "--k", 2], ["ppo"]], ids=lambda m: m[0])
def test_methods_with_chance_repeat_themselves(method, quick, tmp_path):
    """Guards against chance from a global generator, whose state no seed of ours sets: sampled noise, fresh ends, and
    the critic's first weights."""
    flags = [*TINY, "--max_new_tokens", 40, "--mitigation", *method]
    for i, seed in enumerate((0, 0, 1)):
        torch.manual_seed(i)
        np.random.seed(i)
        run(*flags, "--seed", seed, "--out", tmp_path / str(i))
    assert figures(tmp_path / "0") == figures(tmp_path / "1") != figures(tmp_path / "2")
    credit = [np.load(tmp_path / str(i) / "credit" / "step-000002.npz")["credit"] for i in range(3)]
    assert np.array_equal(credit[0], credit[1]) and credit[0].any() and not np.array_equal(credit[0], credit[2])


def test_every_seed_and_step_has_its_own_chance(codec, monkeypatch):
    """Guards against a method whose noise is the same in every step, or for every seed."""
    model, drawn = load_model(BUNDLED), {}
    model.real_vocab = codec.size

    def probe(batch):
        drawn.setdefault((seed, step), []).append(tuple(torch.rand(3, generator=batch.generator("probe")).tolist()))
        return mitigations.none(batch)

    monkeypatch.setitem(MITIGATIONS, "probe", probe)
    for seed, step in ((0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (0, 1)):
        s = Settings(mitigation="probe", answers=2, max_new_tokens=1, seed=seed)
        train.assign_credit(model, codec, GENERATE(4096, "train")[:1], s, {}, step, None, None)
    assert len(set().union(*drawn.values())) == len(drawn) == 5 and len(set(drawn[0, 1])) == 1


def test_a_checkpoint_with_a_critic(quick, tmp_path):
    """Guards against a critic that is lost between runs, trained on the wrong rewards, or in transformers' way."""
    flags = [*TINY, "--max_new_tokens", 30, "--mitigation", "ppo", "--checkpoint_every", 1]
    run(*flags, "--out", tmp_path / "r")
    folder = tmp_path / "r" / "checkpoint"
    assert (tmp_path / "r" / "checkpoints" / "step-000001" / "critic.safetensors").is_file()
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    scored, score = [], Critic.score
    critic = load_critic(folder, load_model(folder))
    assert critic.outer.weight.any()

    def spy(critic, hidden, mask):
        value = score(critic, hidden, mask)
        scored.append((hidden, mask, value))
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Critic, "score", spy)
        run(*flags, "--model", folder, "--out", tmp_path / "again")
    hidden, mask, value = scored[1]  # the first is the rehearsal's
    assert value.any() and torch.equal(value, critic.score(hidden, mask))


def test_a_step_is_scored_before_its_rewards_are_learned(codec, quick, monkeypatch):
    """Guards against values that have seen the rewards of their own step, or that never learn from the last one."""
    s, own = Settings(mitigation="ppo", questions=2, answers=2, max_new_tokens=30), mitigations.parameters("ppo")
    model, problems, seen = load_model(BUNDLED), GENERATE(4096, "train"), []
    model.real_vocab, score = codec.size, Critic.score
    monkeypatch.setattr(Critic, "score", lambda *args: (seen.append(score(*args)), seen[-1])[1])
    for right in (0.0, 1.0):
        monkeypatch.setattr(grpo, "reward", lambda *_: {"reward": right, "answer": right, "format": right})
        torch.manual_seed(0)
        critic, optimizer = Critic(128), grpo.Optimizer(model, lr=0.0)  # the model stays
        torch.nn.init.normal_(critic.outer.weight)
        for step in (1, 2):
            asked = train.draw_problems(problems, s, step)
            train.train_step(model, optimizer, codec, asked, s, own, step, None, critic)
    none_right, then, all_right, and_then = seen
    assert torch.equal(none_right, all_right) and none_right.any()
    assert (then - and_then)[then != 0].mean() < -0.01


def test_the_rehearsal_leaves_no_trace(codec, quick):
    """Guards against a critic that learns from the rehearsal's responses, and a generator that moves on."""
    model = load_model(BUNDLED)
    model.real_vocab, critic, problems = codec.size, Critic(128), GENERATE(4096, "train")
    both = torch.nn.ModuleList((model, critic))
    before, chance = copy.deepcopy(both.state_dict()), (torch.get_rng_state(), np.random.get_state()[1].copy())
    for name in MITIGATIONS:
        s = Settings(mitigation=name, questions=2, answers=3)
        train.rehearse(model, codec, problems, s, mitigations.parameters(name), model, critic)
        critic.learn(torch.ones(4))
    assert all(torch.equal(x, before[key]) for key, x in both.state_dict().items()) and not critic.optimizer.state
    assert torch.equal(torch.get_rng_state(), chance[0]) and np.array_equal(np.random.get_state()[1], chance[1])
    assert all(p.grad is None and p.requires_grad for p in both.parameters())


def test_a_run_is_the_same_without_a_rehearsal(quick, tmp_path, monkeypatch):
    """Guards against a rehearsal that is part of the run."""
    for out in ("with", "without"):
        torch.manual_seed(0)
        run(*TINY, "--max_new_tokens", 40, "--mitigation", "ppo", "--out", tmp_path / out)
        monkeypatch.setattr(train, "rehearse", lambda *_: None)
    assert figures(tmp_path / "with") == figures(tmp_path / "without")


# ------------------------------------------------------------------------------------------------- to go on

LAST = ["--questions", 2, "--answers", 3, "--max_new_tokens", 30, "--eval_problems", 2, "--eval_every", 2]
KEEP = ["--state_every", 2, "--checkpoint_every", 2, "--sample_every", 2]
RESUMED = {
    "adam": [],
    "critic": ["--mitigation", "ppo"],
    "kl in bfloat16": ["--kl", 0.1, "--dtype", "bfloat16", "--updates_per_batch", 2, "--weight_decay", 0.1],
}


def test_logs_behind_the_state_are_cut(tmp_path):
    """Guards against a step in the credit log, or a checkpoint, that the metrics of a resumed run know nothing of."""
    (tmp_path / "credit").mkdir()
    for step in (1, 2, 3):
        (tmp_path / "credit" / f"step-{step:06d}.npz").touch()
        (tmp_path / "checkpoints" / f"step-{step:06d}" / "deep").mkdir(parents=True)
    (tmp_path / "metrics.csv").write_text("step\n1\n2\n3\n")
    (tmp_path / "samples.txt").write_text("of step 3")
    train.cut_logs(tmp_path, 2, {"metrics.csv": 9})
    assert sorted(f.name for f in tmp_path.glob("credit/*")) == ["step-000001.npz", "step-000002.npz"]
    assert sorted(f.name for f in tmp_path.glob("checkpoints/*")) == ["step-000001", "step-000002"]
    assert (tmp_path / "metrics.csv").read_text() == "step\n1\n2\n" and (tmp_path / "samples.txt").read_text() == ""


class Killed(BaseException):
    """Stands for SIGKILL in this process."""


class Death:
    """Within `with Death(n)`, the process dies at the n-th moment of writing: before something is written, in the
    middle of it, or before a file gets its name. It writes nothing from then on, not even in a `finally`."""

    def __init__(self, moment=10**9):
        self.first = self.left = moment
        self.patch = pytest.MonkeyPatch()

    def __enter__(self):
        for module in (qwen2_model, train, grpo, critic_file):
            self.patch.setattr(module, "replace_file", self.torn_file)
        for name, log in (("append_row", "metrics.csv"), ("write_samples", "samples.txt")):
            self.patch.setattr(train, name, self.torn_log(getattr(train, name), log))
        self.patch.setattr(train, "copy_tokenizer", self.late(train.copy_tokenizer))
        self.patch.setattr(Path, "rename", self.late(Path.rename))
        return self

    def __exit__(self, *_):
        self.patch.undo()

    def tick(self):
        self.left -= 1
        if self.left < 0:
            raise Killed

    def late(self, function):
        return lambda *args: (self.tick(), function(*args))[1]

    def torn_file(self, file, write):
        def torn(part):
            self.tick()
            write(part)
            if self.left == 0:
                os.truncate(part, part.stat().st_size // 2)
                if file.suffix == ".safetensors":  # whose library writes under a name of its own, then renames
                    os.rename(part, part.with_name(".tmpAbCdEf"))
            self.tick()
            self.tick()
        replace_file(file, torn)

    def torn_log(self, function, log):
        def torn(run, *args):
            self.tick()
            before = (run / log).stat().st_size if (run / log).exists() else 0
            function(run, *args)
            if self.left == 0:
                os.truncate(run / log, (before + (run / log).stat().st_size) // 2)
            self.tick()
        return torn


@pytest.fixture
def brief(monkeypatch):
    """Steps that take little time and are worth resuming: rewards for short responses too, which differ within a group,
    and a held-out success that tells any two models apart."""
    def success(model, codec, problems, k, *_):
        return np.full((len(problems), k), sum(w.double().abs().sum().item() for w in model.parameters()))

    monkeypatch.setattr(train, "generate_problems", GENERATE)
    names = ("reward", "answer", "format")
    monkeypatch.setattr(train, "rehearse", lambda *_: None)
    monkeypatch.setattr(grpo, "reward", lambda text, *_: dict.fromkeys(names, len(text) % 3 / 2))
    monkeypatch.setattr(grpo, "evaluate", success)


def content(folder):
    """All that a run wrote, but for what a clock says and where it lies."""
    found = {}
    for file in (file for file in folder.rglob("*") if file.is_file()):
        name = str(file.relative_to(folder))
        if name == "metrics.csv":
            found[name] = figures(folder)
        elif file.suffix == ".npz":
            with np.load(file) as log:
                found |= {f"{name}: {column}": log[column].tobytes() for column in log.files}
        elif name == "state.safetensors":  # whose header is in no certain order
            found |= {f"{name}: {tensor}": x.numpy().tobytes() for tensor, x in load_file(file).items()}
        elif name == "config.json":
            config = json.loads(file.read_text())
            found[name] = config["settings"] | {"out": None}, config["method"]
        else:
            found[name] = file.read_bytes()
    return found


def differences(folder, other):
    """Names of what two runs wrote differently."""
    one, two = content(folder), content(other)
    return {name for name in one | two if one.get(name) != two.get(name)}


def kill(moment, *arguments):
    """Run train.py until that moment of writing; whether it was reached."""
    with Death(moment) as death:
        try:
            run(*arguments)
        except Killed:
            assert death.left < 0
    return death.left < 0


def resume(folder, *arguments):
    """Go on with a run."""
    run("--resume", folder, *arguments)


@pytest.mark.parametrize("method", RESUMED)
def test_a_killed_run_goes_on_as_if_nothing_had_been(method, brief, tmp_path):
    """Guards against a moment, anywhere in the writing of anything, at which a kill changes what the run will write:
    Adam's moments, critic, start model, rows twice or cut off, a checkpoint without a tokenizer, files left over."""
    flags = [*LAST, *KEEP, "--steps", 3, *RESUMED[method]]
    with Death() as death:
        run(*flags, "--out", tmp_path / "whole")
    start, end = (load_model(folder).output_weight for folder in (BUNDLED, tmp_path / "whole" / "checkpoint"))
    assert not torch.equal(start, end) and figures(tmp_path / "whole")[3]["grad_norm"] != "0.0"
    moments = range(death.first - death.left)
    assert len(moments) > 50
    for moment in moments[:: 4 if method == "adam" else 7]:  # a file has three, a log two
        folder, begin = tmp_path / f"killed-{moment}", [*flags, "--out", tmp_path / f"killed-{moment}"]
        assert kill(moment, *begin)
        if moment % 5 or kill(moment // 3, *(["--resume", folder] if folder.exists() else begin)):  # or twice
            run(*(["--resume", folder] if folder.exists() else begin))
        assert not differences(tmp_path / "whole", folder), moment
        shutil.rmtree(folder)
    assert not [*tmp_path.rglob("*.part")]


def test_a_run_that_the_system_kills_goes_on(tmp_path):
    """Guards against a state that only this process can go on from, or output that is still in a buffer."""
    flags = [*map(str, [*LAST, *KEEP]), "--steps", "5", "--mitigation", "ppo"]
    run(*flags, "--out", tmp_path / "whole")
    command = [sys.executable, "train.py", *flags, "--out", str(tmp_path / "killed")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step    3/5"):
            process.kill()
            break
    process.communicate()
    assert process.returncode == -signal.SIGKILL and len(rows(tmp_path / "killed")) >= 4
    resume(tmp_path / "killed")
    assert not differences(tmp_path / "whole", tmp_path / "killed")


def press_ctrl_c(monkeypatch, after, *arguments):
    """Run train.py and ask it to stop in a certain step."""
    original = train.train_step

    def train_step(model, optimizer, codec, problems, s, own, step, *rest):
        if step == after:
            signal.raise_signal(signal.SIGINT)
        return original(model, optimizer, codec, problems, s, own, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(train, "train_step", train_step)
        run(*arguments)


@pytest.mark.parametrize("after", [1, 3, 4])
def test_after_ctrl_c_a_run_goes_on(after, brief, tmp_path, monkeypatch, capsys):
    """Guards against an interruption that shows in the results, and one in the last step that passes for the end."""
    flags = [*LAST, "--mitigation", "ppo", "--steps", 4]
    run(*flags, "--out", tmp_path / "whole")
    press_ctrl_c(monkeypatch, after, *flags, "--out", tmp_path / "r")
    assert f"--resume {tmp_path / 'r'}" in capsys.readouterr().out and len(rows(tmp_path / "r")) == after + 1
    final = json.loads((tmp_path / "r" / "final.json").read_text())
    assert final["step"] == after and final["heldout_success"] and "pass@16" not in final
    resume(tmp_path / "r")
    assert not differences(tmp_path / "whole", tmp_path / "r")


def test_a_run_without_a_state_begins_again(brief, tmp_path):
    """Guards against rows that are there twice, or a critic that has learned twice."""
    flags = [*LAST, "--mitigation", "ppo", "--steps", 3, "--state_every", 0]
    run(*flags, "--out", tmp_path / "whole")
    step_two = 0
    while len(rows(tmp_path / "r")) < 3 if (tmp_path / "r").exists() else True:
        shutil.rmtree(tmp_path / "r", ignore_errors=True)
        assert kill(step_two := step_two + 4, *flags, "--out", tmp_path / "r")
    assert not (tmp_path / "r" / "state.safetensors").exists()
    resume(tmp_path / "r")
    assert not differences(tmp_path / "whole", tmp_path / "r")


def test_a_finished_run_goes_on_only_to_more_steps(brief, tmp_path, capsys):
    """Guards against a finished run that is spoiled, and more steps that are others than in one go."""
    flags = [*LAST, "--mitigation", "ppo", "--kl", 0.1]
    run(*flags, "--steps", 4, "--out", tmp_path / "whole")
    run(*flags, "--steps", 2, "--out", tmp_path / "r")
    before = content(tmp_path / "r")
    for more in ([], ["--steps", 2], ["--steps", 1]):
        assert "finished" in error_of(capsys, "--resume", tmp_path / "r", *more)
    assert content(tmp_path / "r") == before
    resume(tmp_path / "r", "--steps", 4)
    assert not differences(tmp_path / "whole", tmp_path / "r")


def test_an_interrupted_extension_goes_on_to_its_end(brief, tmp_path, monkeypatch):
    """Guards against an extended run that is taken for finished, or that forgets how far it was to go."""
    run(*LAST, "--steps", 4, "--out", tmp_path / "whole")
    run(*LAST, "--steps", 2, "--out", tmp_path / "r")
    press_ctrl_c(monkeypatch, 3, "--resume", tmp_path / "r", "--steps", 4)
    resume(tmp_path / "r")
    assert not differences(tmp_path / "whole", tmp_path / "r")


def test_a_critic_that_does_not_train_comes_along(brief, tmp_path, monkeypatch):
    """Guards against a state that cannot be read because the critic of the model's folder has no moments yet."""
    run(*LAST, "--mitigation", "ppo", "--steps", 1, "--out", tmp_path / "first")
    flags = [*LAST, "--model", tmp_path / "first" / "checkpoint", "--steps", 3]
    run(*flags, "--out", tmp_path / "whole")
    press_ctrl_c(monkeypatch, 2, *flags, "--out", tmp_path / "r")
    resume(tmp_path / "r")
    assert not differences(tmp_path / "whole", tmp_path / "r")


def cut(file, size):
    """Only the beginning of a file stays."""
    file.write_bytes(file.read_bytes()[:size])


STATE = "state.safetensors"
NOT_TO_RESUME = {
    "no folder": (shutil.rmtree, [], "no run folder"),
    "no config": (lambda r: (r / "config.json").unlink(), [], "config.json"),
    "half a config": (lambda r: cut(r / "config.json", 100), [], "config.json"),
    "another version": (lambda r: (r / "config.json").write_text('{"settings": {"speed": 1}}'), [], "version"),
    "half a state": (lambda r: cut(r / STATE, 5000), [], STATE),
    "an empty state": (lambda r: cut(r / STATE, 0), [], STATE),
    "no state": (lambda r: (r / STATE).write_text("<html>not found</html>" * 9), [], STATE),
    "the state of something else": (lambda r: save_file({"x": torch.ones(3)}, r / STATE), [], STATE),
    "another flag": (lambda r: None, ["--lr", "1e-3"], "--lr"),
    "no number": (lambda r: None, ["--steps", "many"], "--steps"),
    "fewer steps than there are": (lambda r: None, ["--steps", "1"], "2 steps"),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of four steps that was stopped after the second."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        press_ctrl_c(patch, 2, *LAST, "--steps", 4, "--out", folder)
    return folder


@pytest.mark.parametrize("kind", NOT_TO_RESUME)
def test_what_cannot_go_on_is_refused_in_one_sentence(kind, stopped, brief, tmp_path, capsys):
    """Guards against a traceback, and against a refusal that has already cut off the logs or changed the settings."""
    breaking, flags, named = NOT_TO_RESUME[kind]
    shutil.copytree(stopped, tmp_path / "r")
    with (tmp_path / "r" / "metrics.csv").open("a") as file:
        file.write("3,0.5")  # a step that a kill cut off
    breaking(tmp_path / "r")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert named in error_of(capsys, "--resume", tmp_path / "r", *flags)
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}


def test_a_name_without_a_run_is_refused_by_the_shell():
    """Guards against an exit status of 0, or a traceback."""
    command = [sys.executable, "train.py", "--resume", "runs/nowhere"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0 and result.stderr.count("\n") == 1 and "runs/nowhere" in result.stderr


def test_a_file_is_whole_or_the_old_one(tmp_path):
    """Guards against an old file that is gone when writing the new one fails in the middle."""
    def half(part):
        part.write_text("ne")
        raise OSError("no space left on device")

    file = tmp_path / "file.json"
    replace_file(file, lambda part: part.write_text("old"))
    with pytest.raises(OSError):
        replace_file(file, half)
    assert file.read_text() == "old"
    replace_file(file, lambda part: part.write_text("new"))
    assert [x.name for x in tmp_path.iterdir()] == ["file.json"] and file.read_text() == "new"


def test_a_finished_run_has_no_half_file(finished):
    """Guards against a name for half a file that nobody renames."""
    assert not [*finished.parent.rglob("*.part")]


# ------------------------------------------------------------------------------------------------- the puzzles


def test_training_puzzles_depend_on_seed_and_step_alone():
    """Guards against puzzles that repeat before all were seen, and against a resume that would see others."""
    problems, s = generate_problems(10, "train"), Settings(questions=4, seed=3)
    drawn = [train.draw_problems(problems, s, step) for step in range(1, 6)]  # two rounds of ten
    flat = [p for step in drawn for p in step]
    assert set(flat[:10]) == set(flat[10:]) == set(problems)
    assert train.draw_problems(problems, s, 4) == drawn[3]
    assert train.draw_problems(problems, Settings(questions=4, seed=4), 1) != drawn[0]


def test_data_file_is_split_by_the_hash(tmp_path):
    """Guards against held-out puzzles that also train, as a row with its numbers in another order."""
    problems = generate_problems(60, "train") + generate_problems(20, "heldout") + generate_problems(20, "new_numbers")
    lines = [json.dumps({"nums": p.numbers[::turn], "target": p.target}) for turn in (1, -1) for p in problems]
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    chosen, heldout = train.choose_problems(Settings(data=str(tmp_path / "data.jsonl"), questions=16, steps=100))
    assert {split(p) for p in chosen} == {"train"} and {split(p) for p in heldout} == {"heldout"}
    assert len(chosen) == 60 and len(heldout) == 20
    few = train.choose_problems(Settings(data=str(tmp_path / "data.jsonl"), eval_problems=5))[1]
    assert few == heldout[:5]
    (tmp_path / "turned.jsonl").write_text("\n".join(lines[::-1]))
    again = train.choose_problems(Settings(data=str(tmp_path / "turned.jsonl"), questions=16, steps=3, seed=5))
    assert [[p.target for p in part] for part in again] == [[p.target for p in part] for part in (chosen, heldout)]


def test_a_run_on_a_data_file(tmp_path):
    """Guards against a data path that only unit tests take."""
    problems = generate_problems(20, "train") + generate_problems(15, "heldout")
    (tmp_path / "data.jsonl").write_text(
        "\n".join(json.dumps({"nums": p.numbers, "target": p.target}) for p in problems)
    )
    run(*SMALL, "--steps", 1, "--data", tmp_path / "data.jsonl", "--out", tmp_path / "r")
    assert rows(tmp_path / "r")[1]["reward"]


# ------------------------------------------------------------------------------------------------- bad inputs


@pytest.fixture
def model_folder(tmp_path):
    """A copy of the bundled model to break."""
    shutil.copytree(BUNDLED, tmp_path / "model")
    return tmp_path / "model"


def change_tensors(folder, change):
    """Rewrite the weights of a model folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def break_config(folder, **changes):
    """Change entries of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


NORM = "model.norm.weight"
BROKEN = {
    "no folder": (shutil.rmtree, "config.json"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
        "model.safetensors",
    ),
    "mislabelled": (lambda f: (f / "model.safetensors").write_text("<html>not found</html>"), "model.safetensors"),
    "a tensor missing": (lambda f: change_tensors(f, lambda t: t.pop(NORM)), NORM),
    "of the wrong shape": (lambda f: change_tensors(f, lambda t: t.update({NORM: torch.ones(3)})), NORM),
    "unsupported architecture": (lambda f: break_config(f, model_type="llama"), "llama"),
    "unsupported option": (lambda f: break_config(f, use_sliding_window=True), "use_sliding_window"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json"),
    "too long a prompt": (lambda f: break_config(f, max_position_embeddings=60), "--max_new_tokens"),
    "weights that are no numbers": (lambda f: change_tensors(f, lambda t: t[NORM].fill_(float("nan"))), "not finite"),
    "a broken critic": (lambda f: (f / "critic.safetensors").write_text("<html>"), "critic.safetensors"),
    "a critic of another size": (lambda f: Critic(64).save(f), "critic.safetensors"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_models_are_refused_in_one_sentence(kind, model_folder, tmp_path, capsys):
    """Guards against a traceback, a half-made run folder, or a model that trains although it is broken."""
    breaking, named = BROKEN[kind]
    breaking(model_folder)
    assert named in error_of(capsys, *SMALL, "--model", model_folder, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(model_folder, tmp_path, capsys):
    """Guards against an index error, or silent nonsense, in the middle of the first rollout."""
    break_config(model_folder, vocab_size=500)
    change_tensors(
        model_folder, lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:500].clone()})
    )
    assert "tokenizer" in error_of(capsys, *SMALL, "--model", model_folder, "--out", tmp_path / "r")


FLAGS = {
    "unknown mitigation": (["--mitigation", "magic"], "outcome_conditional"),
    "unknown flag": (["--learning_rate", "1"], "--learning_rate"),
    "a flag of another method": (["--think_discount", "0.5"], "--think_discount"),
    "a misspelt flag of the method": (
        ["--mitigation", "outcome_conditional", "--think_discout", "0.5"],
        "--think_discount",
    ),
    "normalize without reweighting": (["--normalize", "batch"], "--normalize"),
    "advantage of its own": (["--mitigation", "vineppo", "--advantage", "rloo"], "--advantage"),
    "not a number": (["--steps", "many"], "--steps"),
    "a lone answer": (["--answers", "1"], "--answers"),
    "no question": (["--questions", "0"], "--questions"),
    "negative": (["--lr", "-1"], "--lr"),
    "no such device": (["--device", "gpu"], "--device"),
    "too many GPUs": (["--device", "cuda:99"], "--device"),
    "not a rate": (["--lr", "nan"], "--lr"),
    "not below one": (["--beta1", "1.0"], "--beta1"),
    "a norm that turns the gradient": (["--max_grad_norm", "-1"], "--max_grad_norm"),
    "no value": (["--mitigation"], "--mitigation"),
    "no such data": (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
}


@pytest.mark.parametrize("kind", FLAGS)
def test_bad_flags_are_refused_in_one_sentence(kind, tmp_path, capsys):
    """Guards against a flag that is silently ignored."""
    flags, named = FLAGS[kind]
    assert named in error_of(capsys, *SMALL, *flags, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


VALUES = {
    "a negative weight": ["outcome_conditional", "--think_discount", -1],
    "a weight that is negative where an answer looks": ["attention_credit", "--credit_scale", -5],
    "a weight that is negative for rare tokens": ["advantage_reweighting", "--alpha", 2],
    "a weight that is not finite": ["entropy_weighted", "--entropy_temp", 0],
    "above 100 percent": ["entropy_masking", "--mask_percentile", 101],
    "not a number": ["gtpo", "--a1", "nan"],
    "nothing to invert": ["inverted", "--of", "none"],
    "no fresh end": ["vineppo", "--k", 0],
    "fewer than none": ["vineppo", "--k", -1],
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_that_cannot_work_are_refused_before_the_run(kind, quick, tmp_path, capsys):
    """Guards against a run that ends in its first step, or goes on with credit that makes no sense."""
    method = VALUES[kind]
    error_of(capsys, *TINY, "--max_new_tokens", 80, "--mitigation", *method, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("broken", [lambda batch: batch.advantage, lambda batch: batch.mask / 0], ids=["shape", "inf"])
def test_a_method_that_returns_no_credit_is_refused_before_the_run(broken, quick, tmp_path, capsys, monkeypatch):
    """Guards against a mistake in one's own method that shows far from its cause."""
    monkeypatch.setitem(MITIGATIONS, "none", broken)
    assert "none must return finite credit" in error_of(capsys, *TINY, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_method_that_fails_in_a_run_ends_it_in_one_sentence(quick, tmp_path, capsys, monkeypatch):
    """Guards against a traceback where only long responses show it, and a run without a checkpoint."""
    late = lambda batch: mitigations.none(batch) / (batch.mask.shape[1] <= 8)  # 0 / 0 behind the rehearsal's 8 tokens
    monkeypatch.setitem(mitigations.MITIGATIONS, "none", late)
    flags = [*TINY, "--max_new_tokens", 80]
    assert str(tmp_path / "r") in error_of(capsys, *flags, "--out", tmp_path / "r")
    load_model(tmp_path / "r" / "checkpoint")


DATA = {
    "malformed": ('{"nums": [1, 2, 3], "target": 6}\n{"nums": [1, 2', "line 2"),
    "empty": ("", "no puzzle"),
    "unsolvable": (
        "".join(f'{{"nums": [{a}, {b}, 2], "target": 9999}}\n' for a in range(1, 9) for b in range(1, 9)),
        "9999",
    ),
    "nothing held out": ('{"nums": [1, 2, 3], "target": 6}\n', "puzzle"),
}


@pytest.mark.parametrize("kind", DATA)
def test_bad_data_is_refused_in_one_sentence(kind, tmp_path, capsys):
    """Guards against training on puzzles that nobody can solve."""
    text, named = DATA[kind]
    (tmp_path / "data.jsonl").write_text(text)
    assert named in error_of(capsys, *SMALL, "--data", tmp_path / "data.jsonl", "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_an_existing_run_folder_is_left_alone(finished, capsys):
    """Guards against overwriting somebody's results."""
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*")}
    assert "exists" in error_of(capsys, *SMALL, "--out", finished)
    assert before == {p: p.stat().st_mtime_ns for p in finished.rglob("*")}


def test_the_shell_sees_the_error():
    """Guards against an exit status of 0, a traceback, or a message on the wrong stream."""
    result = subprocess.run(
        [sys.executable, "train.py", "--mitigation", "magic"], cwd=ROOT, capture_output=True, text=True
    )
    assert (
        result.returncode != 0 and result.stdout == "" and result.stderr.count("\n") == 1 and "magic" in result.stderr
    )


# ------------------------------------------------------------------------------------------------- help


def test_help_explains_every_flag_and_method(capsys):
    """Guards against an undocumented flag."""
    with pytest.raises(SystemExit):
        run("--help")
    text = capsys.readouterr().out
    for field in fields(Settings):
        assert re.search(rf"--{field.name} [^\n]*", text)
    assert "--think_discount 0.5" in text and all(mitigations.summary(name) in text for name in mitigations.MITIGATIONS)
    assert set(train.comments()) == {f.name for f in fields(Settings)}
