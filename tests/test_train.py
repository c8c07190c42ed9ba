"""The command line end to end: a whole run, kill and resume, Ctrl-C, and one sentence for everything that can't work.

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
from dataclasses import replace
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
from countdown_task import Codec, generate_puzzles, split
from critic import Critic, load_critic
from mitigations import MITIGATIONS
from plumbing import run_folder
from qwen2_model import Qwen2, load_model
from train import BUNDLED, Policy, Settings

ROOT = Path(train.__file__).parent
SMALL = ["--questions", 3, "--answers", 4, "--eval_problems", 12, "--max_new_tokens", 50]
TINY = ["--questions", 2, "--answers", 3, "--eval_problems", 2, "--max_new_tokens", 30, "--eval_every", 2]
GENERATE = functools.cache(generate_puzzles)


@pytest.fixture(autouse=True, scope="module")
def puzzles_once():
    """Generate the 4,096 puzzles once for all runs of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "generate_puzzles", GENERATE)
        yield


@pytest.fixture
def quick(monkeypatch):
    """No time for evaluation: no puzzle is ever solved."""
    monkeypatch.setattr(train, "evaluate", lambda policy, puzzles, k, s: np.zeros((len(puzzles), k)))


@pytest.fixture
def learning(monkeypatch):
    """Short responses that teach something: rewards that differ within a group, and a held-out success that tells any
    two models apart."""
    def success(policy, puzzles, k, s):
        return np.full((len(puzzles), k), sum(w.double().abs().sum().item() for w in policy.model.parameters()))

    names = ("reward", "answer", "format")
    monkeypatch.setattr(grpo, "reward", lambda text, *_: dict.fromkeys(names, len(text) % 3 / 2))
    monkeypatch.setattr(train, "evaluate", success)
    monkeypatch.setattr(train, "rehearse", lambda *_: None)


def run(*arguments):
    """Run train.py in this process."""
    sys.argv = ["train.py", *map(str, arguments)]
    train.main()


def rows(folder):
    """metrics.csv as a list of dicts."""
    return list(csv.DictReader((folder / "metrics.csv").open()))


