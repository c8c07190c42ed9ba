"""Graded samples, and what a credit function may ask the model, against one response at a time and brute force.

Run it:  python -m pytest tests/test_queries.py
"""
import itertools
import statistics

import pytest
import torch

import grpo
import queries
from countdown_task import Puzzle, coin_toss, format_reward, reward
from critic import Critic
from sampler import PromptCache, ResponseCache, generate, response_attention, response_logprobs, response_states
from tests.plain import exact_moments
from tests.test_grpo import PUZZLES, bundled, close, graded_by_hash, step_batch, tiny


# --------------------------------------------------------------------------------------------- graded samples


def test_a_response_cut_anywhere_continues_with_the_same_tokens(codec):
    """Guards against a prefix of another puzzle, one that is not graded, and limits of other rows."""
    def grade(text, *puzzle):
        return text, puzzle, reward(text, *puzzle)

    model, uniforms = bundled(codec), grpo.draw_uniforms(0, 1, 3, 1, 40)
    whole, grades = queries.respond(model, codec, PUZZLES, uniforms, grade=grade)
    cuts = [3, 12, 7]
    prefixes = [whole.tokens[i, :cut].tolist() for i, cut in enumerate(cuts)]
    rolled = torch.stack([row.roll(-cut) for row, cut in zip(uniforms, cuts)])  # the random numbers of the other tokens
    rest, others = queries.respond(model, codec, PUZZLES, rolled, prefixes, 40 - torch.tensor(cuts), grade=grade)
    assert others == grades
    for i, prefix in enumerate(prefixes):
        assert prefix + rest.tokens[i][rest.mask[i]].tolist() == whole.tokens[i][whole.mask[i]].tolist()
    first = rest.tokens[:, 0]
    assert (queries.respond(model, codec, PUZZLES, rolled, prefixes, excluded=first)[0].tokens[:, 0] != first).all()


def test_broken_weights_are_one_sentence(codec, monkeypatch):
    """Guards against a step of NaN, whose cause shows many steps later. One broken response of three is enough."""
    def broken(*arguments):
        samples = generate(*arguments)
        samples.logprob[1, 0] = float("nan")
        return samples

    monkeypatch.setattr(queries, "generate", broken)
    with pytest.raises(FloatingPointError, match="not finite.*--lr"):
        queries.respond(bundled(codec), codec, PUZZLES, grpo.draw_uniforms(0, 1, 3, 1, 2))


# ---------------------------------------------------------------------------------------------------- queries


@torch.no_grad()
def alone(reader, model, codec, batch, i, *further):
    """What a function of sampler.py reads from the model about response i, in a batch of its own."""
    cache = PromptCache(model, [codec.prompt(PUZZLES[batch.group[i]])])
    return reader(model, ResponseCache(cache, torch.tensor([0])), batch.tokens[[i]], batch.mask[[i]], *further)[0]


def test_queries_read_each_response_as_if_it_were_alone(codec, random_model):
    """Guards against another row's prompt, rows that are lost or out of order, and the wrong model."""
    start_model = random_model.float()
    batch, model = step_batch(codec, reference=start_model, micro_batch=5)
    assert len(set(batch.mask.sum(1).tolist())) > 4  # responses, like prompts, are of unequal length
    rows = torch.tensor([3, 0, 3, 5, 1, 11, 0])
    hide = torch.rand(7, batch.mask.shape[1], generator=torch.Generator().manual_seed(0)) < 0.2
    without = batch.ask.logprob_without(rows, hide)
    for i in range(12):
        L = batch.mask[i].sum()
        close(batch.ask.hidden[i, :L], alone(response_states, model, codec, batch, i)[:L])
        close(batch.ask.attention[i, :L], alone(response_attention, model, codec, batch, i, batch.mask.shape[1])[:L])
        close(batch.ask.reference_logprob[i], alone(response_logprobs, start_model, codec, batch, i))
    for n, i in enumerate(rows.tolist()):
        close(without[n], alone(response_logprobs, model, codec, batch, i, hide[[n]]))
    assert batch.ask.logprob_without(rows[:0], hide[:0]).shape == hide[:0].shape
    for found in (batch.ask.hidden, batch.ask.attention, batch.ask.reference_logprob, without):
        assert not found.requires_grad


def test_the_model_runs_once_and_only_when_asked(codec, random_model, passes):
    """Guards against a forward pass that nobody asked for, or that each of several callers repeats."""
    batch, model = step_batch(codec, 2, 3, 8, reference=random_model, critic=Critic(128), micro_batch=4)
    assert passes == [(model, "prompts", 2)]  # by the sampler
    once = lambda kind, of: [(of, "prompts", 2), (of, kind, 4), (of, kind, 2)]  # two prompts, six responses
    for name, expected in (("attention", once("attention", model)), ("values", once("hidden", model)), ("hidden", []),
                           ("reference_logprob", once("hidden", random_model))):  # fmt: skip
        passes.clear()
        first = getattr(batch.ask, name)
        assert getattr(batch.ask, name) is first
        assert passes == expected


