"""What the study trains: levels, parts, and the runs of each part.

Run it:  python -m lab.study.run --list
"""
from pathlib import Path

from methods import MITIGATIONS

VERSION = 3  # of a new row. Raise it when a change alters what runs give: no contrast spans two versions
COUNTED = (2, 3)  # a run with such a row is done. 1 lacks costs; since 3 all random numbers are others (`207fb98`)
RUNS = Path("runs/study-2")
HARD = RUNS / "hard.jsonl"
WORDS = " --task math --max_new_tokens 128"
THEIRS = " --data weights/countdown.jsonl"  # the puzzles of the original work: Countdown with 3 to 4 numbers
LOOK = " --questions 64 --answers 8 --steps 1 --lr 0 --eval_problems 8"  # at the gradient, before any training
LEVELS = {"easy": "", "hard": f" --data {HARD} --max_new_tokens 240", "small": " --model models/countdown-small",
          "latin": " --task latin", "math": " --task math",
          **{name: f"{task} --model weights/qwen --dtype bfloat16{more} --pass_at 0 --micro_batch 8"
             for name, task, more in (
                 ("words", WORDS, " --questions 8 --answers 8 --steps 40 --eval_problems 512 --eval_every 20"),
                 ("twenty", WORDS, " --questions 4 --answers 8 --steps 20 --eval_problems 512 --eval_every 0"),
                 ("laptop", WORDS, " --questions 4 --answers 8 --steps 40 --eval_problems 256 --eval_every 20"),
                 ("original", f"{THEIRS} --max_new_tokens 128",
                  " --questions 4 --answers 8 --steps 60 --eval_problems 256 --eval_every 30"),
                 ("first-words", WORDS, LOOK), ("first-countdown", f"{THEIRS} --max_new_tokens 512", LOOK))},
          "warm": " --model weights/warm --dtype bfloat16 --max_new_tokens 200 --steps 60 --eval_problems 256 "
                  "--eval_every 20 --pass_at 0",
          "first-smollm2": f" --model weights/smollm2 --dtype bfloat16 --max_new_tokens 200{LOOK} --pass_at 0"}
# Rows and designs of these are in lab/real.
PRETRAINED = ("words", "laptop", "twenty", "original", "warm", "first-smollm2", "first-words", "first-countdown")

APART = ("regrade_ablation",  # hardly more than `none`
         "shuffled", "expert_iteration", "oracle", "process_reward", "ppo_process", "share",
         "positives",  # compared by designs.md
         "curious")  # came later
METHODS = tuple(name for name in MITIGATIONS if name not in APART)
RLOO_FLAGS = "none --advantage rloo"  # is it only the division by the deviation of the rewards?
AHEAD = ("none", RLOO_FLAGS, "optimal_baseline", "ppo", "vineppo")  # ahead, or what these are compared with: ten seeds
RATIO_FLAGS = "entropy_ratio --advantage rloo"  # of the reweightings, the one that was furthest ahead of GRPO
# So near GRPO with five seeds that it took ten to tell.
CLOSE = ("entropy_ratio", "token_type", "entropy_weighted", "attention_credit", "outcome_conditional")
FORMS = ("none --advantage maxrl", "none --advantage step_mean", "none --reward random", "first_error --solver true",
         "vineppo --cuts uncertain", "ppo --gamma 0.99", *(f"token_type --filler {x}" for x in (0.0, 2.0)),
         *(f"{name} --advantage rloo" for name in ("entropy_masking", "entropy_weighted", "attention_credit")))
SWEEPS = (*(f"outcome_conditional --think_discount {x}" for x in (0.25, 0.75, 1.0)),  # beside the default of each
          *(f"inverse_logprob --epsilon {x}" for x in (0.01, 0.5)))