def figures(folder):
    """metrics.csv without what a clock measured."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")} for row in rows(folder)]


def error_of(*arguments):
    """The one line with which train.py refuses its arguments. The exit status is not 0."""
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    message = str(stop.value.code)
    assert message.startswith("error: ")
    assert "\n" not in message and len(message) < 400
    return message


# ------------------------------------------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("runs") / "none-seed0"
    run(*SMALL, "--steps", 4, "--eval_every", 2, "--checkpoint_every", 2, "--sample_every", 2, "--out", folder)
    return folder


def test_a_run_folder_is_complete(finished):
    names = {str(p.relative_to(finished)) for p in finished.rglob("*") if p.is_file()}
    model = {"config.json", "model.safetensors", "tokenizer.json"}
    folders = ("checkpoint", "checkpoints/step-000002", "checkpoints/step-000004")
    assert names >= {"config.json", "metrics.csv", "samples.txt", "final.json", "state.pt"}
    assert names >= {f"credit/step-{i:06d}.npz" for i in (1, 2, 3, 4)} | {f"{f}/{m}" for f in folders for m in model}
    assert not [name for name in names if ".part" in name]
    config = json.loads((finished / "config.json").read_text())
    assert config["settings"]["questions"] == 3
    assert config["versions"]["torch"] == torch.__version__
    assert "--steps 4" in config["command"]
    final = json.loads((finished / "final.json").read_text())
    assert final["heldout_success"] == float(rows(finished)[4]["heldout_success"])
    assert 0 <= final["pass@16"] <= 1


def test_metrics_agree_with_the_credit_log(finished):
    """Each column is computed again from the flat log."""
    table = rows(finished)
    assert list(table[0]) == run_folder.COLUMNS and [r["step"] for r in table] == ["0", "1", "2", "3", "4"]
    assert [bool(r["heldout_success"]) for r in table] == [True, False, True, False, True]
    assert not any(table[0][name] for name in table[0] if name != "step" and not name.startswith("heldout"))
    for row in table[1:]:
        log = np.load(finished / "credit" / f"step-{int(row['step']):06d}.npz")
        first = log["position"] == 0
        reward, groups = log["reward"][first], log["group"][first]
        solved = reward > 0.5  # 0.1 * format + success
        lengths = np.bincount(log["response"])
        ended = [log["token"][log["response"] == i][-1] in Codec(BUNDLED).end_tokens for i in range(12)]
        expected = {"reward": reward.mean(), "success": solved.mean(), "length": lengths.mean(),
                    "format": ((reward - solved) * 10).mean(), "entropy": log["entropy"].mean(),
                    "zero_variance_groups": sum(len(set(reward[groups == g])) == 1 for g in range(3)),
                    "truncated": 1 - np.mean(ended)}
        assert {name: float(row[name]) for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert float(row["tokens_per_second"]) * float(row["seconds"]) == pytest.approx(len(log["token"]))
        assert float(row["ratio_error"]) < 1e-4 and float(row["clip_fraction"]) == 0 and row["kl"] == ""


def test_the_heldout_error_is_that_of_a_proportion(finished):
    for row in rows(finished)[::2]:
        p = float(row["heldout_success"])
        assert float(row["heldout_stderr"]) == pytest.approx((p * (1 - p) / 11) ** 0.5)  # 12 puzzles, solved or not
    assert np.isnan(train.standard_error(np.ones(1)))


def test_runs_with_the_same_seed_are_identical_and_another_seed_differs(finished, tmp_path):
    run(*SMALL, "--steps", 2, "--eval_every", 2, "--out", tmp_path / "same")
    run(*SMALL, "--steps", 1, "--eval_every", 2, "--seed", 1, "--out", tmp_path / "other")
    assert figures(tmp_path / "same") == figures(finished)[:3]
    credit = "credit/step-000002.npz"
    one, two = np.load(tmp_path / "same" / credit), np.load(finished / credit)
    assert all(np.array_equal(one[name], two[name]) for name in one.files)
    assert rows(tmp_path / "other")[1]["loss"] != rows(finished)[1]["loss"]
    assert rows(tmp_path / "other")[0]["heldout_success"] == rows(finished)[0]["heldout_success"]


def test_the_checkpoint_gives_the_same_logits_in_transformers(finished):
    tokens, folder = torch.arange(40)[None], finished / "checkpoint"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        ours, start = load_model(folder)(tokens), load_model(BUNDLED)(tokens)
        torch.testing.assert_close(ours, theirs(tokens).logits, rtol=0, atol=1e-4)
    assert not torch.allclose(ours, start, atol=1e-4)
    text = "Using the numbers [4, 3, 5]"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer(text).input_ids == Codec(BUNDLED).tokenizer.encode(text).ids


def test_samples_are_those_of_their_puzzle(finished):
    heads = re.findall(r"=== step (\d+)  (\[.*?\]) -> (\d+)", (finished / "samples.txt").read_text())
    s, puzzles = Settings(questions=3), GENERATE(4096, "train")
    asked = [(step, p) for step in (1, 2, 4) for p in train.draw_puzzles(puzzles, s, step)]
    assert heads == [(str(step), str(list(p.numbers)), str(p.target)) for step, p in asked]


def test_zero_steps_only_evaluate(tmp_path, capsys):
    run(*TINY, "--steps", 0, "--out", tmp_path / "r")
    assert [r["step"] for r in rows(tmp_path / "r")] == ["0"]
    assert json.loads((tmp_path / "r" / "final.json").read_text())["step"] == 0
    assert "analyze.py" not in capsys.readouterr().out  # it has nothing to analyze


def test_every_flag_reaches_the_update(quick, tmp_path, monkeypatch):
    """A flag without effect, clips or betas in the wrong order, and a reference model that trains would show here."""
    calls, original = [], grpo.update

    def spy(model, optimizer, prompts, batch, credit, **options):
        dtypes = {w.dtype for w in model.parameters()}, {w.dtype for w in optimizer.master.values()}
        adamw = dict(optimizer.adamw.param_groups[0])
        calls.append((adamw, options, dtypes, model.checkpoint_activations, batch.ask.reference, batch.ask.micro_batch))
        return original(model, optimizer, prompts, batch, credit, **options)

    monkeypatch.setattr(grpo, "update", spy)
    given = dict(kl=0.02, clip_low=0.1, clip_high=0.3, loss_norm="constant", updates_per_batch=2, max_grad_norm=0.7,
                 micro_batch=5)
    flags = ["--lr", 1e-3, "--beta1", 0.8, "--beta2", 0.95, "--weight_decay", 0.03, "--dtype", "bfloat16",
             "--checkpoint_activations", *(x for k, v in given.items() for x in (f"--{k}", v))]
    run(*TINY, "--steps", 2, *flags, "--out", tmp_path / "r")
    start = load_model(BUNDLED, dtype=torch.bfloat16)
    assert len(calls) == 2
    for adamw, options, dtypes, checkpoint_activations, reference, micro_batch in calls:
        assert adamw["lr"] == 1e-3
        assert tuple(adamw["betas"]) == (0.8, 0.95)
        assert adamw["weight_decay"] == 0.03
        assert dtypes == ({torch.bfloat16}, {torch.float32})
        assert checkpoint_activations
        assert options == given | {"max_new_tokens": 30}
        assert micro_batch == 5
        assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), start.parameters(), strict=True))
    assert all(row["kl"] for row in rows(tmp_path / "r")[1:])


def test_the_log_holds_the_credit_that_the_flags_ask_for(quick, tmp_path):
    method = ["--mitigation", "outcome_conditional", "--think_discount", 0.25, "--normalize", "none"]
    run(*SMALL, "--max_new_tokens", 140, "--steps", 1, *method, "--advantage", "dr_grpo", "--out", tmp_path / "r")
    log = np.load(tmp_path / "r" / "credit" / "step-000001.npz")
    assert log["credit"].any() and set(log["in_answer"].tolist()) == {0, 1}
    answered = np.bincount(log["response"], log["in_answer"])[log["response"]] > 0
    weight = np.where((log["in_answer"] == 1) | ~answered, 1, 0.25)
    np.testing.assert_allclose(log["credit"], log["advantage"] * weight, rtol=1e-5)
    for group in range(3):
        here = (log["position"] == 0) & (log["group"] == group)
        reward = log["reward"][here]
        np.testing.assert_allclose(log["advantage"][here], reward - reward.mean(), atol=1e-6)


def test_skip_unfinished_gives_no_credit_to_truncated_responses(learning, tmp_path):
    for flags in ([], ["--skip_unfinished"]):
        run(*TINY, "--max_new_tokens", 20, "--steps", 1, *flags, "--out", tmp_path / f"r{len(flags)}")
    plain, skipped = (np.load(tmp_path / name / "credit" / "step-000001.npz")["credit"] for name in ("r0", "r1"))
    assert plain.any() and not skipped.any()  # no response ends within 20 tokens
    assert float(rows(tmp_path / "r1")[1]["truncated"]) == 1


def test_a_bfloat16_run_learns_and_samples_from_the_weights_it_trains(tmp_path):
    """A run that starts from the checkpoint of the first one solves as many puzzles as the first one did at its end."""
    flags = [*SMALL, "--dtype", "bfloat16", "--eval_problems", 40]
    run(*flags, "--steps", 3, "--lr", 0.02, "--out", tmp_path / "r")
    run(*flags, "--steps", 0, "--model", tmp_path / "r" / "checkpoint", "--out", tmp_path / "again")
    start, end = (float(rows(tmp_path / "r")[i]["heldout_success"]) for i in (0, -1))
    assert start > 0 and end != start
    assert float(rows(tmp_path / "again")[0]["heldout_success"]) == end


# -------------------------------------------------------------------------------------------------- evaluation


def test_only_heldout_puzzles_are_measured(tmp_path, monkeypatch):
    asked = []

    def one_in_two(policy, puzzles, answers, s):
        asked.append((puzzles, answers))
        solved = np.zeros((len(puzzles), answers))
        solved[::2, 0] = 1  # one right answer in sixteen counts
        return solved

    monkeypatch.setattr(train, "evaluate", one_in_two)
    run(*TINY, "--eval_problems", 140, "--steps", 1, "--out", tmp_path / "r")
    assert [(len(puzzles), answers) for puzzles, answers in asked] == [(140, 1), (140, 1), (128, 16)]
    assert {split(p) for puzzles, _ in asked for p in puzzles} == {"heldout"}
    final = json.loads((tmp_path / "r" / "final.json").read_text())
    assert (final["pass@16"], final["pass@16_problems"], final["heldout_problems"]) == (0.5, 128, 140)


def test_how_many_responses_are_evaluated_at_once_changes_nothing(codec, monkeypatch):
    model, widths, respond = load_model(BUNDLED), [], grpo.respond
    model.real_vocab = codec.size
    policy, s, puzzles = Policy(model, codec, None, None), Settings(questions=1, answers=4), GENERATE(9, "heldout")
    monkeypatch.setattr(grpo, "respond", lambda *args: (widths.append(len(args[3])), respond(*args))[1])
    wide = train.evaluate(policy, puzzles, 2, s)
    monkeypatch.setattr(train, "EVALUATION_BYTES", 0)
    narrow = train.evaluate(policy, puzzles, 2, s)
    assert widths == [18, 4, 4, 4, 4, 2]
    assert wide.shape == (9, 2) and np.array_equal(wide, narrow) and 0 < wide.mean() < 1


# ------------------------------------------------------------------------------------------- every credit function


@pytest.mark.parametrize("name", MITIGATIONS)
def test_every_method_trains(name, quick, tmp_path, monkeypatch):
    """The logged credit is the update's, and a critic or start model is there exactly where the method asks for it."""
    asked, copied, used, update, deepcopy = set(), [], [], grpo.update, copy.deepcopy

    class Spy(grpo.Queries):
        def __getattribute__(self, query):
            asked.add(query)
            return super().__getattribute__(query)

    def spy_update(model, optimizer, prompts, batch, credit, **options):
        used.append((batch, credit))
        return update(model, optimizer, prompts, batch, credit, **options)

    monkeypatch.setattr(grpo, "Queries", Spy)
    monkeypatch.setattr(grpo, "update", spy_update)
    monkeypatch.setattr(copy, "deepcopy", lambda x, *memo: (copied.append(x), deepcopy(x, *memo))[1])
    run(*TINY, "--max_new_tokens", 80, "--steps", 1, "--mitigation", name, "--out", tmp_path / "r")
    (batch, credit), = used
    log = np.load(tmp_path / "r" / "credit" / "step-000001.npz")
    assert np.array_equal(log["credit"], credit[batch.mask].numpy())
    assert not credit[~batch.mask].any() and np.isfinite(log["credit"]).all()
    assert (tmp_path / "r" / "checkpoint" / "critic.safetensors").exists() == ("values" in asked)
    assert any(isinstance(x, Qwen2) for x in copied) == ("reference_logprob" in asked)


