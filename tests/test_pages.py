"""What the pages say holds: links, commands, files, columns, the function that a reader adds."""
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import train
from plumbing import metrics

ROOT = Path(train.__file__).parent
ROOMS = [*sorted((ROOT / "lab").glob("**/README.md")),
         *(ROOT / "lab" / page for page in ("study/collapse.md", "study/elsewhere.md", "original/claims.md"))]
PAGES = {path: path.read_text(encoding="utf-8")
         for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *ROOMS)}
COMMANDS = sorted({line for text in PAGES.values() for block in re.findall(r"```sh\n(.*?)```", text, re.S)
                   for line in block.splitlines()})
IDEA = re.search(r"```python\n(@reweighting\n.*?)```", PAGES[ROOT / "README.md"], re.S)[1]
NAME = re.search(r"def (\w+)", IDEA)[1]
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@EACH_PAGE
def test_links_lead_to_a_file_or_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


def test_files_of_the_tree_and_of_commands_exist():
    tree = re.search(r"## The files.*?```\n(.*?)```", PAGES[ROOT / "README.md"], re.S)[1]
    for name in re.findall(r"^([\w./-]+)  ", tree, re.M):
        assert (ROOT / name).exists(), name
    assert any(c.startswith("pip install -r tests/requirements.txt") for c in COMMANDS)
    for command in COMMANDS:
        for name in re.findall(r"[\w/]+\.(?:py|txt)\b", command.replace("path/to/my_task.py", "")):
            assert (ROOT / name).is_file(), command
        for module in re.findall(r"-m ((?:lab|tests)\.[\w.]+)", command):
            assert source_of(module).is_file(), command


def source_of(module):
    """The file that `python -m module` runs."""
    path = ROOT / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.mark.parametrize("command", [c for c in COMMANDS if "train.py" in c and NAME not in c])
def test_commands_of_train_are_accepted(command, tmp_path, monkeypatch):
    arguments = shlex.split(re.search(r"train\.py([^;&|]*)", command)[1].replace("$seed", "3"))
    if "--resume" in arguments:  # the flags are right, but in an empty folder there is no such run
        monkeypatch.chdir(tmp_path)
        with pytest.raises(FileNotFoundError, match="is not a run folder"):
            train.parse_flags(arguments)
    else:
        train.check(replace(train.parse_flags(arguments)[0], device="cpu"))


def test_every_column_is_explained():
    text = PAGES[ROOT / "docs" / "running.md"]
    table = re.search(r"\| column of metrics.csv.*?\n\n", text, re.S)[0]
    explained = re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.strip().splitlines()))
    assert set(explained) == set(metrics.COLUMNS)
    assert re.search(r"credit log has `([\w\s]+)`", text)[1].split() == [*metrics.CREDIT_LOG]


# --------------------------------------------------------------------------------- the function that a reader adds


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository in which the README's function was added as the README says."""
    folder = tmp_path_factory.mktemp("copy") / "repository"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    source = (folder / "mitigations.py").read_text(encoding="utf-8")
    assert source.count("# <- your idea here") == 1
    if f"def {NAME}(" not in source:  # a reader who did what the README says runs these tests, too
        source = re.sub(r"# <- your idea here.*\n", lambda mark: f"{IDEA}\n\n{mark[0]}", source)
    (folder / "mitigations.py").write_text(source, encoding="utf-8")
    return folder


def in_copy(folder, *arguments):
    """What a Python command in the copy prints; it must succeed."""
    result = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def test_the_function_is_listed_trains_a_step_and_passes_the_tests(copy):
    formula = re.search('"""(.*)"""', IDEA)[1]
    assert f"  {NAME} --power 1.0\n      {formula}\n" in in_copy(copy, "train.py", "--help")
    command = next(c for c in COMMANDS if NAME in c and "train.py" in c)
    tiny = "--questions 2 --answers 2 --max_new_tokens 8 --eval_problems 2 --steps 1".split()
    assert "step    1/1" in in_copy(copy, *shlex.split(command)[1:], *tiny, "--out", "runs/r")
    assert (copy / "runs" / "r" / "credit" / "step-000001.npz").is_file()
    in_copy(copy, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/test_mitigations.py",
            "tests/test_plumbing.py", "-k", f"{NAME} or help or flag or registered")
