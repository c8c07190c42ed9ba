"""Fill the pages of docs/, lab/ and findings/: tables from the rooms, methods.md from the credit functions' docstrings,
and the table of findings/README.md from its scripts' first lines.

    python -m lab.study.run --tables      tables and pictures of the study, from lab/study/runs.csv
    python -m lab.pages               then the pages

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

from lab.estimates import read_table
from methods import MITIGATIONS
from plumbing.flags import new_parser
from plumbing.progress import one_sentence
from plumbing.registry import CreditFunction, required
from plumbing.report import Table

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"<!-- (lab/\S+\.md) \| ([^|>]+?) \| ([^|>]+?)(?: \| ([^>]+?))? -->\n"
                   r"(?:(?!<!-- lab/).)*?<!-- end -->", re.DOTALL)
FINDING = re.compile(r"#![^\n]+\n# guessed: (.+?)\n# seen: (.+?)\n# with: (.+?)\n(?!# )", re.DOTALL)
INTRODUCTION = """# Methods

Every method is one function of [mitigations.py](../mitigations.py) or [methods/](../methods): response → credit per
token. This page is made of their docstrings and signatures by `python -m lab.pages`. In the formulas, A is the
response's advantage, L its length and r its reward; p is the token's probability, H the entropy of the distribution it
was sampled from and V the expected reward before it; z is a z-score. Numbers in brackets are arXiv ids.

A *reweighting* returns weights, whose formula is shown times A: they are rescaled to mean 1 in each response
(`--normalize`), and a response whose weights are all 0 gets plain GRPO. The others return the credit itself.

## Three to try first

Points of area above RLOO's, at equal cost on easy puzzles. `entropy_ratio --advantage rloo`: 2.5 ± 1.0, almost free.
`ppo`: 1.5 ± 1.1, for a small critic. `expert_iteration`: 3.8 ± 1.0, [at
first](../lab/study/elsewhere.md#right-answers-or-the-cheaper-step), by skipping wrong responses
([table](../lab/study/tables.md#tuned-then-tested)). More responses gain more: `--advantage rloo --answers 45`, in as
many steps, 6.6 ± 0.9, for 5.61 times the cost ([table](../lab/study/tables.md#leads-over-rloo)).

## Methods of papers that are flags here

| paper | command | what is missing |
|---|---|---|
| DAPO (2503.14476) | `python train.py --clip_high 0.28 --loss_norm token --skip_unfinished` \
| dynamic sampling, soft overlong punishment |
| Dr. GRPO (2503.20783) | `python train.py --advantage dr_grpo --loss_norm constant` | |
| RLOO (2402.14740) | `python train.py --advantage rloo` | its KL penalty inside the reward |
| GSPO (2507.18071) | `python train.py --loss gspo --loss_norm sequence --clip_low 3e-4 --clip_high 4e-4` | |
| CISPO (2506.13585) | `python train.py --loss cispo --clip_low 0.999` | |
| PPO (1707.06347) | `python train.py --mitigation ppo` | a critic of the model's size |
| VinePPO (2410.01679) | `python train.py --mitigation vineppo` | its nine continuations: add `--k 9` |

`--skip_unfinished` is DAPO's overlong filtering. GSPO in bfloat16 also needs `--old_logprob update`. Clips and
ratios act from the second update on a batch (`--updates_per_batch`). [Names in TRL and
verl](trl.md#names-in-verl-and-papers) stand beside ours.
"""
CLOSING = """
## What does not fit

A credit function sees a step once, before its updates, and returns one number for each token. These published ways to
assign credit need something else:

- FIPO (2603.19835) weighs tokens by how far the policy moves during the update, which is not known before it.
- GRPO-λ (2510.00194) puts eligibility traces inside the ratio of the loss.
- VIMPO (2606.20008) adds a second loss.
- RRPO (2605.25507) trains on other data.
- SDPO and RLSD (2601.20802, 2604.03128) put a hint into the prompt, and the bundled model has never seen one.
"""


def fill(match: re.Match) -> str:
    """A block of a page with its table made anew."""
    file, title, columns, wanted = match.groups()
    header, rows = read_table(ROOT / file, title)
    names, shown = columns.split("; "), wanted.split("; ") if wanted else [row[0] for row in rows]
    missing = set(names) - set(header) | set(shown) - {name for row in rows for name in names_of(row)}
    if missing:
        raise ValueError(f"the table {title} of {file} has no {', '.join(sorted(missing))}")
    chosen = [[row[header.index(name)] for name in names] for row in rows if names_of(row) & set(shown)]
    table = str(Table("", "", names, chosen)).split("\n\n", 1)[1]
    return f"{match.group().splitlines()[0]}\n{table}<!-- end -->"


def names_of(row: list[str]) -> set[str]:
    """What a page may call a row: its first cell, or its first two."""
    return {row[0], ", ".join(row[:2])}


def describe(method: CreditFunction) -> str:
    """The section of docs/methods.md about one credit function."""
    kind = "A reweighting" if method.is_reweighting else "Credit of its own"
    models = {"critic": "the critic", "process_critic": "the process critic", "importance": "the importance head",
              "reference": "the reference model"}
    named = [models.get(need, f"a task with `{need}`") for need in required(method.name, {})]
    needs = f", which needs {' and '.join(named)}" if named else ""
    flags = f" Flags: {', '.join(f'`--{name} {value}`' for name, value in method.parameters.items())}."
    _, _, body = (inspect.getdoc(method.function) or "").partition("\n")
    formula, _, why = method.summary.partition(": ")
    return (f"## {method.name}\n\n`{formula}`\n\n{why[:1].upper()}{why[1:]} *{kind}{needs}.*"
            f"{flags * bool(method.parameters)}\n{body}\n".rstrip() + "\n")


def findings() -> str:
    """The table of findings/README.md, from the first lines of its scripts."""
    lines = ["| script | package and version | guessed | seen |", "|---|---|---|---|"]
    for script in sorted((ROOT / "findings").glob("*.sh")):
        found = FINDING.match(script.read_text(encoding="utf-8"))
        if not found:
            raise ValueError(f"{script} does not begin with what was guessed, what is seen, and the versions")
        guessed, seen, packages = (text.replace("\n# ", " ") for text in found.groups())
        lines.append(f"| [{script.stem}]({script.name}) | {packages} | {guessed} | {seen} |")
    return "\n".join(lines) + "\n"


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
    methods = "\n".join(map(describe, MITIGATIONS.values()))
    pages[ROOT / "docs" / "methods.md"] = f"{INTRODUCTION}\n{methods}{CLOSING}"
    index = ROOT / "findings" / "README.md"
    pages[index] = index.read_text(encoding="utf-8").partition("| script |")[0] + findings()
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
    print(f"filled {len(pages)} pages of docs/, lab/ and findings/")


if __name__ == "__main__":
    main()
