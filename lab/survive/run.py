"""Does a lead survive an annealed rate? Trains what small/runs.csv lacks, by the design of lab/archive/survive-designs.md.

    python -m lab.survive.run --processes 2

Stage one tries rates, each arm's own, and stage two trains fresh seeds at the best one. Each part resumes.
"""
import json
from pathlib import Path

import numpy as np

from countdown_task import Puzzle, load
from lab.arms import Room, train
from plumbing.files import replace_file
from plumbing.flags import new_parser
from plumbing.terminal import one_sentence
from settings import Settings

SMALL = Path(__file__).parent / "small"
PUZZLES = Path("runs", "small", "puzzles.jsonl")  # those of stage two
ANNEALED = "--linear_decay true --eval_every 0 --pass_at 0"
LADDER = (1.4e-4, 2e-4, 2.8e-4, 4e-4, 5.6e-4, 8e-4, 1.1e-3)  # rates; the middle three are always tried
CHEAP = {"RLOO": "none --advantage rloo", "GRPO": "none", "ppo": "ppo",
         "entropy_ratio": "entropy_ratio --advantage rloo", "expert_iteration": "expert_iteration"}
DEAR = {"vineppo": "vineppo"}


def ends(arm: str, rate: float) -> list[float]:
    """The ends of an arm's runs of stage one at a rate."""
    rows = Room(SMALL, "", (), {}).rows().values()
    return [float(row["end"]) for row in rows if row["arm"] == f"{arm}, {rate:g}"]


def best(arm: str, tried: list[int]) -> int:
    """The place on the ladder of the rate with the largest mean end, among those tried that have runs."""
    return max((i for i in tried if ends(arm, LADDER[i])), key=lambda i: np.mean(ends(arm, LADDER[i])), default=3)


def tried(arm: str, seeds: range) -> list[int]:
    """The places on the ladder that an arm needs: the middle three, and outwards while the best is at an edge."""
    places = [2, 3, 4]
    while all(len(ends(arm, LADDER[i])) == len(seeds) for i in places):
        i = best(arm, places)
        further = i - 1 if i == places[0] else i + 1 if i == places[-1] else i
        if further in places or not 0 <= further < len(LADDER):
            break
        places = sorted([*places, further])
    return places


def choosing(arms: dict[str, str], seeds: range) -> Room:
    """Stage one: the runs that choose these arms' rates, as far as it is known which are needed."""
    return Room(SMALL, ANNEALED, seeds, {f"{arm}, {LADDER[i]:g}": f"{flags} --lr {LADDER[i]:g}"
                                         for arm, flags in arms.items() for i in tried(arm, seeds)})


def judging(arms: dict[str, str], chose: range, seeds: range) -> Room:
    """Stage two: fresh seeds of these arms, each at the rate that its runs of the seeds `chose` favour."""
    return Room(SMALL, f"{ANNEALED} --eval_data {PUZZLES} --eval_problems 2048", seeds, {
        arm: f"{flags} --lr {LADDER[best(arm, tried(arm, chose))]:g}" for arm, flags in arms.items()})


def write_puzzles() -> None:
    """The 2,048 puzzles of stage two: held-out ones that chose no rate, then ones of new numbers."""
    chose = {puzzle.id for puzzle in load("heldout", Settings.eval_problems)}
    others = [puzzle for puzzle in load("heldout", 1400) if puzzle.id not in chose]
    found: list[Puzzle] = [*others, *load("new_numbers", 2048 - len(others))]
    PUZZLES.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"nums": list(puzzle.numbers), "target": puzzle.target}) for puzzle in found]
    replace_file(PUZZLES, lambda part: part.write_text("\n".join(lines) + "\n"))


@one_sentence("stopped; the same command resumes from here")
def main() -> None:
    """Train both stages, the cheap arms first."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time (default 1)")
    processes = parser.parse_args().processes
    if not PUZZLES.is_file():
        write_puzzles()
    for arms, chose, seeds in ((CHEAP, range(3), range(100, 124)), (DEAR, range(2), range(100, 114))):
        room = None
        while room != (room := choosing(arms, chose)):  # a best rate at an edge asks for more
            train(room, processes)
        train(judging(arms, chose, seeds), processes)


if __name__ == "__main__":
    main()