def test_the_tokens_that_go_through_the_model_are_counted(codec):
    """Guards against prompts or continuations left out, and a second count of what is computed once."""
    batch, _ = step_batch(codec, 2, 3, 8, critic=Critic(128))
    ask, responses = batch.ask, batch.mask.sum().item()
    prompts = [len(codec.prompt(puzzle)) for puzzle in PUZZLES[:2]]
    assert (ask.tokens_sampled, ask.tokens_read) == (responses, sum(prompts))
    assert ask.values is not None and ask.hidden is ask.hidden
    assert ask.tokens_read == 2 * sum(prompts) + responses  # once for both
    cuts = torch.zeros_like(batch.mask)
    cuts[0, 2] = cuts[5, 1] = True
    ask.rollout_values(cuts, 2)
    assert ask.tokens_read == 3 * sum(prompts) + responses + 2 + 1  # each prefix once for its two continuations
    assert responses + 4 <= ask.tokens_sampled <= responses + 2 * 6 + 2 * 7


@pytest.mark.parametrize("name, needed", [
    ("values", "critic"), ("importance_weights", "importance"), ("reference_logprob", "reference")])  # fmt: skip
def test_a_missing_model_is_one_sentence(name, needed, codec):
    """Guards against an AttributeError of None for whoever forgot to tell the decorator."""
    batch, _ = step_batch(codec, 1, 2, 1)
    with pytest.raises(ValueError, match=f'add needs=."{needed}",.'):
        getattr(batch.ask, name)


def test_rollouts_do_not_depend_on_how_many_are_sampled_together(codec, monkeypatch):
    """Guards against values that are mixed up between chunks, and randomness that depends on a memory setting."""
    batch, _ = step_batch(codec, 2, 2, 30)
    cuts = torch.zeros_like(batch.mask)
    cuts[[0, 0, 0, 1, 3, 3, 3], [1, 7, 20, 3, 0, 12, batch.mask[3].sum() - 1]] = True
    assert batch.mask[cuts].all()
    monkeypatch.setattr(queries, "reward", graded_by_hash)
    results, calls, generate = [], [], queries.generate
    monkeypatch.setattr(queries, "generate", lambda *arguments: (calls.append(1), generate(*arguments))[1])
    for rows, chunks in ((768, 1), (9, 3), (2, 7)):  # seven cuts, three continuations each; at least one cut at a time
        monkeypatch.setattr(queries, "ROWS_AT_ONCE", rows)
        calls.clear()
        results.append(batch.ask.rollout_values(cuts, 3))
        assert len(calls) == chunks
        assert torch.equal(results[0], results[-1])
    assert not batch.ask.rollout_values(torch.zeros_like(cuts), 3).any()


class Digits:
    """A codec of five tokens: the prompt is the puzzle's numbers, the text is the tokens, and 0 is the end token."""

    end_tokens, size = [0], 5

    def prompt(self, puzzle):
        return list(puzzle.numbers)

    def decode(self, tokens):
        return "".join(map(str, tokens)), [(i, i + 1) for i in range(len(tokens))]


def test_a_grader_given_to_the_rollout_grades_responses_and_continuations(codec):
    """Guards against a placebo that sees the real grades of continuations, and coins shared by steps or seeds."""
    batch, _ = step_batch(codec, 3, 8, 30, grade=coin_toss(0, 1))
    assert set(batch.reward.tolist()) == {0, 1} and torch.equal(batch.reward, batch.success)
    assert batch.format.tolist() == pytest.approx([format_reward(text) for text in batch.text])
    assert set((4 * batch.ask.rollout_values(batch.mask.cumsum(1) == 3, 4)).unique().tolist()) == {0, 1, 2, 3, 4}
    tosses = [[coin_toss(*key)("", (), 0)["reward"] for key in itertools.product(range(30), range(30))]
              for _ in range(2)]
    assert tosses[0] == tosses[1]
    assert 0.45 < statistics.mean(tosses[0]) < 0.55
    many = coin_toss(0, 0)
    assert 0.45 < statistics.mean(many("", (), 0)["answer"] for _ in range(1000)) < 0.55


@torch.no_grad()
def test_rollouts_converge_to_the_exact_value(monkeypatch):
    """Guards against any bias: with five tokens and a limit of three, all continuations can be counted."""
    monkeypatch.setattr(queries, "reward", graded_by_hash)
    model = tiny().double()
    model.real_vocab = 5
    puzzles, k = [Puzzle((1, 2, 3), 6), Puzzle((4, 3), 1)], 4000
    # No response of the batch uses all three: a continuation may be longer than each of them.
    batches = (grpo.rollout(model, Digits(), puzzles, grpo.draw_uniforms(i, 1, 2, 2, 3)) for i in itertools.count())
    batch = next(batch for batch in batches if batch.tokens.shape[1] == 2)
    value = batch.ask.rollout_values(batch.mask, k)
    for i, t in batch.mask.nonzero().tolist():
        mean, square = exact_moments(model, Digits(), puzzles[i // 2], tuple(batch.tokens[i, :t].tolist()), 3,
                                     lambda *graded: graded_by_hash(*graded)["reward"])
        deviation = (square - mean**2) ** 0.5
        assert deviation > 0.1
        assert abs(value[i, t].item() - mean) < 5 * deviation / k**0.5
    assert value[0, 0] != value[1, 0]  # the same prefix, but other random numbers