# RLOO and GRPO for about 15% more than the measured cost of `vineppo`, 4.9 times GRPO's on easy puzzles and 7.4
# times on hard ones, where its responses grow longer: by more steps or by more responses.
MORE = {"easy": ("--steps 560", "--answers 45"), "hard": ("--steps 800", "--answers 64")}
SIZED = ("none", RLOO_FLAGS, "ppo", "entropy_masking", "entropy_weighted")  # do gains of entropy grow with the model?
NEW = ("none", RLOO_FLAGS, "ppo", "vineppo", "token_type", "random")  # on other tasks
UPDATES = (*(f"{name} --updates_per_batch 4{clip}" for name in ("none", RLOO_FLAGS, "ppo", "entropy_masking")
             for clip in ("", " --clip_high 0.28")), "vineppo --updates_per_batch 4",
           f"{RLOO_FLAGS} --answers 45 --updates_per_batch 4",  # less noise, and no credit per token
           *(f"{name} --updates_per_batch 4 --lr 5e-05" for name in (RLOO_FLAGS, "ppo")))  # four steps of a quarter
# designs.md: each of these at several learning rates, then at its best one.
TUNED = (RLOO_FLAGS, RATIO_FLAGS, "shuffled --advantage rloo", "ppo", "vineppo", "expert_iteration")
RATES, SEEDS = (1.4e-4, 2e-4, 2.8e-4), range(20, 25)
BEST, OUTWARDS = 2.8e-4, 4e-4  # stage one's best rate, the same for all; as an edge, it called for the next one


# What the original work tried, as it did: the second one's weights are neither detached nor rescaled.
CONCLUSION = "outcome_conditional --think_discount 0.5"
THEIR_INVERSE = "inverse_logprob --epsilon 0.1 --detach false --normalize none"


def today(command: str) -> str:
    """A command without the flags that train.py no longer has, and that rows are still named after: one measured each
    step's length, the other is a credit function of lab/original."""
    undetached = "-m lab.original.undetached --mitigation inverse_undetached --epsilon 0.1 --normalize none"
    return command.replace(" --step_length true", "").replace(f"train.py --mitigation {THEIR_INVERSE}", undetached)


def at(rate: float, *listed: str) -> tuple[str, ...]:
    """The flags of runs at a learning rate. (The last flag is part of their names alone: see run.py.)"""
    return tuple(f"{flags} --lr {rate:.3g} --step_length true" for flags in listed)


