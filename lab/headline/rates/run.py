"""At which rate does each arm of the headline learn most? Stage one of lab/archive/headline-designs.md.

    python -m lab.headline.rates.run             trains what has no row in lab/headline/rates/runs.csv; resumes
    python -m lab.headline.rates.run --tables    only writes its tables.md
"""
from pathlib import Path

from lab.arms import Room, main

ARMS = {  # the method's flags and its rates, each sqrt(2) times the one before
    "RLOO": ("none --advantage rloo", ("1.4e-4", "2e-4", "2.8e-4", "4e-4")),
    "RLOO, 45 responses": ("none --advantage rloo --answers 45", ("2e-4", "2.8e-4", "4e-4", "5.6e-4")),
    "oracle, k=4": ("oracle --k 4", ("2e-4", "2.8e-4", "4e-4", "5.6e-4"))}

ROOM = Room(
    Path(__file__).parent,
    "--model models/countdown-small --eval_every 10 --pass_at 0", range(100, 103),
    {f"{arm}, {lr}": f"{flags} --lr {lr}" for arm, (flags, rates) in ARMS.items() for lr in rates}, least=3)

if __name__ == "__main__":
    main(ROOM, __doc__)
