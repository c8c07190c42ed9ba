"""The demonstrations of the warm start, and the bundled model that it made.

Run it:  python -m pytest tests/test_warm_start.py
"""

import re

import numpy as np
import pytest
from safetensors import safe_open

import grpo
from countdown_task import END_THINK, Problem, evaluate, find_steps, generate_problems, reward, split, universe
from experiments import warm_start
from qwen2_model import load_model
from train import BUNDLED, Settings

PROBLEMS = generate_problems(200, "train")


@pytest.fixture(scope="module")
def demonstrations():
    """Two for each of 200 puzzles, some of whose attempts are known solutions."""
    rng = np.random.default_rng(0)
    return [(p, warm_start.demonstration(rng, p, known)) for p in PROBLEMS for known in (0.0, 0.5)]


def test_every_written_step_is_true_and_uses_what_is_there(demonstrations):
    """Guards against teaching wrong arithmetic, or numbers from nowhere."""
    for problem, text in demonstrations:
        for attempt in re.split(r"That is not \d+\.|That works!", text.split(END_THINK)[0])[:-1]:
            pool = list(problem.numbers)
            steps = find_steps(attempt)
            assert len(steps) == 2
            for step in steps:
                a, operator, b, result = (attempt[start:stop] for start, stop in step)
                assert evaluate(a + operator + b) == int(result)
                pool.remove(int(a))
                pool.remove(int(b))
                pool.append(int(result))


def test_a_demonstration_earns_what_its_last_verdict_says(demonstrations):
    """Guards against a right search with a wrong answer, and a layout that the reward does not know."""
    grades = [(reward(text, *problem), "That works!" in text) for problem, text in demonstrations]
    assert all(grade["format"] == 1 and grade["answer"] == claimed for grade, claimed in grades)
    assert 40 < sum(claimed for _, claimed in grades) < 360  # there are both kinds
    assert max(text.count("That") for _, text in demonstrations) == warm_start.ATTEMPTS


def test_batches_hold_only_training_puzzles_and_mark_the_response(codec):
    """Guards against held-out puzzles in the warm start, and a loss on the prompt."""
    problems = [p for p in universe() if split(p) == "train"][:300]
    for tokens, mask in warm_start.batches(codec, problems, 3, 0):
        assert tokens.shape == mask.shape and len(tokens) == warm_start.BATCH
        for row, chosen in zip(tokens, mask):
            prompt, response = row[: chosen.nonzero()[0, 0]].tolist(), row[chosen].tolist()
            text = codec.tokenizer.decode(prompt)
            numbers, target = re.search(r"\[(.*)\], create an equation that equals (\d+)", text).groups()
            problem = Problem(tuple(map(int, numbers.split(", "))), int(target))
            assert Problem(tuple(sorted(problem.numbers)), problem.target) in problems
            assert prompt == codec.prompt(problem) and response[-1] == codec.end_tokens[0]
            assert reward(codec.decode(response)[0], *problem)["format"] == 1


def test_a_number_is_one_token(codec):
    """Guards against a tokenizer that splits numbers, with which this size of model learns arithmetic far more slowly."""
    for text in (
        [f" {n}" for n in range(warm_start.LARGEST_TOKEN + 1)] + [str(n) for n in range(21)] + ["</think>", "<answer>"]
    ):
        assert len(codec.tokenizer.encode(text).ids) == 1, text


def test_the_bundled_model_is_at_its_operating_point(codec):
    """Guards against a model that reward can't teach: 25% to 50% of the held-out puzzles, at most 4 MB."""
    assert sum(f.stat().st_size for f in BUNDLED.iterdir()) < 4e6
    with safe_open(BUNDLED / "model.safetensors", framework="pt") as tensors:
        assert "model.embed_tokens.weight" in tensors.keys()
    model = load_model(BUNDLED)
    model.real_vocab = codec.size
    solved = grpo.evaluate(model, codec, generate_problems(512, "heldout"), 1, Settings().max_new_tokens, 128)
    assert 0.25 < solved.mean() < 0.5
