"""Rollouts, and what a credit function may ask the model, against one response at a time and brute force."""
import functools
import itertools
import math
import statistics
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import countdown_task
import methods.queries as queries
import rollout
from countdown_task import Puzzle, format_reward, roles
from extras import turns
from methods.registry import CREDIT_FUNCTIONS
from methods.heads import Critic
from methods.oracle import oracle
from methods.values import vineppo
from plumbing.task_file import graded
from rollout import Policy, draw_uniforms, respond, seed_of
from sampler import generate, logprobs_of, read_responses
from settings import Settings
from tasks.text import fingerprint
from tests.fixtures import Pieces
from tests.plain import exact_moments
from tests.random_checkpoints import assert_close
from tests.test_grpo import tiny

PUZZLES = [Puzzle((4, 3, 5), 8), Puzzle((12, 7, 20, 1), 40), Puzzle((6, 2), 8)]  # prompts of unequal length


def step_batch(policy, puzzles=3, responses=4, length=60, **options):
    """A real batch, of the first puzzles."""
    s = Settings(responses=responses, max_new_tokens=length, **options)
    batch = rollout.rollout(policy, PUZZLES[:puzzles], s, 1)
    batch.ask = queries.Queries(policy, batch, s, 1)
    return batch


@functools.cache
def graded_by_hash(text, puzzle):
    """Grades that change with every text and every puzzle; half of them have one more."""
    r = fingerprint(f"{text} {puzzle}") / 2**64
    return {"answer": r / 2, "format": r / 3, "own": r % 0.1} | ({"more": r / 4} if r < 0.5 else {})


PARTS = {"answer": 2.0, "own": -1.0}  # of these grades, with their weights: from 0 to 0.9 in all


def reward_by_hash(text, puzzle):
    """Their reward, by hand."""
    grades = graded_by_hash(text, puzzle)
    return 2 * grades["answer"] - grades["own"]


@pytest.fixture
def hashed(policy):
    """The bundled model and a task whose grades are hashes."""
    return policy._replace(task=SimpleNamespace(**vars(countdown_task) | {"grade": graded_by_hash, "PARTS": PARTS}))


def test_another_purpose_or_number_is_another_seed():
    """Guards against (1, 11) that reads like (11, 1): puzzles that share their random numbers."""
    words = [*itertools.product(("order", "sampling", "1"), (0, 1, 11, "1"), (1, 11, 111, "evaluation"))]
    words += [(purpose, number) for purpose in ("order", "order 1", "order, 1") for number in (1, 11, "1")]
    assert len({seed_of(*row) for row in words}) == len(words) == 57


def test_random_numbers_of_a_puzzle_depend_on_nothing_else():
    """Guards against a generator shared by puzzles: a response would change with its neighbours."""
    few, many = draw_uniforms(3, 5, 2, 4, 10), draw_uniforms(3, 5, 6, 4, 10)
    assert torch.equal(few, many[:8])
    others = [draw_uniforms(seed, step, 2, 4, 10) for seed, step in ((3, 6), (4, 5), (5, 3))]
    drawn = torch.cat((many, *others))
    assert drawn.unique().numel() == drawn.numel() and 0 <= drawn.min() and drawn.max() < 1


