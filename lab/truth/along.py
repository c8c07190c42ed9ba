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
are those of lab/truth/scoring.py, on all puzzles and on the first 12, as many as a training step has. Writes
lab/truth/along-NAME.md. One run can't say what another would do.
"""
from pathlib import Path

import numpy as np

from lab.estimates import cell
from lab.truth.file import read_truth
from lab.truth.score import READ, rebuild
from lab.truth.scoring import HALVES, Score, all_scores
from methods import MITIGATIONS
from plumbing.flags import new_parser
from plumbing.progress import one_sentence
from plumbing.report import Table
from train import Settings, load_policy

RESULTS = Path(__file__).parent
STEP_PUZZLES = 12  # of a training step
METHODS = ("none", "optimal_baseline", "token_type", "entropy_masking", "entropy_weighted", "vineppo", "ppo",
           "learned_importance", "inverse_logprob", "random")
COLUMNS = {"cosine of update": "cosine", "rank in response": "within_spearman"}  # field of Score


def first_puzzles(truth: dict, Q: int) -> dict:
    """The columns of a ground_truth.npz for its first Q puzzles."""
    N, keep = len(truth["group"]), truth["group"] < Q  # (N,)
    responses = truth["response"][keep].max() + 1
    found = {name: column[keep] for name, column in truth.items() if column.shape[:1] == (N,)}
    return truth | found | {"credits": truth["credits"][:, keep], "prompts": truth["prompts"][:responses]}


def scores_at(truth: dict, model_folder: str) -> dict[str, Score]:
    """The scores of METHODS, and of one half of the rollouts against the other, at one step."""
    names = truth["methods"].tolist()
    chosen = [name for name in METHODS if name in names]
    truth = truth | {"methods": np.array(chosen), "credits": truth["credits"][[names.index(name) for name in chosen]]}
    batch = rebuild(truth, load_policy(Settings(model=model_folder)))
    scores = all_scores(batch, truth)
    return {name: scores[name] for name in (*chosen, HALVES)}


def table_along(name: str, found: dict[tuple[int, int], dict[str, Score]], column: str) -> Table:
    """One score of each method; found: the scores by (puzzles, step)."""
    methods, cases = list(next(iter(found.values()))), sorted(found)
    rows = [[method, *(cell(getattr(found[case][method], COLUMNS[column])) for case in cases)] for method in methods]
    return Table(f"{column}, run of {name}", "By puzzles and step, with 95% intervals over puzzles. Half against half: "
                 "A* from one half of the rollouts against A* from the other.",
                 ["method", *(f"{Q} puzzles, step {step}" for Q, step in cases)], rows)


@one_sentence()
def main() -> None:
    """Score every step, and write the tables."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--name", required=True, choices=list(MITIGATIONS), help="the method of the run")
    parser.add_argument("--at", nargs=3, action="append", required=True, metavar=("STEP", "MODEL", "TRUTH"))
    args = parser.parse_args()
    found: dict[tuple[int, int], dict[str, Score]] = {}
    for step, model, folder in args.at:
        truth = read_truth(Path(folder) / "ground_truth.npz", READ)
        every = int(truth["group"].max()) + 1
        for Q in dict.fromkeys((min(STEP_PUZZLES, every), every)):
            print(f"step {step}, {Q} puzzles", flush=True)
            found[Q, int(step)] = scores_at(first_puzzles(truth, Q), model)
    text = "\n".join(str(table_along(args.name, found, column)) for column in COLUMNS)
    file = RESULTS / f"along-{args.name}.md"
    file.write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {file}")


if __name__ == "__main__":
    main()
