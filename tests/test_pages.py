"""What README.md and docs/ say holds: links, commands, columns, tables, and every quoted figure.

Run it:  python -m pytest tests/test_pages.py
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
from experiments import pages, score
from mitigations import MITIGATIONS
from plumbing import flags, run_folder

ROOT = Path(train.__file__).parent
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
COMMANDS = sorted({line for text in PAGES.values() for block in re.findall(r"```sh\n(.*?)```", text, re.S)
                   for line in block.splitlines()})
IDEA = re.search(r"```python\n(@reweighting\n.*?)```", PAGES[ROOT / "README.md"], re.S)[1]
NAME = re.search(r"def (\w+)", IDEA)[1]
FIGURE = re.compile(r"(?<![\w.])-?\d+\.\d+(?!\w)(?: ± \d+\.\d+)?(?: \(-?\d+\.\d+ to -?\d+\.\d+\))?")
NO_FIGURE = re.compile(r"https?://\S+|\]\([^)]*\)|\b\d{4}\.\d{5}\b|Python \S+")  # links, arXiv ids, a version
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)", PAGES[page], re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def linked(page, text):
    """The files of the repository that a text on a page links to."""
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    return [(page.parent / target).resolve() for target in targets if target and not target.startswith("https://")]


@EACH_PAGE
def test_links_lead_to_a_file_or_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


def test_commands_name_files_that_exist():
    assert any(c.startswith("pip install -r tests/requirements.txt") for c in COMMANDS)
    for command in COMMANDS:
        for name in re.findall(r"[\w/]+\.(?:py|txt)\b", command):
            assert (ROOT / name).is_file(), command
        for module in re.findall(r"-m ((?:experiments|tests)\.\w+)", command):
            assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), command


def test_files_of_the_tree_exist():
    tree = re.search(r"## The files.*?```\n(.*?)```", PAGES[ROOT / "README.md"], re.S)[1]
    for name in re.findall(r"^([\w./-]+)  ", tree, re.M):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("command", [c for c in COMMANDS if "train.py" in c and NAME not in c])
def test_commands_of_train_are_accepted(command):
    arguments = shlex.split(re.search(r"train\.py([^;&|]*)", command)[1].replace("$seed", "3"))
    if "--resume" in arguments:  # the flags are right, but there is no such run
        with pytest.raises(SystemExit, match="is not a run folder"):
            flags.parse(arguments, train.Settings(), MITIGATIONS, train.CHOICES, "")
    else:
        settings = flags.parse(arguments, train.Settings(), MITIGATIONS, train.CHOICES, "").settings
        train.check(replace(settings, device="cpu"))


@pytest.mark.parametrize("command", [c for c in COMMANDS if "-m experiments." in c and "experiments.score" not in c])
def test_flags_of_experiments_exist(command):
    """The source is enough: `--help` would import the experiment in a process of its own."""
    for module, arguments in re.findall(r"-m (experiments\.\w+)([^;&|]*)", command):
        source = (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        for flag in re.findall(r"--(\w+)", arguments):
            assert re.search(rf"--{flag}\b|^    {flag}: |\"{flag}\", ", source, re.M), command


@pytest.mark.parametrize("command", [c for c in COMMANDS if "experiments.score" in c and NAME not in c])
def test_commands_that_score_are_accepted(command):
    score.parse(shlex.split(command)[3:])


def test_every_column_is_explained():
    text = PAGES[ROOT / "docs" / "running.md"]
    table = re.search(r"\| column of metrics.csv.*?\n\n", text, re.S)[0]
    explained = re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.strip().splitlines()))
    assert set(explained) == set(run_folder.COLUMNS)
    logged = re.findall(r'"(\w+)": \(', inspect.getsource(grpo.log_columns))
    assert re.search(r"credit log has `([\w\s]+)`", text)[1].split() == logged


@EACH_PAGE
def test_tables_are_those_of_the_results(page):
    """Guards against a table that was edited by hand, or is older than the file it comes from, and a torn comment."""
    assert len(pages.BLOCK.findall(PAGES[page])) == PAGES[page].count("<!-- results/")
    assert pages.BLOCK.sub(pages.fill, PAGES[page]) == PAGES[page]


def test_a_block_is_filled_with_its_columns_and_rows(tmp_path, monkeypatch):
    """Guards against columns or rows under another name, and one that is missing without a word."""
    (tmp_path / "results").mkdir()
    rows = "| m | x | y |", "|---|--:|--:|", "| p | 1 | 2 |", "| q | 3 | 4 |"
    (tmp_path / "results" / "a.md").write_text("\n".join(["## T", "note", "", *rows, ""]))
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    filled = pages.BLOCK.sub(pages.fill, "<!-- results/a.md | T | m; y | q -->\nold\n<!-- end -->")
    assert [re.findall(r"\w+", line) for line in filled.splitlines()[2:-1]] == [["m", "y"], [], ["q", "4"]]
    by_two = pages.BLOCK.sub(pages.fill, "<!-- results/a.md | T | m; y | p, 1 -->\nold\n<!-- end -->")
    assert [re.findall(r"\w+", line) for line in by_two.splitlines()[2:-1]] == [["m", "y"], [], ["p", "2"]]
    for asked, name in (("T | m; z | q", "z"), ("T | m; y | r", "r"), ("T | m; y | p, 3", "p, 3"), ("U | m", "U")):
        with pytest.raises(ValueError, match=f"\\b{name}\\b"):
            pages.BLOCK.sub(pages.fill, f"<!-- results/a.md | {asked} -->\n<!-- end -->")


def test_the_page_of_methods_is_that_of_the_docstrings():
    written = PAGES[ROOT / "docs" / "methods.md"]
    made = pages.INTRODUCTION + "\n" + "\n".join(map(pages.describe, MITIGATIONS.values())) + pages.CLOSING
    assert written == made, "docs/methods.md is older than the docstrings: run python -m experiments.pages"


def quoted(page):
    """(figure, paragraph or bullet) for every figure in the prose of a page, and in tables written by hand."""
    text = pages.BLOCK.sub("", PAGES[page])
    text = re.sub(r"```.*?```|\$\$.*?\$\$|`[^`\n]*`|\$[^$\n]+\$", "", text, flags=re.S)
    text = text.replace("−", "-").replace("**", "")
    for block in re.split(r"\n\s*\n|\n(?=- |\d+\. |\|)", text):
        if "results/" in block or not block.startswith("|"):  # a table without a link states settings, not findings
            if page.name == "original.md" and block.startswith("|"):
                block = re.sub(r"^(\|[^|]*\|)[^|]*", r"\1", block)  # the second column is what others found
            for figure in FIGURE.findall(NO_FIGURE.sub("", block)):
                yield figure, block


@EACH_PAGE
def test_every_quoted_figure_is_in_a_file_linked_beside_it(page):
    """Guards against figures that are wrong, outdated or from nowhere: a link to a page counts with what it links."""
    for figure, block in quoted(page):
        files = linked(page, block)
        files += [file for other in files if other in PAGES for file in linked(other, PAGES[other])]
        texts = [file.read_text(encoding="utf-8") for file in files if file.suffix in (".md", ".csv", ".py")]
        assert any(figure in text for text in texts), f"{figure} in: {block.strip()[:200]}"


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


def test_the_function_shows_up_in_help(copy):
    formula = re.search('"""(.*)"""', IDEA)[1]
    assert f"  {NAME} --power 1.0\n      {formula}\n" in in_copy(copy, "train.py", "--help")


def test_the_function_is_scored(copy):
    command = next(c for c in COMMANDS if f"experiments.score --mitigation {NAME}" in c)
    text = in_copy(copy, *shlex.split(command)[1:])
    assert f"| {NAME} (yours) " in text
    assert (copy / "runs" / "truth" / f"score-{NAME}.png").is_file()


def test_the_function_trains_a_step(copy):
    command = next(c for c in COMMANDS if NAME in c and "--power" in c)
    tiny = "--questions 2 --answers 2 --max_new_tokens 8 --eval_problems 2 --steps 1".split()
    assert "step    1/1" in in_copy(copy, *shlex.split(command)[1:], *tiny, "--out", "runs/r")
    assert (copy / "runs" / "r" / "credit" / "step-000001.npz").is_file()


def test_the_tests_of_mitigations_stay_green(copy):
    in_copy(copy, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/test_mitigations.py", "-k",
            f"{NAME} or help or flag or registered or listed or plain")
