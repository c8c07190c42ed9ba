"""Talk to a model: type a puzzle and read its answer, each token the darker the less sure the model was of it.

    python -m models.talk                                        the bundled model
    python -m models.talk --model runs/none-seed0/checkpoint     what a run ended with
    python -m models.talk --task math --model weights/qwen --adapter runs/words/checkpoint/adapter --lora_rank 8

Takes the flags of train.py. A puzzle is a line of the task's data file, such as {"nums": [3, 5, 7], "target": 22}; for
Countdown the numbers will do, the target last: 3 5 7 22. An empty line asks the next held-out puzzle, Ctrl-D ends.
"""
import re
import sys
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Iterator

import torch

from plumbing.launch import check_lengths, with_model
from plumbing.terminal import one_sentence, place
from plumbing.task_file import load_heldout
from rollout import Policy, draw_uniforms, respond
from sampler import Rules
from settings import Settings
from start import load_policy, parse_flags

# Up to this probability, this background: oranges of 256 colours, which every terminal knows.
SHADES = ((0.1, 208), (0.5, 215), (0.9, 223))
PLAIN = "\033[0m"


def shade(text: str, p: float) -> str:
    """A token's text on the background for its probability; black on orange, whatever the terminal's colours."""
    colour = next((colour for limit, colour in SHADES if p <= limit), None)
    return text if colour is None else f"\033[30;48;5;{colour}m{text}{PLAIN}"


def read_puzzle(task: ModuleType, line: str) -> Any:
    """The puzzle of a line that was typed; ValueError in one sentence where it is none."""
    numbers = re.findall(r"-?[\d.]+", re.sub(r"(?<=-)\s+", "", re.sub("[-=]>", " ", line)))
    if re.fullmatch(r"[\d.\s\[\],=>-]+", line) and len(numbers) > 1:  # Countdown's
        line = f'{{"nums": [{", ".join(numbers[:-1])}], "target": {numbers[-1]}}}'
    with TemporaryDirectory() as folder:
        file = Path(folder) / "typed.jsonl"
        file.write_text(line, encoding="utf-8")
        try:
            puzzle = task.load("all", 1, str(file))[0]
            task.check(puzzle)
        except ValueError as error:  # of a file, with what JSON's parser says
            said = str(error).rpartition("typed.jsonl, line 1: ")[2].removesuffix("; remove that row")
            raise ValueError(re.sub(r"but .*?: line \d+ column .*", "but that is no JSON", said)) from error
    return puzzle


def answer(policy: Policy, puzzle: Any, s: Settings, turn: int) -> str:
    """The model's response, shaded, and its grade. turn: the random numbers differ with it."""
    uniforms = draw_uniforms(s.seed, f"talk {turn}", 1, 1, s.max_new_tokens)  # (1, T)
    samples, (text,), (spans,), (grade,) = respond(policy, [puzzle], [policy.prompt(puzzle)], uniforms,
                                                   Rules(greedy=s.eval_greedy))
    shown, done = "", 0
    for (start, stop), p in zip(spans, samples.logprob[0, samples.mask[0]].exp().tolist()):
        shown += text[done:start] + shade(text[max(done, start) : stop], p)  # between tokens: what the task replied
        done = max(done, stop)
    return f"{shown}\n{'right' if grade['answer'] else 'wrong'}, reward {grade['reward']:g}"


def puzzles(policy: Policy, s: Settings) -> Iterator[Any]:
    """The puzzles that are typed, until the input ends."""
    heldout = iter(load_heldout(policy.task, s.eval_problems, s.data, s.eval_data))
    while True:
        try:
            line = input("puzzle> ").strip()
            puzzle = read_puzzle(policy.task, line) if line else next(heldout)
            check_lengths(policy, [puzzle], s)
            print(policy.task.show(puzzle))
            yield puzzle
        except ValueError as error:
            print(f"{error}{place(error)}")
        except (EOFError, StopIteration):
            return


@torch.no_grad()
def main() -> None:
    """Ask, answer, ask again."""
    with one_sentence("interrupted"):
        s = with_model(parse_flags(sys.argv[1:])[0])
        policy = load_policy(s)
        for turn, puzzle in zip(count(), puzzles(policy, s)):
            print(answer(policy, puzzle, s, turn), flush=True)


if __name__ == "__main__":
    main()
