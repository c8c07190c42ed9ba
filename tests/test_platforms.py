"""Where it runs: drives that rename no folder or have no locks, output that is no terminal, a home, names that are long.
"""
import errno
import io
import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import analyze
import train
from models import warm_start
from plumbing import run_folder
from plumbing.files import read_json
from plumbing.launch import BUNDLED
from plumbing.runs import is_finished

TINY = ["--questions", 2, "--answers", 3, "--eval_problems", 2, "--max_new_tokens", 10, "--pass_at", 0]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No time for evaluation: no puzzle is ever solved."""
    monkeypatch.setattr(train, "evaluate", lambda policy, puzzles, k, s: np.zeros((len(puzzles), k)))


def held() -> set[str]:
    """The files that this process has open or mapped."""
    opened = [os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")]
    return {*opened, *(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())}


def drive(monkeypatch, rename_folders: bool) -> None:
    """A drive of Windows, which renames nothing that is open, in use or in its way; or one that renames no folder."""
    def refuses(call):
        def rename(source, target):
            inside = os.path.realpath(source)
            in_use = [name for name in held() if f"{name}/".startswith(f"{inside}/") or name == os.path.realpath(target)]
            if in_use or os.path.isdir(source) and not rename_folders:
                raise PermissionError(errno.EACCES, "Permission denied", str(source))
            return call(source, target)
        return rename
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, refuses(getattr(os, name)))


@pytest.mark.parametrize("rename_folders", [True, False])
def test_a_run_on_a_drive_that_does_not_rename_what_is_open_or_no_folder(rename_folders, run_program, tmp_path,
                                                                         monkeypatch):
    """It begins in an empty folder, and in one that a kill left half made, but not among somebody's files."""
    drive(monkeypatch, rename_folders)
    with (tmp_path / "open").open("w"), pytest.raises(PermissionError):
        (tmp_path / "open").rename(tmp_path / "moved")
    run = tmp_path / "r"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_folder, "write_json", mock.Mock(side_effect=KeyboardInterrupt))
        run_folder.start_run(run, {"model": str(BUNDLED)} | dict.fromkeys(("data", "eval_data", "adapter"), ""), {},
                             {}, [])
    assert {file.name for file in run.iterdir()} == {"lock", "credit", "checkpoint", "metrics.csv"}
    run_program(train, *TINY, "--steps", 1, "--state_every", 1, "--checkpoint_every", 1, "--out", run)
    run_program(train, "--resume", run, "--steps", 2)
    assert is_finished(run) and len([*run.glob("checkpoints/*/model.safetensors")]) == 2
    assert [file.name for file in tmp_path.iterdir() if file.name != "open"] == ["r"] and not [*run.rglob("*.part")]
    for name, unused in (("empty", True), ("mine/notes.txt", False), ("logs/credit/step-000001.npz", False)):
        folder = tmp_path / Path(name).parts[0]
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).mkdir()
        assert run_folder.is_unused(folder) == unused


@pytest.mark.parametrize("code", ["ENOLCK", "ENOSYS", "EOPNOTSUPP", "EINVAL", "EIO", None])
def test_a_run_on_a_disk_without_locks_goes_on_and_says_so(code, tmp_path, monkeypatch, capsys):
    """None: a system without locks. A disk that fails is no such disk."""
    if code:
        monkeypatch.setattr(run_folder.fcntl, "lockf", mock.Mock(side_effect=OSError(getattr(errno, code), "no")))
    else:
        monkeypatch.setattr(run_folder, "fcntl", None)
    if code == "EIO":
        with pytest.raises(OSError):
            run_folder.lock(tmp_path)
    else:
        run_folder.lock(tmp_path)
        assert f"no locks for {tmp_path}" in capsys.readouterr().out
        assert (tmp_path / "lock").read_text() == str(os.getpid())


class Notebook(io.TextIOBase):
    """What ipykernel puts in the place of sys.stdout: neither a buffer nor `reconfigure`."""

    def __init__(self):
        self.said = ""

    def write(self, text):
        self.said += text
        return len(text)


@pytest.mark.parametrize("output", [Notebook(), io.StringIO(), None], ids=["notebook", "StringIO", "none"])
def test_output_that_is_no_terminal(output, run_program, tmp_path, monkeypatch):
    """None: that of a program without a console."""
    monkeypatch.setattr(sys, "stdout", output)
    run_program(train, *TINY, "--steps", 1, "--out", tmp_path / "r")
    run_program(analyze, tmp_path / "r")
    assert (tmp_path / "r" / "analysis" / "tables.md").is_file()
    if output:
        said = output.said if isinstance(output, Notebook) else output.getvalue()
        assert "step    1/1" in said and "tables.md" in said


def test_a_notebooks_own_words_are_no_flags(monkeypatch, tmp_path):
    """As ipykernel 7 and Colab start their kernels."""
    monkeypatch.chdir(tmp_path)
    asked = mock.Mock(side_effect=ValueError)
    monkeypatch.setattr(train, "start", asked)
    for program in ("/lib/ipykernel_launcher.py", "/lib/colab_kernel_launcher.py"):
        monkeypatch.setattr(sys, "argv", [program, "-f", "/home/me/kernel-1.json"])
        with pytest.raises(SystemExit):
            train.main()
        assert asked.call_args.args[0] == []


def test_the_way_home(run_program, tmp_path, monkeypatch, refusal):
    """No shell expands it after = or in quotes. A folder that has its name is ./~."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(BUNDLED)
    run_program(train, *TINY, "--steps", 1, "--model", "~/model", "--out=~/runs/r")
    run_program(train, *TINY, "--config=~/runs/r", "--seed", 1, "--steps", 1, "--out", "~/runs/other")
    run_program(train, "--resume=~/runs/r", "--steps", 2)
    run_program(analyze, "~/runs/r")
    assert (tmp_path / "runs" / "r" / "analysis").is_dir() and not [*Path().iterdir()]
    assert read_json(tmp_path / "runs" / "other" / "config.json")["settings"]["model"] == str(tmp_path / "model")
    for flag in ("--data", "--adapter", "--eval_data"):
        assert f"{tmp_path}/gone" in refusal(train, *TINY, "--lora_rank", 8, f"{flag}=~/gone", "--out", "x")
    assert f"{tmp_path}/gone" in refusal(train, "--task", "~/gone.py")
    assert f"{tmp_path}/gone" in refusal(warm_start, "--report=~/gone")


def test_a_long_name_is_cut_and_stays_one_of_its_own():
    """100 bytes, also of letters that take several. Seeds differ only at the end, so that analyze.py finds them."""
    flags = {f"flag_{i}": 0.5 for i in range(24)}
    names = [run_folder.default_folder("vineppo", seed, changed).name
             for changed in (flags, flags | {"flag_23": 1.0}, {"task": "ё" * 90 + ".py"}, {"a" * 300: 1})
             for seed in (0, 11)]
    assert max(len(name.encode()) for name in names) <= 100 and len({*names}) == 8
    assert all(a.removesuffix("seed0") == b.removesuffix("seed11") for a, b in zip(names[::2], names[1::2]))
    assert names[0].startswith("vineppo-flag_00.5-flag_10.5-")
    assert run_folder.default_folder("x", 0, {"y" * 87: 1}).name == f"x-{'y' * 87}1-seed0"  # 96 bytes stay as they are
