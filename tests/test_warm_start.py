"""The demonstrations of the warm start, and the bundled model that it made.

Run it:  python -m pytest tests/test_warm_start.py
"""

import re

import numpy as np
import pytest
import torch

import train
from countdown_task import END_THINK, Puzzle, evaluate, find_calculations, generate_puzzles, reward, split, universe
from experiments import warm_start
from qwen2_model import load_model


@pytest.fixture(scope="module")
def demonstrations():
    """Two for each of 200 puzzles: one with random attempts only, one with known solutions among them."""
    rng, puzzles = np.random.default_rng(0), generate_puzzles(200, "train")
    return [(p, warm_start.demonstration(rng, p, known)) for p in puzzles for known in (0.0, 0.5)]


def test_every_step_is_true_and_uses_the_numbers_at_hand(demonstrations):
    """Guards against teaching wrong arithmetic, or numbers from nowhere."""
    for puzzle, text in demonstrations:
        for attempt in re.split(r"That is not \d+\.|That works!", text.split(END_THINK)[0])[:-1]:
            pool, steps = list(puzzle.numbers), find_calculations(attempt)
            assert len(steps) == 2
            for step in steps:
                a, operator, b, result = (attempt[start:stop] for start, stop in step)
                assert evaluate(a + operator + b) == int(result)
                pool.remove(int(a))
                pool.remove(int(b))
                pool.append(int(result))


def test_the_reward_agrees_with_the_last_verdict(demonstrations):
    """Guards against a successful search with a wrong answer, and a layout that the reward does not know."""
    grades = [(reward(text, *puzzle), "That works!" in text) for puzzle, text in demonstrations]
    assert all(grade["format"] == 1 and grade["answer"] == claimed for grade, claimed in grades)
    assert 40 < sum(claimed for _, claimed in grades) < 360
    assert max(text.count("That") for _, text in demonstrations) == warm_start.ATTEMPTS


def test_batches_hold_only_training_puzzles_and_mark_the_response(codec):
    """Guards against held-out puzzles in the warm start, and a loss on the prompt."""
    puzzles = [p for p in universe() if split(p) == "train"][:300]
    for tokens, mask in warm_start.batches(codec, puzzles, 3, 0):
        assert tokens.shape == mask.shape and len(tokens) == warm_start.BATCH
        for row, chosen in zip(tokens, mask):
            prompt, response = row[: chosen.nonzero()[0, 0]].tolist(), row[chosen].tolist()
            text = codec.tokenizer.decode(prompt)
            numbers, target = re.search(r"\[(.*)\], create an equation that equals (\d+)", text).groups()
            puzzle = Puzzle(tuple(map(int, numbers.split(", "))), int(target))
            assert Puzzle(tuple(sorted(puzzle.numbers)), puzzle.target) in puzzles
            assert prompt == codec.prompt(puzzle) and response[-1] == codec.end_tokens[0]
            assert reward(codec.decode(response)[0], *puzzle)["format"] == 1


def test_each_number_and_tag_is_one_token(codec):
    """Guards against a tokenizer that splits numbers: a model of this size learns arithmetic far more slowly then."""
    spaced = [f" {n}" for n in range(warm_start.LARGEST_TOKEN + 1)]
    for text in spaced + [str(n) for n in range(21)] + ["</think>", "<answer>"]:
        assert len(codec.tokenizer.encode(text).ids) == 1, text


def test_imitation_learns_the_responses_and_not_the_prompts(codec):
    """Guards against a loss on the wrong column or token: a model trained on one batch predicts its responses."""
    torch.manual_seed(0)
    model = warm_start.new_model(codec.size)
    tokens, mask = (x[:2] for x in next(warm_start.batches(codec, generate_puzzles(50, "train"), 1, 0)))
    warm_start.imitate(model, iter([(tokens, mask)] * 40), 40)
    right = model(tokens[:, :-1]).argmax(-1) == tokens[:, 1:]  # (2, S - 1)
    response, padding = mask[:, 1:], tokens[:, 1:] == 0  # (2, S - 1)
    assert right[response].float().mean() > 0.95
    assert right[~response & ~padding].float().mean() < 0.2


def test_reinforcement_can_teach_the_bundled_model(codec):
    """Guards against a model that solves too few puzzles to get a reward or too many to improve, and one over 4 MB."""
    assert sum(file.stat().st_size for file in train.BUNDLED.iterdir()) < 4e6
    model = load_model(train.BUNDLED)
    model.real_vocab = codec.size
    policy = train.Policy(model, codec, critic=None, reference=None)
    success = train.evaluate(policy, generate_puzzles(256, "heldout"), 1, train.Settings())
    assert 0.25 < success.mean() < 0.5
