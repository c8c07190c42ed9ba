"""models/: the demonstrations of the warm start, the bundled models that it made, and a talk with them."""
import builtins
import itertools
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import countdown_task
import start
import train
from countdown_task import Puzzle, demonstrate, generate_puzzles, grade, split
from models import talk, warm_start
from plumbing.launch import BUNDLED
from tasks import latin_task
from tasks.arithmetic import check_calculations, find_calculations
from tasks.searches import ATTEMPTS
from tests.plain import plain_logprobs


def test_demonstrations_calculate_rightly_and_end_with_the_answer_they_claim():
    """Guards against teaching wrong arithmetic, numbers from nowhere, or an answer that the verdict does not fit."""
    rng, claims, attempts = np.random.default_rng(0), [], []
    for puzzle, known in itertools.product(generate_puzzles(200, "train"), (0.0, 0.5)):
        text = demonstrate(puzzle, rng, known)
        *searched, rest = re.split(r"That is not \d+\.|That works!", text)
        for attempt in searched:
            assert check_calculations(attempt, find_calculations(attempt), puzzle.numbers) == [True, True]
        claims.append("That works!" in text)
        attempts.append(len(searched))
        assert rest.startswith("</think>")
        assert grade(text, puzzle) == {"format": 1, "answer": claims[-1]}
    assert 40 < sum(claims) < 360 and max(attempts) == ATTEMPTS
    for numbers, target, known in (((3, 3, 8, 8), 24, 1.0), ((0, 0, 5), 5, 0.0), ((250, 100, 3), 247, 0.0)):
        assert grade(demonstrate(Puzzle(numbers, target), rng, known), Puzzle(numbers, target))["format"] == 1


def test_batches_hold_only_training_puzzles_and_mark_the_response(tokenizer, policy):
    """Guards against held-out puzzles in the warm start, and a loss on the prompt."""
    puzzles = generate_puzzles(300, "train")
    for tokens, mask in warm_start.batches(policy, puzzles, 3, 0):
        assert tokens.shape == mask.shape and len(tokens) == warm_start.BATCH
        for row, chosen in zip(tokens, mask):
            prompt, response = row[: chosen.nonzero()[0, 0]].tolist(), row[chosen].tolist()
            *numbers, target = map(int, re.findall(r"\d+", tokenizer.library.decode(prompt)))
            puzzle = Puzzle(tuple(numbers), target)
            assert puzzle in puzzles
            assert prompt == policy.prompt(puzzle) and response[-1] == tokenizer.end_tokens[0]
            assert grade(tokenizer.decode(response)[0], puzzle)["format"] == 1


def test_sizes_are_about_four_times_apart(tokenizer):
    """By hand: an embedding, and of each layer q, k, v, o, gate, up, down, two norms and the biases; a last norm."""
    for name, D, M, layers, q, k in (("small", 64, 192, 3, 64, 32), ("tiny", 128, 384, 4, 128, 64),
                                     ("large", 256, 832, 4, 256, 128)):
        found = sum(p.numel() for p in warm_start.new_model(tokenizer.size, name).parameters())
        assert found == tokenizer.size * D + layers * (2 * D * q + 2 * D * k + 3 * D * M + 2 * D + q + 2 * k) + D
    assert 3.9 < found / 888_832 < 4.1


@pytest.mark.slow
def test_imitation_learns_the_responses_and_not_the_prompts(tokenizer, policy):
    """Guards against a loss on the wrong column or token: a model trained on one batch predicts its responses."""
    torch.manual_seed(0)
    model = warm_start.new_model(tokenizer.size, "small")
    tokens, mask = (x[:2] for x in next(warm_start.batches(policy, generate_puzzles(50, "train"), 1, 0)))
    warm_start.imitate(model, iter([(tokens, mask)] * 60), 60)
    right = model(tokens[:, :-1]).argmax(-1) == tokens[:, 1:]  # (2, S - 1)
    response, padding = mask[:, 1:], tokens[:, 1:] == 0  # (2, S - 1)
    assert right[response].float().mean() > 0.95
    assert right[~response & ~padding].float().mean() < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "small"])
def test_reinforcement_can_teach_the_bundled_models(name):
    """Guards against a model that solves too few puzzles to get a reward or too many to improve, and one over 4 MB."""
    folder = BUNDLED.with_name(f"countdown-{name}")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4e6
    policy = start.load_policy(train.Settings(model=str(folder)))
    success = train.evaluate(policy, generate_puzzles(256, "heldout"), 1, train.Settings())
    assert 0.25 < success.mean() < 0.5


@pytest.mark.slow
def test_a_model_is_built_and_reported_on(run_program, tmp_path, monkeypatch, capsys):
    """Guards against a tokenizer that splits numbers, a folder that train.py can't load, and shares of another part."""
    monkeypatch.setattr(warm_start, "report", lambda folder, task: None)
    run_program(warm_start, "--size", "small", "--steps", 1, "--puzzles", 3000, "--out", tmp_path / "m")
    monkeypatch.undo()
    policy = start.load_policy(train.Settings(model=str(tmp_path / "m")))
    said = GenerationConfig.from_pretrained(tmp_path / "m").eos_token_id
    assert {*map(policy.tokenizer.library.id_to_token, said)} == {"<|im_end|>", "<|endoftext|>"}
    single = [f" {n}" for n in range(201)] + [str(n) for n in range(21)] + ["</think>", "<answer>"]
    assert {len(policy.tokenizer.encode(text)) for text in single} == {1}
    capsys.readouterr()
    monkeypatch.setattr(warm_start, "respond", lambda policy, puzzles, *_: SimpleNamespace(
        samples=SimpleNamespace(mask=torch.ones(5, 3)),
        grades=[{"answer": float(split(p) == "heldout" and i < 2), "format": 0.5} for i, p in enumerate(puzzles)]))
    monkeypatch.setattr(warm_start, "evaluate", lambda policy, puzzles, k, s: np.eye(5, k))
    warm_start.report(tmp_path / "m", countdown_task, 5)
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[2].split()[0] for row in rows] == ["0.0%", "40.0%"]
    assert {(row[1], row[3].split()[0], row[4], row[5]) for row in rows} == {("5", "100.0%", "50.0%", "3.0")}


