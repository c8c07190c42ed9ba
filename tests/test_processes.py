"""Several processes, started by torchrun, against one: the same responses, credit and gradient, and one run folder.

Run it:  python -m pytest tests/test_processes.py

torchrun starts this file, too: `main` is what each process then does.
"""

import copy
import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import grpo
import train
from countdown_task import Codec, generate_problems
from critic import Critic
from mitigations import parameters
from qwen2_model import load_model
from train import BUNDLED, Settings

ROOT = Path(train.__file__).parent
METHODS = {
    "none": {},
    "ppo": {},
    "attention_credit": {},
    "causal_ablation": {},
    "dpo": {"kl": 0.1},
    "vineppo": {"k": 2},
    "lonely": {"questions": 1, "answers": 2, "mitigation": "ppo"},
}
SMALL = ["--questions", "3", "--answers", "4", "--eval_problems", "5", "--max_new_tokens", "50", "--eval_every", "2"]

gloo = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")


# ------------------------------------------------------------------------------------- what each process does


def figures_of(name: str) -> dict[str, torch.Tensor]:
    """One step of a method on the bundled model that leaves the weights as they are: batch, credit and gradient."""
    defaults = parameters(METHODS[name].get("mitigation", name))
    own = {key: METHODS[name].get(key, value) for key, value in defaults.items()}
    given = {key: value for key, value in METHODS[name].items() if key not in own}
    s = Settings(**{"mitigation": name, "questions": 3, "answers": 4, "max_new_tokens": 90, "micro_batch": 3} | given)
    codec, model, critic = Codec(BUNDLED), load_model(BUNDLED), Critic(128)
    model.real_vocab, reference = codec.size, copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():  # the start model differs, and the critic has an opinion
        reference.model["norm"].weight.mul_(1.1)
        critic.outer.weight.copy_(torch.linspace(-1, 1, 128))
    optimizer = grpo.Optimizer(model, lr=0.0)
    problems = generate_problems(20, "train")[: s.questions]
    batch, credit = train.assign_credit(model, codec, problems, s, own, 1, reference, critic)
    critic.learn(batch.reward)
    measured = grpo.update(
        model, optimizer, [codec.prompt(p) for p in problems], batch, credit, reference=reference if s.kl else None,
        kl=s.kl, max_new_tokens=s.max_new_tokens, max_grad_norm=1e9, micro_batch=s.micro_batch)
    T = batch.mask.any(0).sum()  # a process may have a column of padding more
    found = {key: getattr(batch, key)[:, :T] for key in ("tokens", "mask", "logprob", "entropy", "role")}
    found |= {"credit": credit[:, :T], "reward": batch.reward, "group": batch.group, "ended": batch.ended}
    found |= {"critic": critic.inner.weight, "loss": torch.tensor(measured["loss"])}
    found |= {f"gradient of {key}": w.grad for key, w in optimizer.master.items()}
    hidden, attention = batch.hidden()[:, :T], batch.attention()[:, :T, :T]
    hide = torch.arange(batch.mask.shape[1])[None] == 2  # (1, T): fewer rows than processes
    without = batch.logprob_without(torch.tensor([1]), hide)[:, :T]
    found |= {"hidden": hidden[batch.mask[:, :T]], "attention": attention, "without": without}
    return {key: x.detach().contiguous().clone() for key, x in found.items()}


def half_a_point(text: str, *_) -> dict[str, float]:
    """Instead of the reward, so that short responses differ, too."""
    return {"reward": len(text) % 3 / 2, "answer": float(len(text) % 3 == 2), "format": 1.0}


