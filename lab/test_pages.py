"""What the pages say of the laboratory holds: commands, blocks of tables, every quoted figure; and findings/."""
import os
import re
import shlex

import pytest

from lab import arms, pages, redo
from lab.truth import score
from plumbing.files import read_json
from settings import Settings
from start import parse_flags
from tests.test_pages import COMMANDS, EACH_PAGE, NAME, PAGES, ROOT, source_of

FIGURE = re.compile(r"(?<![\w.])-?\d+\.\d+(?!\w)(?: ± \d+\.\d+)?(?: \(-?\d+\.\d+ to -?\d+\.\d+\))?")
NO_FIGURE = re.compile(r"https?://\S+|\]\([^)]*\)|\b\d{4}\.\d{5}\b|Python \S+")  # links, arXiv ids, a version
# Functions that the pages have a reader write.
WRITTEN = {name for text in PAGES.values() for name in re.findall(r"^def (\w+)\(batch", text, re.M)}


def linked(page, text):
    """The files of the repository that a text on a page links to."""
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    return [(page.parent / target).resolve() for target in targets if target and not target.startswith("https://")]


@pytest.mark.parametrize("command", [
    c for c in COMMANDS if "-m lab." in c and "lab.truth.score" not in c and NAME not in c])
def test_flags_of_the_laboratory_exist(command):
    """The source is enough: `--help` would import the experiment in a process of its own."""
    for module, arguments in re.findall(r"-m (lab\.[\w.]+)([^;&|]*)", command):
        source = re.sub(r'^""".*?"""', "", source_of(module).read_text(encoding="utf-8"), count=1, flags=re.S)
        for flag in re.findall(r"--(\w+)", arguments):
            assert re.search(rf"--{flag}\b|^    {flag}: |\"{flag}\", ", source, re.M), command


@pytest.mark.parametrize("command", [
    c for c in COMMANDS if re.search(r"score|lab.screen \w", c) and not WRITTEN & {*c.split()}])
def test_commands_with_flags_of_a_function_are_accepted(command):
    words = shlex.split(command.partition(" --minutes ")[0])[3:]  # the last flag, where it is one
    score.parse(words) if "score" in command else parse_flags(["--mitigation", *words])


def test_a_block_is_filled_with_its_columns_and_rows(tmp_path, monkeypatch):
    """Guards against columns or rows under another name, and one that is missing without a word."""
    (tmp_path / "lab").mkdir()
    rows = "| m | x | y |", "|---|--:|--:|", "| p | 1 | 2 |", "| q | 3 | 4 |"
    (tmp_path / "lab" / "a.md").write_text("\n".join(["## T", "note", "", *rows, ""]))
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    filled = pages.BLOCK.sub(pages.fill, "<!-- lab/a.md | T | m; y | q -->\nold\n<!-- end -->")
    assert [re.findall(r"\w+", line) for line in filled.splitlines()[2:-1]] == [["m", "y"], [], ["q", "4"]]
    by_two = pages.BLOCK.sub(pages.fill, "<!-- lab/a.md | T | m; y | p, 1 -->\nold\n<!-- end -->")
    assert [re.findall(r"\w+", line) for line in by_two.splitlines()[2:-1]] == [["m", "y"], [], ["p", "2"]]
    for asked, name in (("T | m; z | q", "z"), ("T | m; y | r", "r"), ("T | m; y | p, 3", "p, 3"), ("U | m", "U")):
        with pytest.raises(ValueError, match=f"\\b{name}\\b"):
            pages.BLOCK.sub(pages.fill, f"<!-- lab/a.md | {asked} -->\n<!-- end -->")


def test_lines_are_counted_where_they_are_a_tenth_off(tmp_path, monkeypatch):
    """By hand: a file that is off, one that is not, a folder without the file that has a row of its own, and no count."""
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "d").mkdir()
    for name, lines in (("a.py", 20), ("b.py", 31), ("d/c.py", 1234), ("d/e.py", 50)):
        (tmp_path / name).write_text("x\n" * lines)
    rows = "|[a.py](a.py)|90|a|", "|[b.py](b.py)|29|b|", "|[d/](d)|9|c|", "|[d/e.py](d/e.py)|50|e|", "|[f](f)| |x|"
    page = "\n".join(["# T", "", "|file|lines| |", "|---|--:|---|", *rows, "", "|a|9|", ""])
    assert pages.counted(page) == page.replace("|90|", "|20|").replace("|9|c", "|1,200|c")


@pytest.mark.parametrize("script", sorted((ROOT / "findings").glob("*.sh")), ids=lambda path: path.name)
def test_a_finding_stands_alone(script):
    """Guards against a script that nobody can run, or that shows our own faults."""
    text = script.read_text(encoding="utf-8")
    assert os.access(script, os.X_OK)
    found = pages.FINDING.match(text)
    named = found["packages"].replace("\n# ", " ").replace(" ", "==").replace(",==", " ")
    assert f"pip install -q {named}\n" in text
    assert len(found["short"].replace("\n# ", " ").split()) <= 25, "what is in short has at most 25 words"
    assert not {path.stem for path in ROOT.iterdir()} & set(re.findall(r"(?:import|from) (\w+)", text))


def quoted(page):
    """(figure, paragraph or bullet) for every figure in the prose of a page, and in tables written by hand."""
    text = pages.BLOCK.sub("", PAGES[page])
    text = re.sub(r"```.*?```|\$\$.*?\$\$|`[^`\n]*`|\$[^$\n]+\$", "", text, flags=re.S)
    text = text.replace("−", "-").replace("**", "")
    for block in re.split(r"\n\s*\n|\n(?=- |\d+\. |\|)", text):
        if linked(page, block) or not block.startswith("|"):  # a table without a link states settings, not findings
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


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "lab" / "README.md"], ids=["README", "lab/README"])
def test_a_figure_of_the_first_pages_has_rows_or_a_command(page):
    """Guards against a table that nobody can make again: it is frozen, or it names its program."""
    frozen = {ROOT / row["file"] for rows in redo.rooms().values() for row in rows}
    for figure, block in quoted(page):
        files = linked(page, block)
        files += [file for other in files if other in PAGES for file in linked(other, PAGES[other])]
        texts = {file: file.read_text(encoding="utf-8") for file in files
                 if ROOT / "lab" in file.parents and file.suffix in (".md", ".csv")}
        assert not texts or any(
            file in frozen or file.suffix == ".csv" or re.search(r"python (-m|\w+\.py)|\.py`? of commit", text)
            for file, text in texts.items() if figure in text and file.name != "README.md"), f"{figure} in: {block}"


def test_stored_runs_say_what_they_were_trained_with():
    """Guards against rows that stop being comparable in silence: each setting that can change a result is beside them."""
    for file in (ROOT / "lab").rglob("runs.csv"):
        assert read_json(file.with_name("settings.json")).keys() == vars(Settings()).keys() - arms.NEUTRAL, file