def test_a_task_that_cannot_be_graded_is_refused_before_training(tmp_path):
    """Guards against ten minutes of training before a mistake in the task is seen."""
    task = SimpleNamespace(**vars(countdown_task) | {"grade": lambda response, puzzle: {"answer": 1.0}})
    with pytest.raises(ValueError, match="the task's grade returns has no"):
        warm_start.build(tmp_path / "m", task, 10, 1, 0, "small")
    assert not (tmp_path / "m").exists()


def test_a_pretrained_model_is_tuned_until_it_solves_enough(policy, monkeypatch, capsys):
    """Guards against a loss that is not the cross-entropy of the demonstrations, and a tuning that goes on too long."""
    puzzles, s = generate_puzzles(50, "train"), train.Settings(**warm_start.TUNING | {"responses": 3, "lr": 1e-3})
    batch = warm_start.demonstrations(policy, puzzles[:2], np.random.default_rng(0), s)
    assert batch.group.tolist() == [0] * 3 + [1] * 3 and (batch.format == 1).all() and batch.success.mean() > 0
    assert {row[mask][-1].item() for row, mask in zip(batch.tokens, batch.mask)} == {policy.tokenizer.end_tokens[0]}
    prompts = [policy.prompt(puzzles[i]) for i in batch.group]
    loss = -plain_logprobs(policy.model, prompts, batch.tokens, batch.mask)[batch.mask].mean().item()

    found = iter([0.1, 0.3, 0.9])
    monkeypatch.setattr(warm_start, "CHECK", 1)
    monkeypatch.setattr(warm_start, "demonstrations", lambda *_: batch)
    monkeypatch.setattr(warm_start, "evaluate", lambda *_: np.array([next(found)]))
    warm_start.tune(policy, puzzles, 20, 0.3, s)
    first, second = (float(x) for x in re.findall(r"loss ([0-9.]+)", capsys.readouterr().out))  # it stops after two
    assert first == pytest.approx(loss, abs=1e-3) and second < first


# ----------------------------------------------------------------------------------------------------------------- talk


def test_a_token_is_the_darker_the_less_sure():
    """Guards against a shade on sure tokens, and limits that are turned around."""
    assert talk.shade("a", 0.95) == "a"
    colours = [re.search(r"48;5;(\d+)m", talk.shade("a", p)).group(1) for p in (0.9, 0.5, 0.1, 0.0)]
    assert colours == ["223", "215", "208", "208"]


def test_a_puzzle_is_typed_as_it_is_shown_or_stored_and_a_wrong_one_is_a_sentence():
    """Guards against numbers in another order, Countdown's form asked of another task, and no solution."""
    for line in ("3 5 7 22", "[3, 5, 7] -> 22", '{"nums": [3, 5, 7], "target": 22}'):
        assert countdown_task.show(talk.read_puzzle(countdown_task, line)) == "[3, 5, 7] -> 22"
    puzzle = latin_task.load("heldout", 1)[0]
    assert talk.read_puzzle(latin_task, puzzle.id) == puzzle
    for line, said in (("1 1 1 500", r"\[1, 1, 1\] can't make 500"), ("-3 5 2", "expected .* whole numbers from 0 on"),
                       ("[3, 5] -> -8", "whole numbers from 0 on"), ("3 - 5 2", "from 0 on"),
                       ("1.5 2 3", "from 0 on"), ("3", "it is no object"), ("3 5 8.", "that is no JSON"),
                       ("hello", "expected .*29}, but that is no JSON")):
        with pytest.raises(ValueError, match=f"^(?!.*column).*{said}") as error:
            talk.read_puzzle(countdown_task, line)
        assert "typed.jsonl" not in str(error.value)


@pytest.mark.slow
def test_a_conversation(run_program, monkeypatch, capsys):
    """Guards against an end at the first bad line, a puzzle that is asked twice, and colours that change the text."""
    typed = mock.Mock(side_effect=["3 5 7 22", "nonsense", "", "", EOFError])
    monkeypatch.setattr(builtins, "input", typed)
    run_program(talk, "--max_new_tokens", 100)
    shown = capsys.readouterr().out
    plain = re.sub(r"\033\[[\d;]+m", "", shown)
    assert plain.count("reward") == 3 and "expected" in plain and "[3, 5, 7] -> 22" in plain
    asked = re.findall(r"^\[.+\] -> \d+$", plain, re.MULTILINE)
    assert len({*asked}) == 3 and len(shown) > len(plain)
    assert re.search(r"<answer>[\d ()+*/-]+</answer>\n(right|wrong), reward", plain)
