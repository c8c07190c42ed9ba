"""Two processes, started by torchrun, against one: the same responses, credit and gradient, and one run folder.

torchrun starts this file, too: `main` is what each process then does.
"""
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import countdown_task
import grpo
import rollout
import start
import train
from methods import MITIGATIONS
from plumbing import processes
from plumbing.optimizer import Optimizer
from plumbing.registry import assign_credit
from plumbing.runs import read_metrics
from queries import Queries
from qwen2_model import load_model
from settings import Settings

ROOT = Path(train.__file__).parent
STEPS = {  # name: settings, and hyper-parameters of the credit function
    "ppo": ({"mitigation": "ppo"}, {}),
    "dpo with KL": ({"mitigation": "dpo", "kl": 0.1}, {}),
    "LoRA with KL": ({"lora_rank": 2, "kl": 0.1}, {}),
    "vineppo": ({"mitigation": "vineppo"}, {"k": 2}),
    "several turns": ({"task": "guess", "model": str(ROOT / "models" / "guess-tiny"), "mitigation": "vineppo"}, {}),
    "fewer puzzles than processes": ({"mitigation": "ppo", "questions": 1, "answers": 4}, {}),
}
SMALL = ["--questions", "3", "--answers", "4", "--eval_problems", "5", "--max_new_tokens", "50", "--eval_every", "2",
         "--mitigation", "ppo"]

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="there is no gloo")


def one_step(name: str) -> dict[str, torch.Tensor]:
    """A step of the bundled model that leaves its weights as they are: responses, credit, answers to queries, gradient.

    The tensors have the first T columns, without any column in which all rows are padding.
    """
    settings, hyper_parameters = STEPS[name]
    # With a limit of 59, the longest responses of the two processes have unequal lengths.
    s = Settings(**{"questions": 3, "answers": 4, "max_new_tokens": 59, "micro_batch": 3} | settings)
    policy = start.load_policy(s, needs=("critic", "importance", "reference"))
    heads = policy.heads
    with torch.no_grad():  # let the start model differ, and the critic have an opinion
        policy.reference.norm = torch.nn.Parameter(policy.reference.norm * 1.1)  # with LoRA the two models share it
        heads["critic"].value.outer.weight.copy_(torch.linspace(-1, 1, 128))
    optimizer, puzzles = Optimizer(policy.model, lr=0.0), policy.task.load("train", 20)[: s.questions]
    batch = rollout.rollout(policy, puzzles, s, 1)
    batch.ask = Queries(policy, batch, s, 1)
    batch.advantage = grpo.compare(batch)
    credit = assign_credit(batch, partial(MITIGATIONS[s.mitigation], **hyper_parameters), s)
    metrics = grpo.update(policy, optimizer, batch, credit, s)
    T = batch.mask.any(0).sum()
    found = {key: getattr(batch, key)[:, :T] for key in ("tokens", "mask", "logprob", "entropy", "role")}
    found |= {"credit": credit[:, :T], "reward": batch.reward, "group": batch.group, "ended": batch.ended}
    found |= {f"metric {key}": torch.tensor(value or 0.0) for key, value in metrics.items()}
    found |= {f"gradient {key}": w.grad for key, w in optimizer.master.items()}
    found |= {name: head.value.inner.weight for name, head in heads.items()}
    hide = torch.arange(batch.mask.shape[1])[None] == 2  # (1, T), a single row for two processes
    found |= {"hidden": batch.ask.hidden[:, :T], "attention": batch.ask.attention[:, :T, :T],
              "without": batch.ask.logprob_without(torch.tensor([1]), hide)[:, :T]}
    return {key: x.detach().contiguous().clone() for key, x in found.items()}


def all_steps() -> dict[str, torch.Tensor]:
    """The tensors of all steps, under `name: key`. Rewards follow the length, so that unfinished responses differ."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        names = ("reward", "answer", "format")
        patch.setattr(countdown_task, "PARTS", {"reward": 1})
        patch.setattr(countdown_task, "grade", lambda text, puzzle: dict.fromkeys(names, len(text) % 3 / 2))
        ppo = grpo.LOSSES["ppo"]  # with a column of its own, which a process without a row does not know
        patch.setitem(grpo.LOSSES, "ppo", lambda logprob, *others: (*ppo(logprob, *others), {"surprise": -logprob}))
        return {f"{name}: {key}": x for name in STEPS for key, x in one_step(name).items()}


def main() -> None:
    """What torchrun starts: every process writes what it found."""
    assert processes.join("cpu") == "cpu"
    print("joined")
    shares = {"rows": processes.my_part(list(range(7))), "alone": processes.my_part([5])}
    rank = processes.world()[0]
    assert processes.first_alone(lambda: f"of process {rank}") == "of process 0"
    with pytest.raises(OSError, match="of process 0"):
        processes.first_alone(Mock(side_effect=OSError(f"of process {rank}")))
    processes.check_equal({"lr": 1, "seed": 0})
    with pytest.raises(ValueError, match="different values of --seed"):
        processes.check_equal({"lr": 1, "seed": rank})
    found = all_steps() | {name: torch.tensor(processes.gather(share)) for name, share in shares.items()}
    processes.leave()
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]  # on Linux
    found["left behind"] = torch.tensor(threads.count("pt_gloo_runloop"))
    save_file(found, Path(sys.argv[1]) / f"{rank}.safetensors")


def torchrun(*arguments):
    """Start two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([str(x) for x in command], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, start_new_session=True)


