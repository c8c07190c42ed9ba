"""The queue of lab/real/gpu.py, with stand-ins for its runs, and a small run as it makes them."""
import io
import re
import sys
import tarfile
import time
from pathlib import Path

import pytest

from lab.real import gpu
from lab.study.run import Experiment
from plumbing import run_folder
from plumbing.files import read_json

LISTED = gpu.list_experiments(gpu.PARTS, gpu.LEVELS, list(gpu.MITIGATIONS), "cuda")
ENDS = "cd {0} && mkdir credit checkpoint && touch row.json credit/step-000001.npz checkpoint/model.safetensors"


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """Runs the queue with stand-ins; its exit code, and the names of what came back."""
    def make_all(seconds, commands):
        """commands: by run, a shell command in which {0} is the run's folder. seconds: the limit."""
        monkeypatch.setattr(gpu, "PACKING", 0)
        monkeypatch.setattr(gpu, "SLICE", 1000)
        monkeypatch.setattr(gpu, "command_of", lambda e: [
            "sh", "-c", f"mkdir -p {e.folder} && {commands.get(e, ENDS)}".format(e.folder)])
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--minutes", str(seconds / 60), "--workers", "2"])
        code = 0
        try:
            gpu.main()
        except SystemExit as ended:
            code = ended.code
        content = b"".join(file.read_bytes() for file in sorted(Path("results").iterdir()))
        return code, tarfile.open(fileobj=io.BytesIO(content)).getnames()

    monkeypatch.chdir(tmp_path)
    Path("weights").mkdir()
    Path(gpu.OTHERS).touch()
    return make_all


def test_a_run_that_fails_or_hangs_costs_only_itself(queue, capsys):
    """Guards against a queue that a crash ends, a process that outlives the limit, and weights or all credit logs among
    what comes back."""
    crash, hang, after, seed_1 = (LISTED[i] for i in (1, 2, 3, 7))
    began = time.time()
    code, names = queue(3, {crash: "echo it broke; exit 3", hang: "exec sleep 60"})
    assert code == 0 and time.time() - began < 8
    said = capsys.readouterr().out
    assert re.search(f"{crash.name}: . s, failed with code 3: it broke\n", said) and f"{hang.name}: cut off\n" in said
    assert not any("checkpoint" in name for name in names)
    for e, come_back in ((crash, (1, 0, 0)), (hang, (1, 0, 0)), (after, (1, 1, 1)), (seed_1, (1, 1, 0))):
        files = e.log, e.folder / "row.json", e.folder / "credit" / "step-000001.npz"
        assert tuple(str(file) in names for file in files) == come_back


def test_nothing_begins_after_a_first_run_that_fails(queue):
    """Guards against a lease spent on runs whose gradient is not finite."""
    code, names = queue(60, {LISTED[0]: "exit 1"})
    assert "no other began" in code and names == [str(LISTED[0].log)]


def test_no_run_begins_that_would_not_end_in_time(queue):
    """Guards against runs that the limit is sure to cut off."""
    assert not gpu.attempt(LISTED[0], time.time() + 1, took=[5.0, 0.1])
    assert not LISTED[0].log.exists()


def test_what_a_run_reads_last_is_looked_for_first(queue, refusal):
    """Guards against minutes of training without a row."""
    Path(gpu.OTHERS).unlink()
    assert "lab.real.problems" in refusal(gpu)


def test_a_run_leaves_its_row_and_no_state(tmp_path, monkeypatch):
    """Guards against 6 GB of state for each run, and a save that is no longer called as here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(run_folder, "save", run_folder.save)  # make replaces it
    e = Experiment("first", "math", "none --steps 2 --questions 2 --answers 2 --max_new_tokens 16 --eval_every 0 "
                   "--eval_problems 2 --pass_at 0 --state_every 1", 0)
    for _ in range(2):  # the second time over what the first has left
        gpu.make(e)
    assert (e.folder / "checkpoint" / "model.safetensors").is_file() and not (e.folder / "state.pt").exists()
    assert read_json(e.folder / "row.json")["run"] == e.name