@pytest.mark.parametrize("method", [["random"], ["vineppo", "--k", 2], ["ppo"]], ids=lambda m: m[0])
def test_random_methods_do_not_depend_on_global_random_state(method, learning, tmp_path):
    for i in (0, 1):
        torch.manual_seed(i)
        np.random.seed(i)
        run(*TINY, "--steps", 2, "--mitigation", *method, "--out", tmp_path / str(i))
    assert figures(tmp_path / "0") == figures(tmp_path / "1")


def test_every_seed_and_step_has_its_own_random_numbers(codec, monkeypatch):
    model, drawn = load_model(BUNDLED), {}
    model.real_vocab = codec.size

    def probe(batch):
        drawn.setdefault((seed, step), set()).add(torch.rand((), generator=batch.ask.generator("probe")).item())
        return mitigations.none(batch)

    monkeypatch.setitem(MITIGATIONS, "probe", probe)
    for seed, step in ((0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (0, 1)):
        s = Settings(mitigation="probe", answers=2, max_new_tokens=1, seed=seed)
        batch = train.sample_and_grade(Policy(model, codec, None, None), GENERATE(4096, "train")[:1], s, step)
        train.assign_credit(batch, s, {})
    assert len(drawn) == len(set().union(*drawn.values())) == 5


def test_values_come_before_the_critic_learns_from_their_rewards(quick, tmp_path, monkeypatch):
    """With two different rewards the values of step 1 are the same, and those of step 2 follow the reward."""
    seen, values = [], Critic.values
    monkeypatch.setattr(Critic, "values", lambda *args: (seen.append(values(*args)), seen[-1])[1])
    monkeypatch.setattr(train, "rehearse", lambda *_: None)
    shutil.copytree(BUNDLED, tmp_path / "model")
    critic = Critic(128)
    torch.nn.init.normal_(critic.outer.weight, generator=torch.Generator().manual_seed(0))
    critic.save(tmp_path / "model")
    flags = ["--mitigation", "ppo", "--steps", 2, "--lr", 0, "--model", tmp_path / "model"]
    for reward in (0.0, 1.0):
        monkeypatch.setattr(grpo, "reward", lambda *_: {"reward": reward, "answer": reward, "format": reward})
        run(*TINY, *flags, "--out", tmp_path / str(reward))
    low_1, low_2, high_1, high_2 = seen
    assert torch.equal(low_1, high_1) and low_1.any()
    assert (low_2 - high_2)[low_2 != 0].mean() < -0.01


def test_a_trained_critic_is_the_next_runs_start(learning, tmp_path):
    run(*TINY, "--mitigation", "ppo", "--checkpoint_every", 1, "--steps", 1, "--out", tmp_path / "r")
    folder = tmp_path / "r" / "checkpoint"
    assert (tmp_path / "r" / "checkpoints" / "step-000001" / "critic.safetensors").is_file()
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    policy = train.load_policy(Settings(model=str(folder)), {"critic"})
    assert policy.critic.outer.weight.any()
    saved = load_critic(folder, policy.model).state_dict()
    assert all(torch.equal(x, saved[name]) for name, x in policy.critic.state_dict().items())


def test_the_rehearsal_leaves_no_trace(codec):
    model, critic = load_model(BUNDLED), Critic(128)
    model.real_vocab = codec.size
    both = torch.nn.ModuleList((model, critic))
    before, torch_state, numpy_state = copy.deepcopy(both.state_dict()), torch.get_rng_state(), np.random.get_state()[1]
    for name, method in MITIGATIONS.items():
        s = Settings(mitigation=name, questions=2, answers=3)
        train.rehearse(Policy(model, codec, critic, model), GENERATE(4096, "train"), s, method.parameters)
    assert all(torch.equal(x, before[key]) for key, x in both.state_dict().items())
    assert not critic.optimizer.state
    assert torch.equal(torch.get_rng_state(), torch_state) and np.array_equal(np.random.get_state()[1], numpy_state)
    assert all(p.grad is None and p.requires_grad for p in both.parameters())


# ---------------------------------------------------------------------------------------------- kill and resume

KEEP = ["--state_every", 2, "--checkpoint_every", 2, "--sample_every", 2]
OPERATIONS = [(Path, "mkdir"), (Path, "replace"), (Path, "rename"), (Path, "unlink"), (os, "truncate"),
              (shutil, "copy"), (torch, "save"), (np, "savez"), (qwen2_model, "save_file"), (critic_file, "save_file"),
              (run_folder, "append_row"), (run_folder, "write_samples")]


class Killed(BaseException):
    """Stands for SIGKILL in this process."""


class Kill:
    """Within `with Kill(n)`, the process dies at the n-th moment: before or after one of OPERATIONS, whose output is
    then torn. It writes nothing from then on, not even in a `finally`."""

    def __init__(self, moment):
        self.left = moment

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        for owner, name in OPERATIONS:
            self.patch.setattr(owner, name, self.mortal(getattr(owner, name)))

    def __exit__(self, kind, *_):
        self.patch.undo()

    def mortal(self, function):
        def operation(*args, **kwargs):
            self.tick()
            result = function(*args, **kwargs)
            if self.left == 0:
                self.tear(function.__name__, *args)
            self.tick()
            return result
        return operation

    def tick(self):
        self.left -= 1
        if self.left < 0:
            raise Killed

    @staticmethod
    def tear(name, first, *rest):
        """Cut the end off the file that was just written."""
        written = {"append_row": lambda: first / "metrics.csv", "write_samples": lambda: first / "samples.txt",
                   "savez": lambda: first, "save": lambda: rest[0], "save_file": lambda: rest[0]}.get(name)
        if written:
            size = written().stat().st_size
            with open(written(), "r+b") as file:
                file.truncate(size - min(7, size))


def content(folder):
    """Everything that a run wrote, except times and its own path."""
    found = {}
    for file in (file for file in folder.rglob("*") if file.is_file()):
        name = str(file.relative_to(folder))
        if name == "metrics.csv":
            found[name] = figures(folder)
        elif file.suffix == ".npz":
            with np.load(file) as log:
                found |= {f"{name}: {column}": log[column].tobytes() for column in log.files}
        elif name == "state.pt":
            state = torch.load(file, weights_only=True)
            state["lengths"].pop("metrics.csv")  # depends on how many digits the times have
            found |= {f"{name}: {i}": leaf for i, leaf in enumerate(leaves(state))}
        elif name == "config.json":
            config = json.loads(file.read_text())
            found[name] = config["settings"] | {"out": None}, config["method"]
        else:
            found[name] = file.read_bytes()
    return found


def leaves(x):
    """The values within nested dicts and lists; tensors as bytes."""
    if isinstance(x, (dict, list, tuple)):
        return [leaf for part in (x.values() if isinstance(x, dict) else x) for leaf in leaves(part)]
    return [x.float().numpy().tobytes() if isinstance(x, torch.Tensor) else x]


def differences(folder, other):
    """Names of the files that two runs wrote differently."""
    one, two = content(folder), content(other)
    return {name for name in one | two if one.get(name) != two.get(name)}


def run_until(moment, *arguments):
    """Run train.py and kill it at that moment; False if the run ended before."""
    try:
        with Kill(moment):
            run(*arguments)
    except Killed:
        return True
    return False


@pytest.mark.parametrize("flags", [[], ["--mitigation", "ppo", "--kl", 0.1, "--dtype", "bfloat16"]],
                         ids=["none", "critic"])
def test_a_run_killed_at_any_moment_resumes_to_the_same_end(flags, learning, tmp_path):
    """Also where the resumed run is killed again."""
    flags = [*TINY, *KEEP, "--steps", 3, *flags]
    run(*flags, "--out", tmp_path / "whole")
    start, end = (load_model(folder).output_weight for folder in (BUNDLED, tmp_path / "whole" / "checkpoint"))
    assert not torch.equal(start, end)
    folder, moment, kills = tmp_path / "killed", 1, 0
    begin, resume = [*flags, "--out", folder], ["--resume", folder]
    while run_until(moment, *begin):
        twice = kills % 3 == 2 and run_until(moment // 2, *(resume if folder.exists() else begin))
        if kills % 3 != 2 or twice:
            run(*(resume if folder.exists() else begin))
        assert not differences(tmp_path / "whole", folder), moment
        shutil.rmtree(folder)
        moment, kills = moment + 11, kills + 1
    assert kills > 8
    assert not [*tmp_path.rglob("*.part")]


def test_a_run_that_the_system_kills_resumes_to_the_same_end(tmp_path):
    """A real SIGKILL, in another process: nothing may depend on memory or on a buffer."""
    flags = [*TINY, *KEEP, "--steps", 5, "--mitigation", "ppo"]
    run(*flags, "--out", tmp_path / "whole")
    command = [sys.executable, "train.py", *map(str, flags), "--out", str(tmp_path / "killed")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step    3/5"):
            process.kill()
            break
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    run("--resume", tmp_path / "killed")
    assert not differences(tmp_path / "whole", tmp_path / "killed")


def interrupt(monkeypatch, at, *arguments):
    """Run train.py and press Ctrl-C in step `at`; its last words."""
    original = train.sample_and_grade

    def sample_and_grade(policy, puzzles, s, step):
        if step == at:
            raise KeyboardInterrupt
        return original(policy, puzzles, s, step)

    with monkeypatch.context() as patch:
        patch.setattr(train, "sample_and_grade", sample_and_grade)
        return error_of(*arguments)


@pytest.mark.parametrize(["at", "more"], [(1, []), (3, []), (5, ["--steps", 5])])
def test_after_ctrl_c_a_run_resumes_to_the_same_end(at, more, learning, tmp_path, monkeypatch):
    """In the first step, in the middle, and while a finished run is extended."""
    flags = [*TINY, "--mitigation", "ppo", "--state_every", 2]
    run(*flags, "--steps", 5 if more else 4, "--out", tmp_path / "whole")
    begin = [*flags, "--steps", 4, "--out", tmp_path / "r"]
    if more:
        run(*begin)
        begin = ["--resume", tmp_path / "r", *more]
    message = interrupt(monkeypatch, at, *begin)
    assert message == f"error: interrupted; continue with: python train.py --resume {tmp_path / 'r'}"
    assert not (tmp_path / "r" / "final.json").exists()
    run("--resume", tmp_path / "r")
    assert not differences(tmp_path / "whole", tmp_path / "r")


def test_ctrl_c_before_the_first_step_is_one_sentence(tmp_path, monkeypatch):
    def pressed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "load_policy", pressed)
    assert "interrupted" in error_of(*TINY, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_finished_run_resumes_only_to_more_steps(learning, tmp_path):
    """A refusal changes nothing."""
    flags = [*TINY, "--mitigation", "ppo", "--kl", 0.1]
    run(*flags, "--steps", 4, "--out", tmp_path / "whole")
    run(*flags, "--steps", 2, "--out", tmp_path / "r")
    before = content(tmp_path / "r")
    for more in ([], ["--steps", 2], ["--steps", 1]):
        assert "finished" in error_of("--resume", tmp_path / "r", *more)
    assert "--lr" in error_of("--resume", tmp_path / "r", "--lr", 1)
    assert content(tmp_path / "r") == before
    run("--resume", tmp_path / "r", "--steps", 4)
    assert not differences(tmp_path / "whole", tmp_path / "r")


# ------------------------------------------------------------------------------------------------- the puzzles


def test_training_puzzles_depend_on_seed_and_step_alone():
    """Every puzzle is drawn once in an epoch, also by steps that span two epochs."""
    puzzles, s = generate_puzzles(10, "train"), Settings(questions=4, seed=3)
    drawn = [train.draw_puzzles(puzzles, s, step) for step in range(1, 6)]  # two epochs of ten
    flat = [p for step in drawn for p in step]
    assert set(flat[:10]) == set(flat[10:]) == set(puzzles)
    assert flat[:10] != flat[10:]
    assert train.draw_puzzles(puzzles, s, 4) == drawn[3]
    assert train.draw_puzzles(puzzles, replace(s, seed=4), 1) != drawn[0]


def test_a_data_file_is_split_by_the_hash_whatever_its_order(tmp_path):
    puzzles = generate_puzzles(60, "train") + generate_puzzles(20, "heldout") + generate_puzzles(20, "new_numbers")
    lines = [json.dumps({"nums": p.numbers[::turn], "target": p.target}) for turn in (1, -1) for p in puzzles]
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "reversed.jsonl").write_text("\n".join(lines[::-1]))
    chosen, heldout = train.choose_puzzles(Settings(data=str(tmp_path / "data.jsonl")))
    assert {split(p) for p in chosen} == {"train"} and {split(p) for p in heldout} == {"heldout"}
    assert (len(chosen), len(heldout)) == (60, 20)  # a puzzle with its numbers in another order is the same
    assert train.choose_puzzles(Settings(data=str(tmp_path / "data.jsonl"), eval_problems=5))[1] == heldout[:5]
    again = train.choose_puzzles(Settings(data=str(tmp_path / "reversed.jsonl"), seed=5))
    assert [[p.target for p in part] for part in again] == [[p.target for p in part] for part in (chosen, heldout)]


def test_a_run_on_a_data_file(quick, tmp_path):
    puzzles = generate_puzzles(20, "train") + generate_puzzles(15, "heldout")
    text = "\n".join(json.dumps({"nums": p.numbers, "target": p.target}) for p in puzzles)
    (tmp_path / "data.jsonl").write_text(text)
    run(*TINY, "--steps", 1, "--data", tmp_path / "data.jsonl", "--out", tmp_path / "r")
    heads = re.findall(r"step 1  (\[.*?\]) -> (\d+)", (tmp_path / "r" / "samples.txt").read_text())
    assert len(heads) == 2 and set(heads) <= {(str(list(p.numbers)), str(p.target)) for p in puzzles[:20]}


DATA = {
    "malformed": ('{"nums": [1, 2, 3], "target": 6}\n{"nums": [1, 2', "line 2"),
    "empty": ("", "no puzzle"),
    "unsolvable": ("".join(f'{{"nums": [{a}, {b}, 2], "target": 9999}}\n' for a in range(1, 9) for b in range(1, 9)),
                   "9999"),
    "too many numbers": ("".join(f'{{"nums": [{a}, {b}, 2, 2, 2, 2, 2], "target": 9}}\n'
                                 for a in range(1, 9) for b in range(1, 9)), "too many"),
    "nothing held out": ('{"nums": [1, 2, 3], "target": 6}\n', "puzzle"),
}


@pytest.mark.parametrize("case", DATA)
def test_bad_data_is_refused_in_one_sentence(case, tmp_path):
    text, named = DATA[case]
    (tmp_path / "data.jsonl").write_text(text)
    assert named in error_of(*TINY, "--data", tmp_path / "data.jsonl", "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


# ------------------------------------------------------------------------------------------------- bad inputs


def edit_tensors(folder, edit):
    """Rewrite the weights of a model folder."""
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")


def edit_config(folder, **changes):
    """Change entries of a model's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def shrink_vocabulary(folder):
    """Leave the model fewer tokens than its tokenizer has."""
    edit_config(folder, vocab_size=500)
    name = "model.embed_tokens.weight"
    edit_tensors(folder, lambda t: t.update({name: t[name][:500].clone()}))


NORM = "model.norm.weight"
BROKEN_MODELS = {
    "no folder": (shutil.rmtree, "config.json"),
    "truncated": (lambda f: os.truncate(f / "model.safetensors", 5000), "model.safetensors"),
    "a tensor missing": (lambda f: edit_tensors(f, lambda t: t.pop(NORM)), NORM),
    "unsupported architecture": (lambda f: edit_config(f, model_type="llama"), "llama"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json"),
    "a tokenizer larger than the vocabulary": (shrink_vocabulary, "tokenizer"),
    "too few positions": (lambda f: edit_config(f, max_position_embeddings=40), "--max_new_tokens"),
    "NaN in the weights": (lambda f: edit_tensors(f, lambda t: t[NORM].fill_(float("nan"))), "not finite"),
    "a critic of another size": (lambda f: Critic(64).save(f), "critic.safetensors"),
}


@pytest.mark.parametrize("case", BROKEN_MODELS)
def test_broken_models_are_refused_in_one_sentence(case, tmp_path):
    damage, named = BROKEN_MODELS[case]
    shutil.copytree(BUNDLED, tmp_path / "model")
    damage(tmp_path / "model")
    flags = ["--mitigation", "ppo", "--model", tmp_path / "model"]
    assert named in error_of(*TINY, *flags, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_state_of_another_model_is_refused_in_one_sentence(learning, tmp_path, monkeypatch):
    interrupt(monkeypatch, 2, *TINY, "--steps", 4, "--state_every", 1, "--out", tmp_path / "r")
    state = torch.load(tmp_path / "r" / "state.pt", weights_only=True)
    weights = state["learners"]["optimizer"]["weights"]
    weights |= {name: torch.zeros(3, 5) for name in weights}
    torch.save(state, tmp_path / "r" / "state.pt")
    before = (tmp_path / "r" / "metrics.csv").read_bytes()
    assert "another model" in error_of("--resume", tmp_path / "r")
    assert (tmp_path / "r" / "metrics.csv").read_bytes() == before


def test_a_prompt_and_response_that_just_fit_are_accepted(codec):
    model, puzzles = load_model(BUNDLED), set(GENERATE(9, "heldout"))
    longest = max(len(codec.prompt(p)) for p in puzzles)
    room = model.config.max_position_embeddings - longest
    train.check_lengths(model, codec, puzzles, Settings(max_new_tokens=room))
    with pytest.raises(ValueError, match="--max_new_tokens"):
        train.check_lengths(model, codec, puzzles, Settings(max_new_tokens=room + 1))


@pytest.mark.parametrize("flags", [
    ["--mitigation", "magic"], ["--answers", 1], ["--max_grad_norm", 0], ["--beta1", 1.0], ["--clip_low", 1],
    ["--questions", 0], ["--eval_problems", 0], ["--lr", -1], ["--lr", "nan"], ["--kl", -0.1], ["--data", "nowhere.jsonl"],
    ["--device", "nonsense"], ["--device", "cuda:99"], ["--device", "meta"],
    ["--k", 0, "--mitigation", "vineppo"], ["--of", "none", "--mitigation", "inverted"],
], ids=lambda flags: " ".join(map(str, flags)))
def test_settings_that_cannot_work_are_refused_in_one_sentence(flags, tmp_path):
    message = error_of(*TINY, *flags, "--out", tmp_path / "r")
    assert flags[0] in message or flags[1] in message
    assert not (tmp_path / "r").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this computer has a GPU")
def test_a_missing_gpu_is_one_sentence_in_the_shell(tmp_path):
    command = [sys.executable, "train.py", "--device", "cuda", "--out", str(tmp_path / "r")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0
    assert result.stdout == ""
    assert result.stderr.startswith("error: --device cuda ") and result.stderr.count("\n") == 1


def test_an_existing_run_folder_is_left_alone(finished):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*")}
    assert "exists" in error_of(*SMALL, "--out", finished)
    assert before == {p: p.stat().st_mtime_ns for p in finished.rglob("*")}


@pytest.mark.parametrize("broken", [lambda batch: batch.advantage, lambda batch: batch.mask / 0], ids=["shape", "inf"])
def test_a_method_that_returns_no_credit_is_refused_before_the_run(broken, tmp_path, monkeypatch):
    monkeypatch.setitem(MITIGATIONS, "none", replace(MITIGATIONS["none"], function=broken))
    assert "none " in error_of(*TINY, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_method_that_fails_in_a_run_ends_it_in_one_sentence(quick, tmp_path, monkeypatch):
    plain = mitigations.none
    late = lambda batch: plain(batch) / (batch.mask.shape[1] <= 8)  # infinite where the rehearsal does not look
    monkeypatch.setitem(MITIGATIONS, "none", replace(plain, function=late))
    assert str(tmp_path / "r") in error_of(*TINY, "--max_new_tokens", 80, "--out", tmp_path / "r")


def test_training_that_diverges_ends_in_one_sentence(quick, tmp_path):
    message = error_of(*SMALL, "--steps", 3, "--lr", 1e9, "--out", tmp_path / "r")
    assert "--lr" in message and str(tmp_path / "r") in message