def everything() -> dict[str, torch.Tensor]:
    """The figures of all methods, evaluation, and some rows of uneven shares."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "reward", half_a_point)
        found = {f"{name}: {key}": x for name in METHODS for key, x in figures_of(name).items()}
        codec, model = Codec(BUNDLED), load_model(BUNDLED)
        model.real_vocab = codec.size
        with torch.no_grad():
            solved = grpo.evaluate(model, codec, generate_problems(5, "heldout"), 3, 40, rows=6)
    return found | {"evaluation": torch.from_numpy(solved)}


def main() -> None:
    """What torchrun starts: every process writes what it found."""
    train.join_processes(Settings())
    rank, size = grpo.world()
    wide = torch.arange(7 * 2 * (3 + rank)).view(14, 3 + rank)[grpo.share(14)]  # rows longer in later processes
    gathered = {"rows": grpo.gather(wide, 14), "bits": grpo.gather(torch.ones(2, dtype=torch.bool)[grpo.share(2)], 2)}
    alone = torch.full((len(range(1)[grpo.share(1)]), 4), 5)
    found = everything() | gathered | {"alone": grpo.gather(alone, 1)}
    dist.destroy_process_group()
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]  # Linux has it
    found |= {"left behind": torch.tensor(threads.count("pt_gloo_runloop"))}
    save_file(found, Path(sys.argv[1]) / f"{rank}.safetensors")


# ------------------------------------------------------------------------------------------------- the shares


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("n", [0, 1, 3, 8, 13])
def test_shares_cover_everything_once(n, size, monkeypatch):
    """Guards against a response that nobody samples, or two do, and against a process with much more to do."""
    parts = []
    for rank in range(size):
        monkeypatch.setattr(grpo, "world", lambda rank=rank: (rank, size))
        parts.append(list(range(n)[grpo.share(n)]))
    assert sum(parts, []) == list(range(n)) == [i for r in range(size) for i in range(n)[grpo.share(n, r)]]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_one_process_gathers_nothing():
    """Guards against a copy, or a wait for others, where there are none."""
    x = torch.ones(3, 2)
    assert grpo.gather(x, 3) is x and grpo.world() == (0, 1) and not dist.is_initialized()


@pytest.mark.parametrize("skip", [True, False])
def test_every_response_is_updated_on_once(skip, monkeypatch):
    """Guards against a response that no process updates on, or two do, and rows of somebody else's question."""
    from conftest import make_batch

    lengths = [3, 9, 1, 4, 5, 2, 7, 7, 6, 8, 2, 2]
    groups = [i // 3 for i in range(12)]
    batch = make_batch(lengths, [0.0] * 12, groups)
    credit = batch.mask * torch.tensor([1.0] * 5 + [0.0] * 4 + [1.0] * 3)[:, None]  # nothing to learn from question 2
    for size in (1, 2, 3, 6):
        seen, asked = [], []
        for rank in range(size):
            monkeypatch.setattr(grpo, "world", lambda rank=rank: (rank, size))
            questions, parts = grpo.micro_batches(batch, credit, 2, skip)
            asked += questions.tolist()
            for rows, which, T in parts:
                assert len(rows) <= 2 and T == max(lengths[i] for i in rows)
                assert questions[which].tolist() == [groups[i] for i in rows]
                seen += rows.tolist()
        expected = [i for i in range(12) if not skip or credit[i].any()]
        assert sorted(seen) == expected and sorted(asked) == sorted({groups[i] for i in expected})


# ------------------------------------------------------------------------------------------------- torchrun


def torchrun(*arguments, **options):
    """Start two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", port, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return subprocess.Popen([str(x) for x in command], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, start_new_session=True, **options)


def output_of(*arguments):
    """Exit code, what it printed, and what it complained of."""
    process = torchrun(*arguments)
    try:
        printed, complained = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"two processes wait for each other: {process.communicate()}") from None
    return process.returncode, printed, complained


@pytest.fixture(scope="module")
def two_and_one(tmp_path_factory):
    """What each of two processes found, and what one finds alone."""
    folder, threads = tmp_path_factory.mktemp("two"), torch.get_num_threads()
    code, _, complained = output_of(__file__, folder)
    assert code == 0, complained[-3000:]
    try:
        return load_file(folder / "0.safetensors"), load_file(folder / "1.safetensors"), everything()
    finally:
        torch.set_num_threads(threads)


@gloo
def test_processes_agree(two_and_one):
    """Guards against processes whose models, or critics, drift apart: what one of them finds is what all find."""
    first, second, _ = two_and_one
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@gloo
def test_nothing_runs_on_after_the_end(two_and_one):
    """Guards against a thread that still holds tensors while Python ends: now and then that aborts a finished run."""
    assert not any(found["left behind"] for found in two_and_one[:2])


@gloo
def test_rows_come_back_in_order(two_and_one):
    """Guards against rows that are cut off, out of order, or of a process that had none."""
    found = two_and_one[0]
    short, long = torch.arange(42).view(14, 3)[:7], torch.arange(56).view(14, 4)[7:]
    assert torch.equal(found["rows"], torch.cat((torch.nn.functional.pad(short, (0, 1)), long)))
    assert found["bits"].dtype == torch.bool and found["bits"].tolist() == [True, True]
    assert torch.equal(found["alone"], torch.full((1, 4), 5))


@gloo
@pytest.mark.parametrize("name", METHODS)
def test_two_processes_find_what_one_does(name, two_and_one):
    """Guards against responses that depend on how many share the work, a share of the loss that counts twice or not at
    all, and a question that nobody answers: three questions, or one, and two processes."""
    own = f"{name}: "
    two, _, one = ({k.removeprefix(own): x for k, x in all.items() if k.startswith(own)} for all in two_and_one)
    assert two.keys() == one.keys()
    for key in ("tokens", "mask", "reward", "role", "group", "ended"):
        assert torch.equal(two[key], one[key]), key
    assert len(set(one["reward"].tolist())) > 1 and one["credit"].any() and one["without"].any()
    gradients = [key for key in one if key.startswith("gradient of")]
    assert len(gradients) > 10 and all(one[key].any() for key in gradients)
    for key in ("logprob", "entropy", "credit", "critic", "hidden", "attention", "without", "loss"):
        torch.testing.assert_close(two[key], one[key], rtol=1e-5, atol=1e-5)
    for key in gradients:
        assert (two[key] - one[key]).abs().max() <= 1e-5 * max(1e-2, one[key].abs().max()), key


@gloo
def test_two_processes_evaluate_as_one_does(two_and_one):
    """Guards against held-out figures of a share of the puzzles, or of shares in another order."""
    two, _, one = two_and_one
    assert torch.equal(two["evaluation"], one["evaluation"]) and one["evaluation"].any()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run of two processes that Ctrl-C, which a terminal sends to all of them, stops after a few steps."""
    folder = tmp_path_factory.mktemp("runs") / "r"
    process = torchrun("train.py", *SMALL, "--mitigation", "ppo", "--steps", 5000, "--state_every", 0, "--out", folder)
    deadline = time.time() + 120
    while len(list(folder.glob("credit/*.npz"))) < 2 and time.time() < deadline and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    printed, complained = process.communicate(timeout=60)
    return folder, printed, complained


@gloo
def test_the_first_step_is_that_of_one_process(interrupted, tmp_path):
    """Guards against a log of one process's share, and one that each process writes over."""
    sys.argv = ["train.py", *SMALL, "--mitigation", "ppo", "--steps", "1", "--out", str(tmp_path / "one")]
    train.main()
    two, one = (np.load(folder / "credit" / "step-000001.npz") for folder in (interrupted[0], tmp_path / "one"))
    assert two.files == one.files
    for column in one.files:
        if one[column].dtype.kind == "f":
            np.testing.assert_allclose(two[column], one[column], rtol=1e-5, atol=1e-5)
        else:
            assert np.array_equal(two[column], one[column])
    tables = [list(csv.DictReader((folder / "metrics.csv").open())) for folder in (interrupted[0], tmp_path / "one")]
    assert tables[0][0] == tables[1][0]
    for column in ("reward", "success", "length", "grad_norm", "loss", "entropy", "ratio_error"):
        assert float(tables[0][1][column]) == pytest.approx(float(tables[1][1][column]), rel=1e-4, abs=1e-6), column


@gloo
def test_ctrl_c_stops_all_processes_and_they_go_on(interrupted):
    """Guards against a stop that only one process hears of, two that write, speak or are interrupted, and a state that
    only the writing process reads."""
    folder, printed, complained = interrupted
    assert printed.count("stopping after this step") == 1 and printed.count("step    1/") == 1, complained
    assert "error:" not in complained and f"--resume {folder}" in printed
    table = list(csv.DictReader((folder / "metrics.csv").open()))
    done = int(table[-1]["step"])
    assert [row["step"] for row in table] == [str(i) for i in range(done + 1)] and done >= 2
    assert not (folder / "final.json").exists()  # torchrun would not wait for it
    code, printed, complained = output_of("train.py", "--resume", folder, "--steps", done + 2)
    assert code == 0, complained
    assert [f"step {step:>4}/" in printed for step in (done, done + 1, done + 2)] == [False, True, True]
    assert len(list(folder.glob("credit/*.npz"))) == done + 2 and not list(folder.parent.rglob("*.part"))
    table = list(csv.DictReader((folder / "metrics.csv").open()))
    assert [row["step"] for row in table] == [str(i) for i in range(done + 3)]
    assert "pass@16" in json.loads((folder / "final.json").read_text())
    state, trained = load_file(folder / "state.safetensors"), load_model(folder / "checkpoint")
    assert all(torch.equal(state[f"weight.{name}"], w) for name, w in trained.named_parameters())
    assert [file.name for file in folder.parent.iterdir()] == ["r"]


@gloo
def test_an_error_is_said_once(interrupted, tmp_path):
    """Guards against a message from each process, a hang of those that wait for the others, and an exit status of 0."""
    code, _, complained = output_of("train.py", *SMALL, "--out", interrupted[0])
    assert code != 0 and complained.count("error: ") == 1 and f"{interrupted[0]} exists" in complained
    (tmp_path / "state.safetensors").write_text("<html>")
    (tmp_path / "config.json").write_bytes((interrupted[0] / "config.json").read_bytes())
    code, _, complained = output_of("train.py", "--resume", tmp_path)
    assert code != 0 and complained.count("error: ") == 1 and "state.safetensors is broken" in complained


if __name__ == "__main__":
    main()