def output_of(*arguments):
    """Exit code, stdout and stderr."""
    process = torchrun(*arguments)
    try:
        printed, complained = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"two processes wait for each other: {process.communicate()}") from None
    return process.returncode, printed, complained


def test_two_processes_find_the_same_as_one(tmp_path):
    """Guards against models that drift apart, results out of order, a loss that depends on the number of processes, a
    puzzle that nobody answers, and threads of gloo, which may abort at exit."""
    code, printed, complained = output_of(__file__, tmp_path)
    assert code == 0, complained[-3000:]
    assert printed == "joined\n"  # by the first one
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in (0, 1))
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key], second[key]), key
    assert first.pop("rows").tolist() == list(range(7))
    assert first.pop("alone").tolist() == [5]
    assert first.pop("left behind") == 0
    threads = torch.get_num_threads()
    one = all_steps()
    torch.set_num_threads(threads)
    assert first.keys() == one.keys()
    for key, expected in one.items():
        exact = not expected.is_floating_point() or key.endswith(": reward")
        tolerance = 0 if exact else 1e-5 * max(1e-2 if "gradient" in key else 1, expected.abs().max())
        torch.testing.assert_close(first[key], expected, rtol=0, atol=float(tolerance), msg=key)
    for name in STEPS:
        assert len(set(one[f"{name}: reward"].tolist())) > 1 and one[f"{name}: metric surprise"] > 0.1
        gradient = "gradient layers.0.o_adapter.B" if "LoRA" in name else "gradient norm"
        for key in ("credit", "hidden", "attention", "without", gradient):
            assert one[f"{name}: {key}"].any(), (name, key)


def test_a_run_of_two_processes_is_that_of_one_and_is_stopped_and_resumed(run_program, tmp_path):
    """Guards against the log of one's share, two processes that write or speak, and a state that only one reads."""
    folder, alone = tmp_path / "runs" / "run", tmp_path / "one"
    process = torchrun("train.py", *SMALL, "--steps", 5000, "--state_every", 2, "--out", folder)
    deadline = time.time() + 240
    while len(list(folder.glob("credit/*.npz"))) < 3 and time.time() < deadline and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C, which a terminal sends to both of them
    printed, complained = process.communicate(timeout=120)
    assert printed.count("step    1/") == complained.count("error: ") == 1, complained
    assert f"--resume {folder}" in complained
    run_program(train, *SMALL, "--steps", 2, "--out", alone)
    for file in ("credit/step-000001.npz", "credit/step-000002.npz"):
        two, one = np.load(folder / file), np.load(alone / file)
        assert two.files == one.files
        for name in ("puzzle_text", "response_success"):
            assert two[name].tolist() == one[name].tolist()
        for column in {*one.files} - {"puzzle_text", "response_success"}:
            np.testing.assert_allclose(two[column], one[column], rtol=1e-3, atol=1e-4, err_msg=column)
    two, one = read_metrics(folder), read_metrics(alone)
    for column in one.keys() - {"seconds", "tokens_per_second", "ratio_error", "credit_checksum"}:
        np.testing.assert_allclose(two[column][:3], one[column], rtol=1e-3, err_msg=column)

    done = torch.load(folder / "state.pt", weights_only=True)["step"]
    code, printed, complained = output_of("train.py", "--resume", folder, "--steps", done + 2)
    assert code == 0, complained
    assert [f"step {step:>4}/" in printed for step in (done, done + 1, done + 2)] == [False, True, True]
    assert len(list(folder.glob("credit/*.npz"))) == done + 2
    assert read_metrics(folder)["step"].tolist() == list(range(done + 3))
    assert "pass@16" in json.loads((folder / "final.json").read_text())
    state, model = torch.load(folder / "state.pt", weights_only=True), load_model(folder / "checkpoint")
    assert all(torch.equal(state["learners"]["optimizer"]["weights"][name], w) for name, w in model.named_parameters())
    assert [file.name for file in folder.parent.iterdir()] == ["run"] and not list(folder.rglob("*.part"))


if __name__ == "__main__":
    main()
