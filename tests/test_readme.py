"""What the README says about the repository is true: commands, files, line counts, columns, equations' functions.

Run it:  python -m pytest tests/test_readme.py
"""

import dataclasses
import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest
import torch

import mitigations
import train
from analyze import SCORES
from conftest import make_batch

ROOT = Path(train.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()]


@pytest.mark.parametrize("command", [c for c in COMMANDS if "train.py" in c])
def test_train_commands_are_accepted(command):
    """Guards against a command that the argument parser rejects."""
    arguments = shlex.split(re.search(r"train\.py([^;&|]*)", command)[1].replace("$seed", "3"))
    if "--resume" in arguments:  # accepted, but for the run that is not there
        with pytest.raises(SystemExit, match=f"^error: {arguments[1]} is no run folder"):
            train.parse(arguments)
        return
    settings = train.parse(arguments)[0]
    train.check(dataclasses.replace(settings, device="cpu"))


def test_every_command_names_files_that_exist():
    """Guards against a command for a file that was renamed."""
    assert any("train.py" in c for c in COMMANDS) and any("pytest" in c for c in COMMANDS)
    for command in COMMANDS:
        for name in re.findall(r"[\w/]+\.(?:py|txt)\b", command):
            assert (ROOT / name).is_file(), command
        for module in re.findall(r"-m ((?:experiments|tests)\.\w+)", command):
            assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), command


def test_line_counts_are_true():
    """Guards against counts that the code outgrew."""
    counts = re.findall(r"^( *)(\w+\.py) +(\d+) ", README, re.M)
    assert len(counts) == 12
    for indent, name, count in counts:
        path = ROOT / "experiments" / name if indent else ROOT / name
        assert len(path.read_text(encoding="utf-8").splitlines()) == int(count), name


def test_every_metric_is_explained():
    """Guards against a column of metrics.csv, or of the credit log, that the reader has to guess."""
    documented = re.search(r"\| column of metrics.csv.*?\n\n", README, re.S)[0]
    explained = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in documented.strip().splitlines())))
    assert explained == set(train.COLUMNS)
    source = inspect.getsource(train.grpo.log_columns)
    logged = re.findall(r'"(\w+)": \(', source)
    assert re.search(r"one row a token: `([\w ]+)`", README)[1].split() == logged


def method_row(name):
    """A method's line in the README's table: its name, formula, reason and flags, from docstring and signature."""
    formula, why = (x.replace("|", "\\|") for x in mitigations.summary(name)[len("credit = ") : -1].split(": "))
    flags = " ".join(f"`--{key} {value}`" for key, value in mitigations.parameters(name).items())
    kind = "R" if mitigations.is_reweighting(name) else ""
    return f"| {' | '.join((f'`{name}`', kind, f'`{formula}`', why, flags))} |"


def test_every_method_is_listed():
    """Guards against a method, a formula or a default that the README does not know."""
    table = re.search(r"\| `--mitigation` \|.*?\n\n", README, re.S)[0].strip().splitlines()[2:]
    assert table == [method_row(name) for name in mitigations.MITIGATIONS]


def cells(line):
    """The cells of a line of a Markdown table."""
    return [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]


def table_rows(start, end):
    """The rows of all tables between two headings of the README; headers, which stand before a line, left out."""
    part = README[README.index(start) : README.index(end)]
    return [cells(line) for line in re.findall(r"^\|(?!--).*\n(?!\|--)", part, re.M)]


def study_tables(text):
    """The tables of a text: of each its rows by what they are of, in their first cell or two."""
    for header, rows in re.findall(r"^(\|.*)\n\|[-:|]+\n((?:\|.*\n)+)", text, re.M):
        columns, lines = cells(header), map(cells, rows.splitlines())
        names = 2 if columns[1] in ("figure", "methods", "on") else 1
        yield {tuple(line[:names]): dict(zip(columns, line)) for line in lines}


