"""The README's links, commands and example hold.

Run it:  python -m pytest tests/test_readme.py
"""
import inspect
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import grpo
import train
from mitigations import MITIGATIONS
from plumbing import flags, run_folder

ROOT = Path(train.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()]
IDEA = re.search(r"```python\n(@reweighting\n.*?)```", README, re.S)[1]
NAME = re.search(r"def (\w+)", IDEA)[1]


def test_links_lead_to_a_file_or_a_heading():
    links = re.findall(r"\]\(([^)]+)\)", README)
    headings = re.findall(r"^##+ (.*)", README, re.M)
    anchors = {"#" + re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert links
    for link in links:
        assert link.startswith("https://") or link in anchors or (ROOT / link).is_file(), link


def test_commands_name_files_that_exist():
    assert any("train.py" in c for c in COMMANDS) and any("analyze.py" in c for c in COMMANDS)
    assert any(c.startswith("pip install -r tests/requirements.txt") for c in COMMANDS)
    for command in COMMANDS:
        for name in re.findall(r"[\w/]+\.(?:py|txt)\b", command):
            assert (ROOT / name).is_file(), command
        for module in re.findall(r"-m ((?:experiments|tests)\.\w+)", command):
            assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), command


def test_files_of_the_tree_exist():
    tree = re.search(r"## The files.*?```\n(.*?)```", README, re.S)[1]
    for indent, name in re.findall(r"^( *)([\w./-]+)  ", tree, re.M):
        assert (ROOT / ("experiments" if indent else "") / name).exists(), name


@pytest.mark.parametrize("command", [c for c in COMMANDS if "train.py" in c and NAME not in c])
def test_commands_of_train_are_accepted(command):
    arguments = shlex.split(re.search(r"train\.py([^;&|]*)", command)[1].replace("$seed", "3"))
    if "--resume" in arguments:  # the flags are right, but there is no such run
        with pytest.raises(SystemExit, match="is not a run folder"):
            flags.parse(arguments, train.Settings(), MITIGATIONS, train.CHOICES, "")
    else:
        settings = flags.parse(arguments, train.Settings(), MITIGATIONS, train.CHOICES, "").settings
        train.check(replace(settings, device="cpu"))


@pytest.mark.parametrize("command", [c for c in COMMANDS if "-m experiments." in c])
def test_flags_of_experiments_exist(command):
    """The source is enough: `--help` would import the experiment in a process of its own."""
    module, arguments = re.search(r"-m (experiments\.\w+)([^;&|]*)", command).groups()
    source = (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
    for flag in re.findall(r"--(\w+)", arguments):
        assert re.search(rf"--{flag}\b|^    {flag}: ", source, re.M), command


def test_every_metric_is_explained():
    table = re.search(r"\| column of metrics.csv.*?\n\n", README, re.S)[0]
    explained = re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.strip().splitlines()))
    assert set(explained) == set(run_folder.COLUMNS)
    logged = re.findall(r'"(\w+)": \(', inspect.getsource(grpo.log_columns))
    assert re.search(r"one row a token: `([\w ]+)`", README)[1].split() == logged


# --------------------------------------------------------------------------------- the function that a reader adds


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository in which the README's function was added as the README says."""
    folder = tmp_path_factory.mktemp("copy") / "repository"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "runs", "results", "__pycache__"))
    source = (folder / "mitigations.py").read_text(encoding="utf-8")
    assert source.count("# <- your idea here") == 1
    changed = re.sub(r"# <- your idea here.*\n", lambda mark: f"{IDEA}\n\n{mark[0]}", source)
    (folder / "mitigations.py").write_text(changed, encoding="utf-8")
    return folder


def in_copy(folder, *arguments):
    """What a Python command in the copy prints; it must succeed."""
    result = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def test_the_function_is_four_lines():
    assert len(IDEA.strip().splitlines()) == 4


def test_the_function_shows_up_in_help(copy):
    formula = re.search('"""(.*)"""', IDEA)[1]
    assert f"  {NAME} --power 1.0\n      {formula}\n" in in_copy(copy, "train.py", "--help")


def test_the_function_trains_a_step(copy):
    command = next(c for c in COMMANDS if NAME in c and "--power" in c)
    tiny = "--questions 2 --answers 2 --max_new_tokens 8 --eval_problems 2 --steps 1".split()
    assert "step    1/1" in in_copy(copy, *shlex.split(command)[1:], *tiny, "--out", "runs/r")
    assert (copy / "runs" / "r" / "credit" / "step-000001.npz").is_file()


def test_the_tests_of_mitigations_stay_green(copy):
    in_copy(copy, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/test_mitigations.py", "-k",
            f"{NAME} or help or flag or registered or listed or plain")
