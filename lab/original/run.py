"""The documents' strategies in forms that the study lacks: as written, not rescaled; the plain sum of attention; a
response's tokens averaged first. By the design of lab/archive/original-designs.md.

    python -m lab.original.run --processes 2        trains what runs.csv lacks, and writes tables.md
"""
from pathlib import Path

from lab.arms import Room, main

ROOM = Room(Path(__file__).parent, "--steps 100 --eval_every 10 --pass_at 0", range(5), {
    "GRPO": "none", "`--loss_norm sequence`": "none --loss_norm sequence", "attention sum": "attention_sum",
    "discount 0.75, unweighted": "outcome_conditional --think_discount 0.75 --normalize none",
    "discount 0.75": "outcome_conditional --think_discount 0.75"}, program="-m lab.original.attention_sum")

if __name__ == "__main__":
    main(ROOM, __doc__)
