"""Two files of problems for a pretrained model: Countdown with 3 to 4 numbers, and word problems by other people.

countdown.jsonl has some 4,000 puzzles of the range of Countdown-Tasks-3to4, half with three numbers and half with four.
gsm_symbolic.jsonl has 256 problems from the templates of GSM-Symbolic (2410.05229), as reasoning-gym 0.1.19 fills them
in; nobody trains on these.

Run it:  pip install reasoning-gym==0.1.19        for the second file only
         python -m lab.real.problems              writes both to weights/
"""
import json
from pathlib import Path

from countdown_task import generate_puzzles
from plumbing.flags import new_parser
from plumbing.progress import one_sentence

FOLDER = Path("weights")
COUNT, OTHERS = 4096, 256


def countdown() -> list[dict]:
    """Rows of puzzles, both lengths in turn; the numbers go from 1 to 99."""
    sizes = [[*generate_puzzles(COUNT * 9 // 20, "train", count=n, high=99),
              *generate_puzzles(COUNT // 20, "heldout", count=n, high=99)] for n in (3, 4)]
    return [{"nums": list(p.numbers), "target": p.target} for pair in zip(*sizes) for p in pair]


def gsm_symbolic() -> list[dict]:
    """Rows of word problems, each with the number that answers it."""
    try:
        import reasoning_gym  # only this needs it
    except ModuleNotFoundError:
        raise ValueError("for the second file run: pip install reasoning-gym==0.1.19") from None
    data = reasoning_gym.create_dataset("gsm_symbolic", seed=0, size=OTHERS)
    return [{"question": row["question"].rpartition(" Give the result")[0] or row["question"],
             "answer": row["answer"]} for row in data]


@one_sentence()
def main() -> None:
    """Write both files."""
    new_parser(description=__doc__).parse_args()
    FOLDER.mkdir(exist_ok=True)
    for make in (countdown, gsm_symbolic):
        file, rows = FOLDER / f"{make.__name__}.jsonl", make()
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        print(f"wrote {file}: {len(rows)} problems, such as {rows[0]}")


if __name__ == "__main__":
    main()
