"""Fill the pages of docs/, lab/ and findings/: tables from the rooms, methods.md from the credit functions' docstrings,
the lists of findings/README.md from its scripts' first lines, and README's counts of lines that are a tenth off.

    python -m lab.NAME.run --tables       a room's tables, from its rows
    python -m lab.pages                   then the pages

A page says where a table comes from, with the columns and, if not all, the rows that it shows:

    <!-- lab/study/tables.md | Methods, easy | method; end; area | `ppo`; GRPO -->
    ...
    <!-- end -->

A row goes by its first cell, or by its first two with a comma: `ppo`, GRPO. Everything between the two lines is
replaced. Prose is never touched.
"""
import inspect
import re
from pathlib import Path

from lab.statistics import read_table
from methods.credit_function import CreditFunction
from methods.registry import CREDIT_FUNCTIONS
from plumbing.checks import required
from plumbing.files import require
from plumbing.flags import new_parser
from plumbing.terminal import one_sentence
from plumbing.report import Table

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"<!-- (lab/\S+\.md) \| ([^|>]+?) \| ([^|>]+?)(?: \| ([^>]+?))? -->\n"
                   r"(?:(?!<!-- lab/).)*?<!-- end -->", re.DOTALL)
ORIGINS = {r"\(ours()\)": "ours", r"Strategy( \d)": "the original's, strategy", r"original work()\)": "the original's",
           r"(\d{4}\.\d{5})": "published, "}  # by a mark in the docstring
FINDING = re.compile(r"#![^\n]+\n# in short \((?P<group>\w+)\): (?P<short>.+?)\n# guessed: .+?\n# seen: .+?\n"
                     r"# with: (?P<packages>.+?)\n(?!# )", re.DOTALL)
LIST = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def fill(match: re.Match) -> str:
    """A block of a page with its table made anew."""
    file, title, columns, wanted = match.groups()
    header, rows = read_table(ROOT / file, title)
    names, shown = columns.split("; "), wanted.split("; ") if wanted else [row[0] for row in rows]
    missing = set(names) - set(header) | set(shown) - {name for row in rows for name in names_of(row)}
    require(not missing, f"the table {title} of {file} has no {', '.join(sorted(missing))}")
    chosen = [[row[header.index(name)] for name in names] for row in rows if names_of(row) & set(shown)]
    table = str(Table("", "", names, chosen)).split("\n\n", 1)[1]
    return f"{match.group().splitlines()[0]}\n{table}<!-- end -->"


def names_of(row: list[str]) -> set[str]:
    """What a page may call a row: its first cell, or its first two."""
    return {row[0], ", ".join(row[:2])}


def overview(match: re.Match) -> str:
    """The table of all credit functions that opens docs/methods.md: whose each is, and what a run must provide."""
    lines = [f"<!-- {match[1]} -->", "| credit function | credit | whose | needs |", "|---|---|---|---|"]
    for name, method in CREDIT_FUNCTIONS.items():
        formula = method.summary.partition(": ")[0].removeprefix("credit = ").replace("|", "\\|")
        marks = ((words, re.search(mark, method.function.__doc__ or "")) for mark, words in ORIGINS.items())
        whose = next((words + mark[1] for words, mark in marks if mark), "not said")
        needs = ", ".join(f"`{need}`" for need in required(method, {}))
        lines.append(f"| [{name}](#{name}) | `{formula}` | {whose} | {needs} |")
    return "\n".join([*lines, "<!-- end -->"])


def describe(method: CreditFunction) -> str:
    """The section of docs/methods.md about one credit function."""
    kind = "A reweighting" if method.is_reweighting else "Credit of its own"
    flags = f" Flags: {', '.join(f'`--{name} {value}`' for name, value in method.parameters.items())}."
    document = inspect.getdoc(method.function) or ""
    body = re.sub(r"\blab/[\w/]+\.(?:md|py)", r"[\g<0>](../\g<0>)", "\n" + document.partition("\n\n")[2])
    formula, _, why = re.sub(r" \([a-z ]+\)\.$", ".", method.summary).partition(": ")
    return (f"## {method.name}\n\n`{formula}`\n\n{why[:1].upper()}{why[1:]} *{kind}.*"
            f"{flags * bool(method.parameters)}\n{body}\n".rstrip() + "\n")


def findings(page: str) -> str:
    """findings/README.md with the list of each of its groups made anew, from the first lines of its scripts."""
    lists = {group: "" for group in LIST.findall(page)}
    for script in sorted((ROOT / "findings").glob("*.sh")):
        found = FINDING.match(script.read_text(encoding="utf-8"))
        require(found and found["group"] in lists, f"{script} does not begin as the others do, with a group's name")
        package, short = found["packages"].split(",")[0], found["short"].replace("\n# ", " ")
        lists[found["group"]] += f"- [{script.stem}]({script.name}), {package}: {short}\n"
    return LIST.sub(lambda match: f"<!-- {match[1]} -->\n{lists[match[1]]}<!-- end -->", page)


def counted(page: str) -> str:
    """README with the number of lines of each row of its files, where that is more than a tenth off."""
    above, rows, below = re.split(r"(?<=\n\|---\|--:\|---\|\n)(.*?)(?=\n\n)", page, maxsplit=1, flags=re.S)
    single = {ROOT / name for name in re.findall(r"\[([\w./]+\.py)\]", rows)}

    def count(row: re.Match) -> str:
        names, said = re.findall(r"\[([\w./]+)\]", row[1]), int(row[2].replace(",", ""))
        files = [file for name in names
                 for file in ({*(ROOT / name).rglob("*.py")} - single if name.endswith("/") else [ROOT / name])]
        found = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        return row[0] if abs(found - said) <= 0.1 * found else f"{row[1]}{round(found, -1 if found < 1000 else -2):,}|"
    return above + re.sub(r"^(\|.*?\|)([\d,]+)\|", count, rows, flags=re.M) + below


@one_sentence()
def main() -> None:
    """Fill the tables of all pages, and write methods.md."""
    new_parser(description=__doc__).parse_args()
    pages = {}
    for page in [*(ROOT / "docs").glob("*.md"), *(ROOT / "lab").rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        if len(BLOCK.findall(text)) != text.count("<!-- lab/"):
            raise ValueError(f"{page} has a block without `<!-- end -->`, or whose first line is not as it should be")
        pages[page] = BLOCK.sub(fill, text)
    index = ROOT / "docs" / "methods.md"
    before, _, rest = pages[index].partition("## none\n")
    _, closing, after = rest.partition("\n## What does not fit\n")
    pages[index] = LIST.sub(overview, before) + "\n".join(map(describe, CREDIT_FUNCTIONS.values())) + closing + after
    index = ROOT / "findings" / "README.md"
    pages[index] = findings(index.read_text(encoding="utf-8"))
    index = ROOT / "README.md"
    pages[index] = counted(index.read_text(encoding="utf-8"))
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
    print(f"filled {len(pages)} pages of docs/, lab/ and findings/")


if __name__ == "__main__":
    main()
