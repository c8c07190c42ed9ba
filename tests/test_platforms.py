"""Where it runs: drives that rename no folder or have no locks, output that is no terminal and homes."""
import errno
import io
import multiprocessing
import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import analyze
import train
from models import warm_start
from plumbing import run_folder
from plumbing.launch import BUNDLED
from plumbing.runs import is_finished, read_config
from settings import Settings
from tests.fixtures import refused

TINY = ["--questions", 2, "--responses", 3, "--eval_problems", 2, "--max_new_tokens", 10, "--pass_at", 0, "--steps", 1]
pytestmark = pytest.mark.usefixtures("quick")


def on_drive(call, rename_folders):
    """os.rename of a drive of Windows, which renames nothing with an open or mapped file in it; or no folder at all."""
    def rename(source, target):
        held = [os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")]
        held += [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
        busy = any(f"{file}/".startswith(f"{os.path.realpath(path)}/") for path in (source, target) for file in held)
        if busy or os.path.isdir(source) and not rename_folders:
            raise PermissionError(errno.EACCES, "Permission denied", str(source))
        return call(source, target)
    return rename


@pytest.mark.slow
@pytest.mark.parametrize("rename_folders", [True, False])
def test_a_run_on_a_drive_that_renames_no_open_folder_or_none(rename_folders, run_program, tmp_path, monkeypatch):
    """In an empty folder, too, but not among somebody's files."""
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, on_drive(getattr(os, name), rename_folders))
    run = tmp_path / "r"
    run.mkdir()
    run_program(train, *TINY, "--checkpoint_every", 1, "--out", run)
    run_program(train, "--resume", run, "--steps", 2)
    assert is_finished(run) and len([*run.glob("checkpoints/*/model.safetensors")]) == 2
    assert [*tmp_path.iterdir()] == [run] and not [*run.rglob("*.part")]
    (tmp_path / "mine" / "notes.txt").mkdir(parents=True)
    assert "mine exists: continue it" in refused(run_program, train, *TINY, "--out", tmp_path / "mine")


@pytest.mark.parametrize("code", ["ENOLCK", "ENOSYS", "EOPNOTSUPP", "EINVAL", None])
def test_a_run_on_a_disk_without_locks_goes_on_and_says_so(code, tmp_path, monkeypatch, capsys):
    """None: a system without locks."""
    no_lock = mock.Mock(side_effect=OSError(getattr(errno, code or "EACCES"), "no"))
    monkeypatch.setattr(*(run_folder.fcntl, "lockf", no_lock) if code else (run_folder, "fcntl", None))
    run_folder.lock(tmp_path)
    assert f"no locks for {tmp_path}" in capsys.readouterr().out
    assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_a_start_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder.fcntl, "lockf", mock.Mock(side_effect=OSError(errno.EACCES, "no")))
    with pytest.raises(ValueError, match="or its drive refuses locks"):  # nobody has written a number
        run_folder.lock(tmp_path)
    monkeypatch.setattr(run_folder, "write_header", mock.Mock(side_effect=OSError(errno.ENOSPC, "no")))
    monkeypatch.setattr(run_folder, "lock", lambda _: None)
    with pytest.raises(OSError):
        run_folder.start_run(tmp_path / "r", asdict(Settings()), {}, {}, [])
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
@pytest.mark.parametrize("output", [io.StringIO(), SimpleNamespace(write=(text := io.StringIO()).write,
                                                                   getvalue=text.getvalue), None],
                         ids=["notebook", "write", "none"])
def test_output_that_is_no_terminal(output, run_program, tmp_path, monkeypatch):
    """StringIO has no `reconfigure`, as ipykernel's has none; some have no `flush`. None: no console at all."""
    monkeypatch.setattr(sys, "stdout", output)
    run_program(train, *TINY, "--out", tmp_path / "r")
    other = multiprocessing.get_context("fork").Process(target=run_folder.lock, args=[tmp_path / "r"])
    other.start()
    other.join()
    assert other.exitcode == 0  # though the process goes on
    run_program(analyze, tmp_path / "r")
    assert (tmp_path / "r" / "analysis" / "tables.md").is_file()
    assert not output or "step    1/1" in output.getvalue()


def test_a_notebooks_own_words_are_no_flags(monkeypatch):
    asked = mock.Mock(side_effect=ValueError("no"))
    monkeypatch.setattr(train, "start", asked)
    for program in ("/lib/ipykernel_launcher.py", "/lib/colab_kernel_launcher.py"):
        monkeypatch.setattr(sys, "argv", [program, "-f", "kernel-1.json"])
        refused(train.main)
        assert asked.call_args.args[0] == []


@pytest.mark.slow
def test_the_way_home(run_program, tmp_path, monkeypatch, refusal):
    """No shell expands it after = or in quotes. A folder that has its name is ./~."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(BUNDLED)
    run_program(train, *TINY, "--model", "~/model", "--out=~/r")
    run_program(train, "--config=~/r", "--seed", 1, "--out", "~/other")
    run_program(train, "--resume=~/r", "--steps", 2)
    run_program(analyze, "~/r")
    assert (tmp_path / "r" / "analysis").is_dir() and not [*Path().iterdir()]
    assert read_config(tmp_path / "other")["settings"]["model"] == str(tmp_path / "model")
    for program, *flags in ((train, "--data=~/gone"), (train, "--eval_data=~/gone"), (train, "--task", "~/gone.py"),
                            (train, "--lora_rank=8", "--adapter=~/gone"), (warm_start, "--report=~/gone")):
        assert f"{tmp_path}/gone" in refusal(program, *flags)
