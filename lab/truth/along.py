"""Does credit stay close to the truth while the policy learns? Scores at several steps of one run.

    python train.py --mitigation none --checkpoint_every 50 --out runs/along
    python -m lab.truth.measure --questions 32 --rollouts 100 --out runs/truth-50 \\
        --model runs/along/checkpoints/step-000050
    python -m lab.truth.measure --questions 32 --rollouts 100 --out runs/truth-100 \\
        --model runs/along/checkpoints/step-000100
    python -m lab.truth.along --name none --at 0 models/countdown-tiny lab/truth/data \\
        --at 50 runs/along/checkpoints/step-000050 runs/truth-50 \\
        --at 100 runs/along/checkpoints/step-000100 runs/truth-100

Each --at names a step, the model at that step, and the folder that lab/truth/measure.py wrote for it. The scores
are those of lab/truth/scoring.py. Writes lab/truth/along-NAME.md. One run can't say what another would do.
"""
from pathlib import Path

import numpy as np

from lab.estimates import cell
from lab.truth.file import read_truth
from lab.truth.score import rebuild
from lab.truth.scoring import HALVES, Score, all_scores
from methods import MITIGATIONS
from plumbing.flags import new_parser
from plumbing.progress import one_sentence
from plumbing.report import Table
from train import Settings, load_policy

RESULTS = Path(__file__).parent
METHODS = ("none", "token_type", "vineppo", "ppo", "learned_importance", "random")
COLUMNS = {"cosine of update": "cosine", "rank in response": "within_spearman"}  # field of Score


def scores_at(truth: dict, model_folder: str) -> dict[str, Score]:
    """The scores of METHODS, and of one half of the rollouts against the other, at one step."""
    listed = np.isin(truth["methods"], METHODS)
    truth = truth | {"methods": truth["methods"][listed], "credits": truth["credits"][listed]}
    scores = all_scores(rebuild(truth, load_policy(Settings(model=model_folder))), truth)
    return {name: scores[name] for name in (*METHODS, HALVES)}


def table_along(name: str, found: dict[str, dict[str, Score]], column: str) -> Table:
    """One score of each method; found: the scores by step."""
    rows = [[method, *(cell(getattr(scores[method], COLUMNS[column])) for scores in found.values())]
            for method in (*METHODS, HALVES)]
    header = ["method", *(f"step {step}" for step in found)]
    return Table(f"{column}, run of {name}", "By step, with 95% intervals over puzzles. Half against half: A* from one "
                 "half of the rollouts against A* from the other.", header, rows)


@one_sentence()
def main() -> None:
    """Score every step, and write the tables."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--name", required=True, choices=list(MITIGATIONS), help="the method of the run")
    parser.add_argument("--at", nargs=3, action="append", required=True, metavar=("STEP", "MODEL", "TRUTH"))
    args = parser.parse_args()
    found = {}
    for step, model, folder in args.at:
        print(f"step {step}", flush=True)
        found[step] = scores_at(read_truth(Path(folder) / "ground_truth.npz"), model)
    text = "\n".join(str(table_along(args.name, found, column)) for column in COLUMNS)
    file = RESULTS / f"along-{args.name}.md"
    file.write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {file}")


if __name__ == "__main__":
    main()