def test_the_tables_of_the_study_are_those_measured():
    """Guards against a figure that analyze.py did not make of results/runs.csv, and one in another column: each table
    of the section has all rows of a table of results/study.md, which test_analyze.py makes again, and some columns."""
    measured = list(study_tables((ROOT / "results" / "study.md").read_text(encoding="utf-8")))
    part = README[README.index("## Does better credit learn faster?") : README.index("## The files")]
    shown = list(study_tables(part.replace(", % |", " |")))
    assert len(shown) >= 3 and sum(map(len, shown)) > 40
    for rows in shown:
        assert any(
            rows.keys() == known.keys() and all(row.items() <= known[name].items() for name, row in rows.items())
            for known in measured
        ), rows


def test_the_figures_in_the_text_of_the_study_are_those_measured():
    """Guards against a sentence that a newer results/runs.csv has outdated: every interval, and every count of those
    that exclude 0, stands in a table of results/, with its sign."""
    part = README[README.index("## Does better credit learn faster?") : README.index("## The files")]
    text = " ".join(" ".join(line for line in part.splitlines() if not line.startswith("|")).split())
    measured = "\n".join((ROOT / "results" / name).read_text(encoding="utf-8") for name in ("study.md", *SCORES))
    number = r"-?\d+\.\d+"
    shown = re.findall(rf"{number} ± {number}|{number} \({number} to {number}\)|\d+ of \d+ for [^(]* \([^)]*\)", text)
    assert len(shown) > 20
    for figure in shown:
        assert re.search(rf"(?<![-.\d]){re.escape(figure)}(?!\d)", measured), figure


def test_the_answer_on_top_is_the_one_measured():
    """Guards against an answer that a newer results/runs.csv has outdated: the counts are those of the area."""
    said = re.search(
        r"Of (\d+) other ways.*?, (\d+) learn measurably more .*? and (\d+) learn less; the (\d+) are", README, re.S
    )
    measured = study_tables((ROOT / "results" / "study.md").read_text(encoding="utf-8"))
    area = [row["area - none"] for row in next(measured).values() if row["area - none"]]
    clear = [cell.startswith("-") for cell in area if cell.endswith("*")]
    assert list(map(int, said.groups())) == [len(area), clear.count(False), clear.count(True), clear.count(False)]


def test_the_tables_of_the_experiments_are_those_measured():
    """Guards against a figure that no command printed: each cell of a row is in the row of that name in results/."""
    measured = {}
    for file in SCORES:
        for line in (ROOT / "results" / file).read_text(encoding="utf-8").splitlines():
            if line.startswith("|"):
                measured.setdefault(cells(line)[0], set()).update(cells(line))
    rows = table_rows("## Which credit is right?", "## Does better credit learn faster?")
    assert len(rows) > 50
    for name, *figures in rows:
        assert name in measured and set(figures) - {""} <= measured[name], (name, figures)


def test_links_lead_somewhere():
    """Guards against a picture that is not in the repository, and a section that was renamed."""
    links = re.findall(r"\]\(([^)]+)\)", README)
    headings = re.findall(r"^## (.*)", README, re.M)
    sections = {"#" + re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert len(links) >= 2
    for link in links:
        assert link.startswith("http") or link in sections or (ROOT / link).is_file(), link


def test_the_example_of_a_new_method_works(monkeypatch, tmp_path):
    """Guards against an example that does not run: as published, it becomes a method with a flag and a help line."""
    code = re.search(r"```python\n(def early.*?)```", README, re.S)[1]
    (tmp_path / "idea.py").write_text("from mitigations import *\n" + code)
    monkeypatch.syspath_prepend(tmp_path)
    early = importlib.import_module("idea").early
    monkeypatch.setitem(mitigations.MITIGATIONS, "early", early)
    assert mitigations.parameters("early") == {"power": 0.5} and mitigations.is_reweighting("early")
    credit = early(make_batch([4], [2.0]), power=1.0)
    weights = torch.tensor([1, 1 / 2, 1 / 3, 1 / 4])
    torch.testing.assert_close(credit[0], 2.0 * weights / weights.mean())
