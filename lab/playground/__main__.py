"""Writes the playground: one HTML file in which a reader trains the small model by GRPO, without a network.

The JavaScript beside this file is the model, the task, GRPO and the page again, tested against the Python. The page
shows recorded responses with A* of each token; what is sampled in it is measured in it.

Run it:  python -m lab.playground                                      writes lab/playground/playground.html
         python -m lab.playground --truth runs/truth --model models/countdown-tiny --out page.html      your own truth
"""
import re
from pathlib import Path

from lab.playground.pack import pack, to_json
from lab.truth.score import read_truth, rebuild
from plumbing.files import replace_file
from plumbing.flags import new_parser
from plumbing.progress import one_sentence
from plumbing.report import MINUS, PALETTE, PLUS
from settings import Settings
from plumbing.launch import BUNDLED
from start import load_policy

HERE = Path(__file__).parent
ENGINE = ("model.js", "countdown.js", "grpo.js", "rule.js", "truth.js", "worker.js")  # joined, they run in the worker
PAGE = ("tokens.js", "guide.js", "page.js")
MODEL = BUNDLED.with_name("countdown-small")
TRUTH = HERE.parent / "truth" / "data-small"
RECORDED = ["vineppo", "ppo", "random"]  # methods whose credit the published page holds


def join(names: tuple[str, ...]) -> str:
    """JavaScript files as one script, which can't close the element that it is in."""
    scripts = [(HERE / name).read_text(encoding="utf-8").replace('"use strict";\n', "", i > 0)
               for i, name in enumerate(names)]
    return "\n".join(scripts).replace("</script", "<\\/script")


def build(model: Path, folder: Path) -> str:
    """The page, with the model, the puzzles, all scripts, and the truth of a folder: of one that is not the published
    one with the credit of every method."""
    truth, policy = read_truth(folder / "ground_truth.npz"), load_policy(Settings(model=str(model)))
    rebuild(truth, policy)  # ValueError where it is about another model
    recorded = RECORDED if folder == TRUTH else [name for name in truth["methods"].tolist() if name != "none"]
    data, about = map(to_json, pack(policy, truth, recorded))
    count = sum(p.numel() for p in policy.model.parameters())
    parts = {"DATA": data, "ABOUT": about, "ENGINE": join(ENGINE), "PAGE": join(PAGE), "COUNT": f"{count:,}",
             "PLUS": PLUS, "MINUS": MINUS, "CURVE": PALETTE[0]}
    template = (HERE / "page.html").read_text(encoding="utf-8")
    return re.sub(rf"\b({'|'.join(parts)})\b", lambda match: parts[match[1]], template)


@one_sentence()
def main() -> None:
    """Write the file."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--truth", type=Path, default=TRUTH, help="folder that lab.truth.measure wrote (default: ours)")
    parser.add_argument("--model", type=Path, default=MODEL, help="the model it is about")
    parser.add_argument("--out", type=Path, default=HERE / "playground.html", help="the file to write")
    args = parser.parse_args()
    page = build(args.model, args.truth)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(args.out, lambda part: part.write_text(page, encoding="utf-8"))
    print(f"wrote {args.out}, {len(page.encode()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