PARTS = {  # level, methods with their flags, seeds
    "main": [("easy", (*METHODS, RLOO_FLAGS), range(5)), ("easy", AHEAD + CLOSE, range(5, 10)),
             ("hard", AHEAD, range(5)), ("hard", AHEAD[:-1], range(5, 10)), ("small", SIZED, range(5)),
             ("small", ("vineppo",), range(3)), ("latin", NEW, range(5)), ("math", NEW, range(5)),
             *((level, ("tempo",), range(5)) for level in ("latin", "math"))],  # the closest to the truth of latin
    "budget": [("easy", tuple(f"{RLOO_FLAGS} {more}" for more in MORE["easy"]), range(10)),
               ("easy", tuple(f"none {more}" for more in MORE["easy"]), range(5)),
               ("hard", tuple(f"{RLOO_FLAGS} {more}" for more in MORE["hard"]), range(3)),
               ("easy", (f"{RLOO_FLAGS} --answers 115",), range(3)),  # as many sampled tokens as vineppo
               *((level, (f"{RLOO_FLAGS} --answers 24",), range(5)) for level in ("latin", "math"))],
    "forms": [("easy", FORMS, range(5)), ("easy", (RATIO_FLAGS,), range(10)), ("hard", (RATIO_FLAGS,), range(10)),
              *((level, (RATIO_FLAGS,), range(5)) for level in ("small", "latin", "math"))],
    "sweeps": [("easy", SWEEPS, range(3))],
    "updates": [("easy", UPDATES, range(3))],
    "rates": [("easy", tuple(f"{name} --lr 0.0004" for name in (RLOO_FLAGS, "ppo")), range(3))],  # is it the step size?
    "breaks": [("hard", ("value_change",), range(5)), ("hard", ("token_type",), range(3))],  # collapse.md
    "trial": [("hard", ("entropy_ratio", "tempo", "first_error", "learned_importance", *FORMS[:6]), range(1))],
    "process": [("easy", (*(f"process_reward --process {x} --advantage rloo" for x in (0.1, 0.5)),
                          *(f"ppo_process --process {x}" for x in (0.1, 0.5)),
                          "reward_decomposition --stepwise true --advantage rloo",
                          "regrade_ablation --tokens true --advantage rloo"), range(5))],
    "tune": [("easy", tuple(flags for name in TUNED for rate in RATES for flags in at(rate, name)), SEEDS)],
    "edge": [("easy", at(OUTWARDS, *TUNED), SEEDS)],
    "test": [("easy", tuple(f"{flags} --eval_every 10" for flags in at(BEST, *some)), seeds) for some, seeds in (
        ([flags for flags in TUNED if flags != "vineppo"], range(30, 50)), (["vineppo"], range(30, 40)))],
    "oracle": [("small", at(BEST, RLOO_FLAGS, "ppo", "vineppo", "oracle --k 4", "oracle --k 16",
                            f"{RLOO_FLAGS} --answers 45"), range(5)),
               ("small", at(BEST, "shuffled --of oracle"), range(1))],
    "many": [("easy", at(BEST, f"{RLOO_FLAGS} --answers 45"), range(3))],
    "successes": [("easy", at(BEST, RLOO_FLAGS, "expert_iteration --steps 170"), range(60, 65)),
                  *((level, ("expert_iteration",), range(5)) for level in ("hard", "small", "latin", "math"))],
    "faster": [*((level, at(rate, RLOO_FLAGS, "expert_iteration"), range(3)) for level in ("latin", "math")
                 for rate in (BEST, OUTWARDS, 2 * BEST)),
               ("math", at(2 * OUTWARDS, RLOO_FLAGS, "expert_iteration"), range(3))],
    "noise": [("small", at(BEST, f"{RLOO_FLAGS} --answers 16", f"{RLOO_FLAGS} --questions 68",
                           f"{RLOO_FLAGS} --answers 90", f"{RLOO_FLAGS} --answers 180",
                           *(f"oracle --k 4 --mix {x}" for x in (0.25, 0.5, 1.0))), range(5))],
    "negatives": [("easy", tuple(f"{flags} --steps 300" for flags in at(
        BEST, RLOO_FLAGS, "expert_iteration", "share --advantage rloo", "positives --advantage rloo")), range(70, 82))],
    "first": [(level, (RLOO_FLAGS,), (0,)) for level in ("first-words", "first-countdown")],
    "words": [("words", tuple(f"{flags} --lr {rate}" for rate in (2e-6, 5e-6) for flags in (
        RLOO_FLAGS, "expert_iteration", "share --advantage rloo")), range(5))],
    "laptop": [("laptop", (f"{RLOO_FLAGS} --lr 5e-06", "expert_iteration --lr 5e-06",
                           "share --advantage rloo --lr 5e-06"), range(5))],
    "original": [("original", ("none --lr 5e-06",), (0,))],
    "mitigations": [("twenty", tuple(f"{flags} --lr 5e-06" for flags in listed), seeds) for listed, seeds in (
        (("none", THEIR_INVERSE, CONCLUSION), range(3)), ((RLOO_FLAGS,), range(3)),
        ((RLOO_FLAGS, "none", CONCLUSION), (3, 4)),
        (("inverse_logprob",), range(3)),
        (("entropy_weighted", "attention_credit", "outcome_conditional --think_discount 0.75"), range(3)))],
    "rank": [("twenty", (f"{RLOO_FLAGS} --lora_rank 8 --lr {rate}",), range(3))
             for rate in (5e-5, 1.5e-5, 1.5e-4, 5e-4)],
    "warm": [("warm", (f"{RLOO_FLAGS} --lr 2e-05",), (0,)), ("first-smollm2", (RLOO_FLAGS,), (0,))],
    "lambda": [("easy", ("ppo", "ppo --gae_lambda 1"), range(80, 90))],
    # To check what was written before they ran.
    "fresh": [("easy", (RLOO_FLAGS, "ppo", "vineppo", RATIO_FLAGS), range(10, 15))],
}