@pytest.mark.slow
def test_a_batch_describes_its_own_responses(hashed):
    """Guards against rows, columns or groups that are out of step."""
    batch, tokenizer = step_batch(hashed, normalize="none"), hashed.tokenizer
    prompts, uniforms = [hashed.prompt(puzzle) for puzzle in PUZZLES], draw_uniforms(0, 1, 3, 4, 60)
    assert torch.equal(batch.tokens, generate(hashed.model, prompts, uniforms, tokenizer.end_tokens).tokens)
    assert batch.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert batch.puzzles == tuple(PUZZLES) and batch.parts == PARTS
    assert batch.normalize == "none" and batch.advantage is None
    for i, text in enumerate(batch.text):
        tokens = batch.tokens[i][batch.mask[i]].tolist()
        before_end = tokens[:-1] if batch.ended[i] else tokens
        assert text == tokenizer.library.decode(before_end, skip_special_tokens=False)
        assert len(batch.spans[i]) == len(tokens)
        grades = {"more": math.nan} | graded_by_hash(text, PUZZLES[i // 4])
        found = [batch.reward[i], batch.success[i], batch.format[i], *(batch.grades[name][i] for name in grades)]
        expected = [reward_by_hash(text, PUZZLES[i // 4]), grades["answer"], grades["format"], *grades.values()]
        assert found == pytest.approx(expected, nan_ok=True)
        role, in_answer = roles(text, batch.spans[i])
        padding = batch.mask.shape[1] - len(tokens)
        assert batch.role[i].tolist() == [*role, *[0] * padding]
        assert batch.in_answer[i].tolist() == [*in_answer, *[False] * padding]


def test_a_grade_is_a_number_of_any_kind():
    """Guards against ints in a batch, which have no mean, and numbers that are refused for their type."""
    bfloat16 = lambda x: torch.tensor([x], dtype=torch.bfloat16)
    made = lambda grade, **weights: graded(grade, weights)
    for kind in (int, bool, float, np.int8, np.bool_, np.float32, np.array, torch.tensor, Fraction, Decimal, bfloat16):
        found = made({"own": kind(1), "answer": kind(0), "format": kind(1), "none": None}, own=2)
        assert {type(x) for x in found.values()} == {float} and math.isnan(found.pop("none"))
        assert found == {"own": 1, "answer": 0, "format": 1, "reward": 2}
    for value in ("1", b"1", np.str_("1"), [1], 1j, np.complex64(1), np.ones(2), torch.ones(2, 2), 10**400, object):
        with pytest.raises(ValueError, match=r"^what the task's grade returns: more must be a number, not [^\n]*$"):
            made({"answer": 1, "format": 1, "more": value}, answer=1)
    with pytest.raises(ValueError, match="its reward is too large"):
        made({"answer": 1, "format": 1}, format=1e39)


def test_training_puzzles_depend_on_seed_and_step_alone():
    """Every puzzle is drawn once in an epoch, also by steps that span two epochs."""
    puzzles, s = list(range(10)), Settings(questions=4, seed=3)
    drawn = [rollout.draw_puzzles(puzzles, s, step) for step in range(1, 6)]  # two epochs of ten
    flat = sum(drawn, [])
    assert sorted(flat[:10]) == sorted(flat[10:]) == puzzles and flat[:10] != flat[10:]
    assert rollout.draw_puzzles(puzzles, s, 4) == drawn[3]
    assert rollout.draw_puzzles(puzzles, Settings(questions=4, seed=4), 1) != drawn[0]
    assert len(rollout.draw_puzzles(puzzles, Settings(questions=25), 2)) == 25  # more than an epoch


def test_broken_weights_are_one_sentence(policy, monkeypatch):
    """Guards against a step of NaN, whose cause shows many steps later. One broken response of three is enough."""
    broken = torch.tensor([[-1.0], [math.nan], [-1.0]])
    monkeypatch.setattr(rollout, "generate", lambda *arguments: generate(*arguments)._replace(logprob=broken))
    with pytest.raises(FloatingPointError, match="not finite.*--lr"):
        respond(policy, PUZZLES, [*map(policy.prompt, PUZZLES)], draw_uniforms(0, 1, 3, 1, 2))


@torch.no_grad()
def alone(reader, model, policy, batch, i, *further):
    """What a reader of sampler.py or methods/queries.py finds about response i, in a batch of its own."""
    own = SimpleNamespace(tokens=batch.tokens[[i]], mask=batch.mask[[i]], group=torch.tensor([0]), before=({},),
                          prompts=[policy.prompt(PUZZLES[batch.group[i]])])
    return read_responses(model, own, torch.tensor([0]), reader, further)[0]


@pytest.mark.slow
def test_queries_read_each_response_as_if_it_were_alone(policy, random_model):
    """Guards against another row's prompt, rows that are lost or out of order, and the wrong model."""
    start_model, model = random_model.float(), policy.model
    batch = step_batch(policy._replace(reference=start_model), micro_batch=5)
    assert len(set(batch.mask.sum(1).tolist())) > 4  # responses, like prompts, are of unequal length
    rows = torch.tensor([3, 0, 3, 5, 1, 11, 0])
    hide = torch.rand(7, batch.mask.shape[1], generator=torch.Generator().manual_seed(0)) < 0.2
    without = batch.ask.logprob_without(rows, hide)
    for i in range(12):
        assert_close(batch.ask.reference_logprob[i], alone(logprobs_of, start_model, policy, batch, i), 1e-4)
    for n, i in enumerate(rows.tolist()):
        expected = alone(queries.logprobs_without, model, policy, batch, i, hide[[n]])  # (T,)
        assert_close(without[n], expected, 1e-4)
    assert batch.ask.logprob_without(rows[:0], hide[:0]).shape == hide[:0].shape
    for found in (batch.ask.hidden, batch.ask.attention, batch.ask.reference_logprob, without):
        assert not found.requires_grad


def test_a_query_without_its_model_says_who_may_ask_for_it(policy):
    """Guards against a shaping that is told to mend a credit function's decorator, which it has not."""
    ask = step_batch(policy, 1, 2, 4).ask
    with pytest.raises(ValueError, match=r'add needs=\("critic",\) to the decorator'):
        ask.head("critic")
    with pytest.raises(ValueError, match=r'needs=\("reference",\) to the decorator .* shaping .* in start.py'):
        ask.reference_logprob


@pytest.mark.slow
def test_what_a_head_says_on_padding_does_not_count(policy):
    """With lambda = 1 credit is r - V_t. Guards against a value after the last token that is the padding's, or NaN; and
    against a head whose mistake is blamed on the credit function."""
    padding = torch.tensor([7.0, math.nan] * 6)[:, None]  # (B, 1)
    head = SimpleNamespace(read=lambda hidden, mask: hidden[..., 0].where(mask, padding))
    batch = step_batch(policy._replace(heads={"critic": head}))
    assert not batch.mask.all() and not batch.ask.head("critic")[~batch.mask].any()
    credit = CREDIT_FUNCTIONS["ppo"](batch, gae_lambda=1.0)  # (B, T)
    for i, own in enumerate(batch.mask):
        expected = [batch.reward[i].item() - value for value in batch.ask.hidden[i, own, 0].tolist()]
        assert credit[i, own].tolist() == pytest.approx(expected, abs=1e-3)
    for wrong in (lambda hidden, mask: hidden[..., 0] / 0, lambda hidden, mask: hidden, lambda hidden, mask: None):
        broken = step_batch(policy._replace(heads={"critic": SimpleNamespace(read=wrong)}))
        with pytest.raises(ValueError, match="the head critic must read numbers"):
            broken.ask.head("critic")


def test_the_model_runs_once_only_when_asked_and_is_counted(policy, random_model, passes):
    """Guards against a forward pass that nobody asked for, that is repeated or not counted, values that change once the
    critic has learned from the rewards, and a critic that trains the model."""
    model, critic = policy.model, Critic(128)
    policy = policy._replace(reference=random_model, heads={"critic": critic})
    batch, prompts = step_batch(policy, 2, 3, 8, micro_batch=4), sum(len(policy.prompt(p)) for p in PUZZLES[:2])
    ask, responses = batch.ask, batch.mask.sum().item()
    assert passes[0] == (model, 2 * (max(map(len, batch.prompts)) - 1))  # by the sampler, all but the last tokens
    assert all(tokens <= 6 for _, tokens in passes[1:])
    questions = {"attention": {model}, "critic": {model}, "hidden": set(), "reference_logprob": {random_model}}
    needed = prompts - 2 + responses  # the last tokens of prompts belong to the responses, of which none is read
    for name, expected in questions.items():
        passes.clear()
        answer = lambda: ask.head(name) if name == "critic" else getattr(ask, name)
        again = answer().zero_()  # a copy: what was written into it, nobody else reads
        assert answer().any() or name == "critic"  # which says 0 before it has learned
        assert answer() is not again and {model for model, _ in passes} == expected
        assert not expected or needed <= sum(tokens for _, tokens in passes) < 4 / 3 * needed  # with padding
    batch.reward = torch.ones(6)
    critic.learn(batch)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not ask.head("critic").any() and critic.read(ask.hidden, batch.mask).any()
    read = prompts + 3 * (prompts + responses)  # by the sampler, then for attention, hidden states and the reference
    assert (ask.tokens_sampled, ask.tokens_read) == (responses, read)
    cuts = torch.zeros_like(batch.mask)
    cuts[0, 2] = cuts[5, 1] = True
    ask.rollout_values(2 * cuts)
    assert ask.tokens_read == read + prompts + 2 + 1  # each prefix once for its two continuations
    assert responses + 4 <= ask.tokens_sampled <= responses + 2 * 6 + 2 * 7


@pytest.mark.slow
def test_continuations_do_not_depend_on_how_many_are_sampled_together(hashed, monkeypatch):
    """Guards against values that are mixed up between chunks, randomness that depends on a memory setting, and the
    token of another prefix, which the continuations of one would leave out instead."""
    batch, calls, results = step_batch(hashed, 2, 2, 30), [], []
    monkeypatch.setattr(turns, "generate", lambda *arguments: (calls.append(arguments), generate(*arguments))[1])
    cuts = torch.zeros_like(batch.mask)
    cuts[[0, 0, 0, 1, 3, 3, 3], [1, 7, 20, 3, 0, 12, batch.mask[3].sum() - 1]] = True
    assert batch.mask[cuts].all()
    for rows, chunks in ((768, 1), (9, 3), (2, 11)):  # seven cuts, three continuations each
        monkeypatch.setattr(queries, "ROWS_AT_ONCE", rows)
        calls.clear()
        results.append(batch.ask.rollout_values(3 * cuts))
        assert len(calls) == chunks
        assert torch.equal(results[0], results[-1])
    assert not batch.ask.rollout_values(torch.zeros_like(cuts)).any()

    monkeypatch.setattr(queries, "ROWS_AT_ONCE", 768)
    calls.clear()
    batch.ask.rollout_values(4 * cuts, other=True)
    (_, texts, _, _, (_, excluded, *_)), = calls
    places = sorted(cuts.nonzero().tolist(), key=lambda place: place[1])  # the shortest prefix first
    left_out = [int(batch.tokens[i, t]) for i, t in places]
    assert len(set(left_out)) >= 3 and excluded.tolist() == [token for token in left_out for _ in range(4)]
    assert texts == [batch.prompts[batch.group[i]] + batch.tokens[i, :t].tolist() for i, t in places for _ in range(4)]


@pytest.mark.slow
def test_a_coin_grades_responses_and_continuations(policy):
    """Guards against a placebo that sees the real grades of continuations, or tosses their responses' coins again, and
    against coins shared by steps or seeds."""
    batch = step_batch(policy, 3, 8, 30, reward="random")
    assert set(batch.reward.tolist()) == {0, 1} and torch.equal(batch.reward, batch.success)
    assert batch.format.tolist() == pytest.approx([format_reward(text) for text in batch.text])
    first = torch.arange(batch.mask.shape[1]) == 0 * batch.mask  # (B, T)
    again = queries.Queries(policy, batch, batch.ask.s, 1).rollout_values(first)[:, 0]
    assert set(again.tolist()) == {0, 1} and not torch.equal(again, batch.reward)
    heads = set((4 * batch.ask.rollout_values(4 * (batch.mask.cumsum(1) == 3))).unique().tolist())  # of four coins
    assert {1, 2, 3} <= heads <= {0, 1, 2, 3, 4}

    def tosses(seeds, steps, n):
        coins = [policy._replace(coin=rollout.coin_of(Settings(reward="random", seed=seed), step))
                 for seed, step in itertools.product(range(seeds), range(steps))]
        return [coin.with_reward(coin.task.grade("", PUZZLES[0]))["reward"] for coin in coins for _ in range(n)]

    assert tosses(30, 30, 1) == tosses(30, 30, 1)
    for first in (tosses(30, 30, 1), tosses(1, 1, 1000)):
        assert 0.45 < statistics.mean(first) < 0.55


@pytest.mark.slow
@pytest.mark.parametrize("responses, reward", [(3, 0.1), (7, 100.1)])
def test_where_all_rewards_are_equal_measured_credit_is_exactly_0(responses, reward, policy):
    """Guards against rounding as credit: it is read with gradient, for nothing."""
    grade = lambda text, puzzle: {"own": reward, "answer": 0.0, "format": 1.0}
    constant = policy._replace(task=SimpleNamespace(**vars(countdown_task) | {"grade": grade}),
                               reward_weights={"answer": 0.0, "format": 0.0, "own": 1.0})
    batch = step_batch(constant, 1, responses, 8)
    assert batch.ask.rollout_values(3 * batch.mask).any()
    for credit in (vineppo(batch), vineppo(batch, 5, "uncertain"), oracle(batch, 6), oracle(batch, 6, mix=1.0)):
        assert not credit.any()


@pytest.mark.slow
@torch.no_grad()
def test_rollouts_and_the_oracle_converge_to_the_exact_values():
    """Guards against any bias: with five tokens and a limit of three, all continuations can be counted."""
    model, k = tiny("qwen3", False).double(), 4000
    model.real_vocab = 5
    puzzles = [Puzzle((1, 2, 3), 6), Puzzle((4, 3), 1)]
    task = SimpleNamespace(PARTS=PARTS, grade=graded_by_hash,
                           prompt=lambda puzzle, chat: "".join(map(str, puzzle.numbers)),
                           roles=lambda text, spans: (np.zeros(len(spans), int), np.zeros(len(spans), bool)))
    policy = Policy(model, Pieces("01234"), task)
    # No response of the batch uses all three: a continuation may be longer than each of them. (This model ends often.)
    batches = (rollout.rollout(policy, puzzles, Settings(responses=2, max_new_tokens=3, seed=i), 1)
               for i in itertools.count())
    batch = next(batch for batch in batches if batch.tokens.shape[1] == 2)
    batch.ask = queries.Queries(policy, batch, Settings(responses=2, max_new_tokens=3), 1)
    value, a_star = batch.ask.rollout_values(k * batch.mask), oracle(batch, k)  # (B, T) each

    def moments(prefix):
        return exact_moments(policy, puzzles[i // 2], prefix, 3, reward_by_hash)

    for i, t in batch.mask.nonzero().tolist():
        tokens = tuple(batch.tokens[i].tolist())
        (mean, square), (after, _) = moments(tokens[:t]), moments(tokens[: t + 1])
        assert abs(a_star[i, t].item() - (after - mean)) < 5 * 0.5 / k**0.5  # rewards lie between 0 and 1
        deviation = (square - mean**2) ** 0.5
        assert deviation > 0.1
        assert abs(value[i, t].item() - mean) < 5 * deviation / k**0.5
    assert value[0, 0] != value[1, 0]  # the same prefix, but other random numbers
