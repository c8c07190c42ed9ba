"""Rollout, advantage, loss, update and log, each against an independent computation.

Run it:  python -m pytest tests/test_grpo.py
"""

import copy
import itertools
import math
import statistics

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import grpo
import mitigations
import qwen2_model
from conftest import make_batch
from countdown_task import Problem, annotate, fingerprint, reward
from critic import Critic
from mitigations import none
from tests.plain import plain_logprobs, plain_rows, plain_update
from qwen2_model import Answers, KVCache, Prompts, Qwen2, load_model, read_config, save_model
from train import BUNDLED

PROBLEMS = [Problem((4, 3, 5), 8), Problem((12, 7, 20), 39), Problem((1, 2, 3), 6)]
UNEQUAL = [Problem((4, 3, 5), 8), Problem((12, 7, 20, 1), 40), Problem((6, 2), 8)]  # prompts of unequal length


def step_batch(codec, questions=3, answers=4, length=60, problems=PROBLEMS, **options):
    """A real batch of the bundled model and the prompts it answers."""
    model = load_model(BUNDLED)
    model.real_vocab = codec.size
    problems = problems[:questions]
    batch = grpo.rollout(model, codec, problems, grpo.draw_uniforms(0, 1, questions, answers, length), **options)
    return model, batch, [codec.prompt(p) for p in problems]


def past(model, prompts, which):
    """What stands before answers to the prompts `which`."""
    return Answers(Prompts(model, prompts), torch.as_tensor(which))


KINDS = pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
TINY, V, REAL = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, head_dim=6,
                     num_key_value_heads=2), 23, 19  # sizes; rows of the embedding, and how many of them are tokens
ASKED = [[5, 1, 8, 2, 2, 9, 4], [7], [3, 12, 6], [1, 1]]  # prompts of unequal length


def tiny(kind, tied=True):
    """A two-layer model whose every weight, norms and biases too, is random and large."""
    torch.manual_seed(0)
    model = Qwen2(read_config({"model_type": kind, "vocab_size": V, "tie_word_embeddings": tied, **TINY}))
    for name, p in model.named_parameters():
        torch.nn.init.uniform_(p, 0.5, 1.5) if "norm" in name else torch.nn.init.normal_(p, std=0.4)
    model.real_vocab = REAL
    return model


def responses(lengths):
    """Random tokens (B, T) of responses of these lengths, 0 on padding, and their mask."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return torch.randint(REAL, mask.shape, generator=torch.Generator().manual_seed(0)) * mask, mask


# ------------------------------------------------------------------------------------------------- rollout


def test_uniforms_of_a_question_depend_on_nothing_else():
    """Guards against a generator shared by questions: a response would change with its neighbours."""
    few, many = grpo.draw_uniforms(3, 5, 2, 4, 10), grpo.draw_uniforms(3, 5, 6, 4, 10)
    assert torch.equal(few, many[:8])
    assert not torch.equal(few, grpo.draw_uniforms(3, 6, 2, 4, 10)) and not torch.equal(
        few, grpo.draw_uniforms(4, 5, 2, 4, 10)
    )
    assert many.unique().numel() == many.numel() and 0 <= many.min() and many.max() < 1


def test_rollout_describes_its_own_responses(codec):
    """Guards against rows, columns or groups that are out of step with each other."""
    _, batch, _ = step_batch(codec)
    for i, text in enumerate(batch.text):
        kept = batch.tokens[i][batch.mask[i]].tolist()
        problem = PROBLEMS[batch.group[i]]
        ids = kept[:-1] if batch.ended[i] else kept
        assert text == codec.tokenizer.decode(ids, skip_special_tokens=False)
        assert (kept[-1] in codec.end_tokens) == bool(batch.ended[i]) and not set(ids) & set(codec.end_tokens)
        expected = reward(text, *problem)
        assert [batch.reward[i], batch.success[i], batch.format[i]] == pytest.approx(
            [expected["reward"], expected["answer"], expected["format"]]
        )
        role, inside = annotate(text, batch.spans[i])
        assert batch.role[i][batch.mask[i]].tolist() == role.tolist()
        assert batch.in_answer[i][batch.mask[i]].tolist() == inside.tolist()
        assert len(batch.spans[i]) == len(kept) and "".join(text[a:b] for a, b in batch.spans[i]) == text


def test_advantage_comes_from_the_reward(codec, monkeypatch):
    """Guards against an advantage from success alone, or across questions: no answer is right here."""
    grades = iter([{"reward": r, "answer": 0.0, "format": 0.0} for r in (0.1, 0.0, 0.3, 0.2, 0.7, 0.0)])
    monkeypatch.setattr(grpo, "reward", lambda *_: next(grades))
    model = load_model(BUNDLED)
    model.real_vocab = codec.size
    uniforms, options = grpo.draw_uniforms(0, 1, 2, 3, 5), dict(advantage="dr_grpo", normalize="none")
    got = grpo.rollout(model, codec, PROBLEMS[:2], uniforms, **options)
    expected = [0.1 - 0.4 / 3, -0.4 / 3, 0.3 - 0.4 / 3, -0.1, 0.4, -0.3]
    assert got.advantage.tolist() == pytest.approx(expected, abs=1e-6) and got.normalize == "none"


def test_evaluation_has_random_numbers_of_its_own(monkeypatch):
    """Guards against chunks that share random numbers, and evaluation with those of a training step."""
    seen = []

    def fake(model, codec, problems, uniforms):
        seen.append(uniforms)
        return None, None, [{"answer": 0.0}] * len(uniforms)

    monkeypatch.setattr(grpo, "respond", fake)
    for rows in (2, 100):
        grpo.evaluate(None, None, PROBLEMS, 2, 5, rows)
    assert torch.equal(torch.cat(seen[:3]), seen[3]) and seen[3].unique().numel() == 30
    assert not any(torch.equal(seen[3], grpo.draw_uniforms(0, step, 3, 2, 5)) for step in range(1000))


def test_standard_error_by_the_textbook():
    """Guards against the population variance, and a missing root."""
    x = [0.0, 1, 1, 0, 1]
    assert grpo.standard_error(np.array(x)) == pytest.approx(statistics.stdev(x) / math.sqrt(5))


# ---------------------------------------------------------------------------------- what a method may ask


def close(got, expected, atol=1e-4):
    """Equal up to rounding."""
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)


def in_transformers(folder):
    """The model of a folder in transformers, which computes attention itself."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def whole(batch, prompts, i):
    """Prompt and response i as one sequence (S,), and how many tokens the prompt has."""
    prompt = prompts[batch.group[i]]
    return torch.cat((torch.tensor(prompt), batch.tokens[i][batch.mask[i]])), len(prompt)


@torch.no_grad()
def logprobs_in_transformers(theirs, tokens, start, hide=None):
    """Log-prob (T,) of each token from `start` on; nobody but they themselves sees the hidden ones, hide (T,)."""
    S, mask = len(tokens), None
    if hide is not None:
        blocked = [[k > q or k < q and k >= start and bool(hide[k - start]) for k in range(S)] for q in range(S)]
        mask = torch.zeros(1, 1, S, S).masked_fill(torch.tensor(blocked), torch.finfo(torch.float32).min)
    logits = theirs(tokens[None], attention_mask=mask, position_ids=torch.arange(S)[None]).logits[0]
    return torch.stack([logits[s - 1].log_softmax(-1)[tokens[s]] for s in range(start, S)])


def test_the_plain_layout_as_drawn():
    """Guards against an oracle with padding on the wrong side, a column too many, or a state next to the one that
    predicts: a model that says its own token again predicts what stands one column before."""
    rows, pad, P = plain_rows([[2], [5, 2, 7]], torch.tensor([[3, 9], [6, 1]]))
    assert rows.tolist() == [[0, 0, 2, 3, 9], [5, 2, 7, 6, 1]] and pad.tolist() == [2, 0] and P == 3
    mask = torch.tensor([[True, True], [True, False]])
    echo, tokens = lambda rows, pad: 99.0 * F.one_hot(rows, 10), torch.tensor([[3, 9], [7, 1]])
    got = plain_logprobs(echo, [[3], [5, 2, 7]], tokens, mask)
    assert got.tolist() == [[0, -99], [0, 0]]


@KINDS
@pytest.mark.parametrize("lengths", [[5, 1, 3, 5, 2, 1, 4], [1, 1, 1, 1, 1, 1, 1]], ids=["ragged", "one token"])
def test_shared_prompts_equal_the_plain_layout(kind, lengths, exact):
    """Guards against another question's prompt, a prompt's padding that is seen or moves positions, states or looks a
    column early or late, and hidden tokens that somebody sees."""
    model, which, (tokens, mask) = tiny(kind), [2, 0, 1, 2, 2, 0, 0], responses(lengths)
    repeated = [ASKED[q] for q in which]
    before, (rows, pad, P) = past(model, ASKED, which), plain_rows(repeated, tokens)
    hide = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    hide[0, 0] = True
    for h, wide in ((None, None), (hide, F.pad(hide, (P, 0)))):
        got = grpo.response_states(model, before, tokens, mask, h)
        close(got, model.hidden(rows, pad, hide=wide)[:, P - 1 : -1], 1e-10)
    close(grpo.response_attention(model, before, tokens, mask), model.attention(rows, pad)[:, P - 1 : -1, P:], 1e-10)
    expected = plain_logprobs(model, repeated, tokens, mask)
    assert expected[mask].std() > 0.5
    close(grpo.response_logprobs(model, before, tokens, mask), expected, 1e-10)


def test_what_a_method_asks_equals_transformers(codec, random_model, tmp_path):
    """Guards against states a column early or late, another row's prompt, and the model in place of the start model."""
    save_model(random_model.float(), tmp_path)
    theirs, start_model = in_transformers(BUNDLED), in_transformers(tmp_path)
    _, batch, prompts = step_batch(codec, problems=UNEQUAL, reference=random_model, micro_batch=5)
    assert len(set(map(len, prompts))) == 3 and len(set(batch.mask.sum(1).tolist())) > 4  # padding on both sides
    for i in range(12):
        tokens, P = whole(batch, prompts, i)
        T = len(tokens) - P
        with torch.no_grad():
            out = theirs(tokens[None], output_attentions=True)
            close(batch.hidden()[i, :T], theirs.model(tokens[None]).last_hidden_state[0, P - 1 : -1])
        looks = out.attentions[-1][0].mean(0)  # (S, S)
        expected = [[looks[P + t - 1, P + u].item() if u < t else 0.0 for u in range(T)] for t in range(T)]
        close(batch.attention()[i, :T, :T], torch.tensor(expected), 1e-5)
        close(batch.reference_logprob()[i, :T], logprobs_in_transformers(start_model, tokens, P))
        close(batch.logprob[i, :T], logprobs_in_transformers(theirs, tokens, P))
        assert not batch.reference_logprob()[i, T:].any()
    assert not any(x().requires_grad for x in (batch.hidden, batch.attention, batch.reference_logprob))


def test_logprob_without_equals_a_mask_of_transformers(codec):
    """Guards against rows or hidden tokens mixed up, hiding a column beside the token, and positions that close up."""
    _, batch, prompts = step_batch(codec, answers=2, problems=UNEQUAL, micro_batch=3)
    theirs, rows = in_transformers(BUNDLED), torch.tensor([3, 0, 3, 5, 1, 3, 0])
    hide = torch.rand(len(rows), batch.mask.shape[1], generator=torch.Generator().manual_seed(0)) < 0.2
    hide[0, 0] = True
    hide[2] = False
    got = batch.logprob_without(rows, hide)
    assert got.shape == hide.shape and not got.requires_grad and not got[~batch.mask[rows]].any()
    for row, hidden, logprob in zip(rows, hide, got):
        tokens, P = whole(batch, prompts, row)
        close(logprob[: len(tokens) - P], logprobs_in_transformers(theirs, tokens, P, hidden))
    close(got[2], batch.logprob[3])
    assert (got - batch.logprob[rows]).abs().amax(1)[[0, 1, 3, 4, 5, 6]].min() > 0.1  # hiding matters


def test_nobody_reads_hidden_tokens(codec, random_model):
    """Guards against hidden tokens that later ones still depend on, and against hiding earlier ones, too."""
    prompts, hide = [codec.prompt(p) for p in UNEQUAL], torch.zeros(3, 9, dtype=torch.bool)
    tokens = torch.randint(codec.size, (3, 9), generator=torch.Generator().manual_seed(0))
    hide[:, 2:4] = True
    other, mask = torch.where(hide, (tokens + 7) % codec.size, tokens), torch.ones_like(hide)
    for hidden, reads in ((hide, False), (None, True)):
        before = past(random_model, prompts, [0, 1, 2])
        one, two = (grpo.response_logprobs(random_model, before, t, mask, hidden) for t in (tokens, other))
        assert torch.equal(one[:, :2], two[:, :2]) and (one[:, 2] != two[:, 2]).all()
        # Token 4 is predicted by the state on the last hidden token, which sees itself.
        assert ((one - two)[:, 5:].abs().amax(1) > 1e-3).tolist() == [reads] * 3


def test_the_model_is_asked_once_a_step_and_only_when_asked(codec, random_model, monkeypatch):
    """Guards against a forward that nobody asked for, or that is repeated by each of several callers, and against
    prompts that are read more than once."""
    calls, hidden, attention = [], Qwen2.hidden, Qwen2.attention

    def spy_hidden(model, tokens, pad=None, past=None, hide=None):
        if not isinstance(past, KVCache):  # which the sampler has
            calls.append((model, "prompts" if isinstance(past, Prompts) else "hidden", len(tokens)))
        return hidden(model, tokens, pad, past, hide)

    def spy_attention(model, tokens, pad=None, past=None):
        calls.append((model, "attention", len(tokens)))
        return attention(model, tokens, pad, past)

    monkeypatch.setattr(Qwen2, "hidden", spy_hidden)
    monkeypatch.setattr(Qwen2, "attention", spy_attention)
    model, batch, _ = step_batch(codec, 2, 3, 8, reference=random_model, critic=Critic(128), micro_batch=4)
    assert calls == [(model, "prompts", 2)]  # by the sampler
    calls.clear()

    def once(about, of):  # two prompts, six responses
        return [(of, "prompts", 2), (of, about, 4), (of, about, 2)]

    for ask, asked in ((batch.attention, once("attention", model)), (batch.values, once("hidden", model)),
                       (batch.hidden, []), (batch.reference_logprob, once("hidden", random_model))):  # fmt: skip
        first = ask()
        assert calls == asked and ask() is first
        calls.clear()


def test_what_a_method_asks_does_not_depend_on_micro_batch(codec, random_model):
    """Guards against statistics over a micro-batch, and rows lost or out of order where one ends."""
    critic, rows = Critic(128), torch.tensor([4, 4, 0, 5, 2])
    torch.nn.init.normal_(critic.outer.weight)
    results = []
    for size in (1, 4, 100):
        _, batch, _ = step_batch(codec, 3, 2, 40, UNEQUAL, reference=random_model, critic=critic, micro_batch=size)
        cuts, hide = torch.zeros_like(batch.mask), torch.zeros(5, batch.mask.shape[1], dtype=torch.bool)
        cuts[2, 9] = hide[1:4, 3:8] = True
        asked = batch.hidden(), batch.attention(), batch.values(), batch.reference_logprob()
        results.append([*asked, batch.logprob_without(rows, hide), batch.rollouts(cuts, 1)])
    for result in results[:2]:
        for got, expected in zip(result, results[2]):
            close(got, expected, 1e-3 * expected.abs().max().item())
    assert all(x.abs().max() > 0.01 for x in results[2][:5])


def test_chance_of_a_method_depends_on_name_seed_and_step(codec):
    """Guards against methods, steps or seeds that share their chance, and chance that moves on when it is used."""
    numbers = {}
    for key in ((0, 1), (1, 0), (1, 1), (0, 11), (1, 11), (11, 1), (0, 0)):
        _, batch, _ = step_batch(codec, 1, 2, 1, key=key)
        for name in ("random", "rollouts", "random1"):
            once, twice = (tuple(torch.rand(3, generator=batch.generator(name)).tolist()) for _ in range(2))
            assert once == twice
            numbers[name, key] = once
    assert len(set(numbers.values())) == len(numbers)
    _, again, _ = step_batch(codec, 1, 2, 1, key=(1, 11))
    assert tuple(torch.rand(3, generator=again.generator("random")).tolist()) == numbers["random", (1, 11)]


# ------------------------------------------------------------------------------------------------ fresh ends


def graded_by_hash(text, numbers, target):
    """A reward that any other text, or another puzzle, changes."""
    return {"reward": fingerprint(f"{text} {numbers} {target}") / 2**64, "answer": 0.0, "format": 0.0}


def some_cuts(batch):
    """Seven places to cut four responses at, the first and the last token of one among them."""
    cuts = torch.zeros_like(batch.mask)
    for i, t in ((0, 1), (0, 7), (0, 20), (1, 3), (3, 0), (3, 12), (3, int(batch.mask[3].sum()) - 1)):
        assert batch.mask[i, t]
        cuts[i, t] = True
    return cuts


def test_fresh_ends_equal_plain_sampling(codec, monkeypatch):
    """Guards against prefixes, puzzles or budgets of another cut, a prefix that is not graded, and shared chance.

    Whatever random numbers the ends were given: each is sampled again, alone, with its own and without a limit, from a
    row of them that is just as long as what its response has left.
    """
    limit, k, sampled, generate = 40, 2, [], grpo.generate

    def spy(model, prompts, uniforms, ends, limit, not_first):
        sampled.extend((prompt, chance) for prompt, chance in zip(prompts, uniforms.view(len(prompts), k, -1)))
        return generate(model, prompts, uniforms, ends, limit=limit)

    model, batch, prompts = step_batch(codec, 2, 2, limit, UNEQUAL)
    monkeypatch.setattr(grpo, "reward", graded_by_hash)
    monkeypatch.setattr(grpo, "generate", spy)
    cuts = some_cuts(batch)
    got = batch.rollouts(cuts, k)
    expected, lengths = {}, []
    for begun, chance in sampled:
        g = next(g for g in range(2) if begun[: len(prompts[g])] == prompts[g])
        prefix, rewards = begun[len(prompts[g]) :], []
        for u in chance[:, : limit - len(prefix)]:
            end = generate(model, [begun], u[None], codec.end_tokens)
            lengths.append((len(prefix) + end.tokens.shape[1], end.ended.item()))
            text, _ = codec.decode(prefix + end.tokens[0].tolist())
            rewards.append(graded_by_hash(text, *UNEQUAL[g])["reward"])
        expected[g, tuple(prefix)] = sum(rewards) / k
    places = cuts.nonzero().tolist()
    assert len(expected) == len(sampled) == len(places)
    for i, t in places:
        assert got[i, t].item() == pytest.approx(expected[i // 2, tuple(batch.tokens[i, :t].tolist())], abs=1e-6)
    assert got.shape == cuts.shape and not got[~cuts].any() and not got.requires_grad
    assert torch.stack([chance[:, 0] for _, chance in sampled]).unique().numel() == k * len(places)
    assert {length for length, ended in lengths if not ended} == {limit} and any(ended for _, ended in lengths)


def test_fresh_ends_do_not_depend_on_how_many_are_sampled_at_once(codec, monkeypatch):
    """Guards against values mixed up between chunks, and chance that depends on a memory setting."""
    _, batch, _ = step_batch(codec, 2, 2, 30, UNEQUAL)
    monkeypatch.setattr(grpo, "reward", graded_by_hash)
    results, calls, generate = [], [], grpo.generate
    monkeypatch.setattr(grpo, "generate", lambda *args, **options: (calls.append(1), generate(*args, **options))[1])
    for rows, chunks in ((768, 1), (9, 3), (2, 7)):  # 7 cuts of 3 ends; at least one cut at once
        monkeypatch.setattr(grpo, "ROWS_AT_ONCE", rows)
        results.append(batch.rollouts(some_cuts(batch), 3))
        assert len(calls) == chunks
        calls.clear()
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert torch.equal(batch.rollouts(torch.zeros_like(batch.mask), 3), torch.zeros(batch.mask.shape))
    assert len(calls) == 0


class Digits:
    """A codec of five tokens: a prompt is the puzzle's numbers, a text its tokens, and 0 ends it."""

    end_tokens = [0]

    def prompt(self, problem):
        return list(problem.numbers)

    def decode(self, tokens):
        return "".join(map(str, tokens)), [(i, i + 1) for i in range(len(tokens))]


def exact_moments(model, problem, prefix, limit):
    """Mean and mean square of the reward of all responses that begin with `prefix`, by brute force."""
    if 0 in prefix or len(prefix) == limit:
        r = graded_by_hash("".join(map(str, prefix)), *problem)["reward"]
        return r, r * r
    p = model(torch.tensor([[*problem.numbers, *prefix]]))[0, -1].softmax(-1).tolist()
    later = [exact_moments(model, problem, [*prefix, token], limit) for token in range(5)]
    return tuple(sum(chance * moments[i] for chance, moments in zip(p, later)) for i in range(2))


def test_fresh_ends_converge_to_the_exact_value(monkeypatch):
    """Guards against any bias: of three tokens from a vocabulary of five, all ends can be counted.

    No response has more than two of the three tokens it may have: a fresh end may be longer than all of them.
    """
    monkeypatch.setattr(grpo, "reward", graded_by_hash)
    torch.manual_seed(0)
    sizes = dict(vocab_size=5, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    model = Qwen2(read_config({"model_type": "qwen2", "num_key_value_heads": 1, **sizes})).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    problems, k = [Problem((1, 2, 3), 6), Problem((4, 3), 1)], 4000
    batches = (grpo.rollout(model, Digits(), problems, grpo.draw_uniforms(i, 1, 2, 2, 3)) for i in itertools.count())
    batch = next(batch for batch in batches if batch.tokens.shape[1] == 2)
    value = batch.rollouts(batch.mask, k)
    with torch.no_grad():
        for i, t in batch.mask.nonzero().tolist():
            mean, square = exact_moments(model, problems[i // 2], batch.tokens[i, :t].tolist(), 3)
            deviation = (square - mean**2) ** 0.5
            assert deviation > 0.1 and abs(value[i, t].item() - mean) < 5 * deviation / k**0.5
    assert value[0, 0] != value[1, 0]  # the same state, but chance of its own


# ----------------------------------------------------------------------------------------------- advantage


@pytest.mark.parametrize("kind", mitigations.ADVANTAGES)
def test_advantage_by_the_textbook(kind):
    """Guards against the unbiased std, a mean over the wrong axis, and rloo's factor."""
    rewards = [[1.1, 0.1, 0.1, 0.0], [0.1, 1.1, 1.1, 1.1], [0.3, 0.3, 0.3, 0.3]]
    got = mitigations.group_advantage(torch.tensor(rewards, dtype=torch.float64), kind).tolist()
    for row, result in zip(rewards, got):
        for i, r in enumerate(row):
            others = row[:i] + row[i + 1 :]
            expected = {
                "grpo": (r - statistics.mean(row)) / (statistics.pstdev(row) + 1e-4),
                "dr_grpo": r - statistics.mean(row),
                "rloo": r - statistics.mean(others),
            }[kind]
            assert result[i] == pytest.approx(expected, abs=1e-12)


def test_equal_rewards_give_exactly_zero():
    """Guards against dividing rounding noise by 1e-4: the mean of eight times 0.1 is not 0.1 in fp32."""
    rewards = torch.full((2, 7), 0.1)
    assert not mitigations.group_advantage(rewards).any() and not mitigations.has_variance(rewards).any()


# ---------------------------------------------------------------------------------------------------- loss


def test_response_logprobs_worked_example(random_model):
    """Guards against the off-by-one of the docstring's picture: `pad 2 +` and `3 end`, next to a longer prompt."""
    prompts, tokens = [[2, 7], [5, 2, 7, 1]], torch.tensor([[3, 1, 0], [6, 3, 1]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    got = grpo.response_logprobs(random_model, past(random_model, prompts, [0, 1]), tokens, mask)
    assert got[0, 2] == 0
    for i, (prompt, count) in enumerate(zip(prompts, (2, 3))):
        for t in range(count):  # the oracle: no padding, no slice, one token at a time
            prefix = prompt + tokens[i, :t].tolist()
            expected = random_model(torch.tensor([prefix]))[0, -1].log_softmax(-1)[tokens[i, t]]
            torch.testing.assert_close(got[i, t].double(), expected, rtol=0, atol=1e-5)


def test_logits_in_pieces_change_nothing(random_model, monkeypatch):
    """Guards against a piece that is lost, or a recomputation that drops the gradient."""
    prompts, tokens = [[2, 7], [5, 2, 7, 1]], torch.tensor([[3, 1, 4], [6, 3, 1]])
    gradients = []
    for size in (2**24, 2 * random_model.real_vocab, 1):
        monkeypatch.setattr(qwen2_model, "LOGITS_AT_ONCE", size)
        before = past(random_model, prompts, [0, 1])
        logprob = grpo.response_logprobs(random_model, before, tokens, torch.ones(2, 3, dtype=torch.bool))
        gradients.append(
            torch.autograd.grad((logprob * torch.arange(6.0).view(2, 3)).sum(), list(random_model.parameters()))
        )
    for a, b, c in zip(*gradients):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("loss_norm", grpo.LOSS_NORMS)
def test_gradient_with_respect_to_the_logits(loss_norm):
    """Guards against every wrong factor: d loss / d logits = -credit (onehot - p) c at ratio 1, to rounding."""
    torch.manual_seed(0)
    lengths, V, longest = [3, 5, 1], 7, 9
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    logits = torch.randn(3, 5, V, dtype=torch.float64, requires_grad=True)
    tokens, credit = torch.randint(V, (3, 5)), torch.randn(3, 5, dtype=torch.float64) * mask
    logprob = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    weight = grpo.token_weights(mask, loss_norm, longest)
    grpo.policy_loss(logprob, logprob.detach(), credit, weight).backward()
    for i, L in enumerate(lengths):
        c = {"token": 1 / sum(lengths), "sequence": 1 / (3 * L), "constant": 1 / (3 * longest)}[loss_norm]
        for t in range(5):
            onehot = torch.eye(V, dtype=torch.float64)[tokens[i, t]]
            expected = -credit[i, t] * (onehot - logits[i, t].detach().softmax(-1)) * c * (t < L)
            torch.testing.assert_close(logits.grad[i, t], expected, rtol=1e-6, atol=1e-9)


def published_loss(logprob, old, credit, mask, reference, beta, low, high, loss_norm, longest):
    """TRL's published formula, one token at a time in Python floats."""
    sums = []
    for row in range(len(mask)):
        values = []
        for t in range(len(mask[row])):
            if mask[row][t]:
                ratio = math.exp(logprob[row][t] - old[row][t])
                clipped = max(1 - low, min(1 + high, ratio))
                delta = reference[row][t] - logprob[row][t]
                values.append(
                    -min(ratio * credit[row][t], clipped * credit[row][t]) + beta * (math.exp(delta) - delta - 1)
                )
        sums.append(values)
    if loss_norm == "sequence":
        return sum(sum(v) / len(v) for v in sums) / len(sums)
    return sum(map(sum, sums)) / (sum(map(len, sums)) if loss_norm == "token" else len(sums) * longest)


@pytest.mark.parametrize("loss_norm", grpo.LOSS_NORMS)
def test_loss_equals_the_published_formula_away_from_ratio_one(loss_norm):
    """Guards against a clip on the wrong side, max instead of min for negative credit, and the KL's sign."""
    torch.manual_seed(1)
    mask = torch.arange(6) < torch.tensor([6, 2, 4, 5])[:, None]
    logprob, shift, reference = (
        -torch.rand(4, 6).double() * 2,
        torch.randn(4, 6).double() * 0.4,
        -torch.rand(4, 6).double(),
    )
    credit = torch.randn(4, 6).double()
    ratio = shift.exp()
    assert all(
        ((ratio > 1.28) & (sign * credit > 0) & mask).any() and ((ratio < 0.8) & (sign * credit > 0) & mask).any()
        for sign in (1, -1)
    )
    args = [x.tolist() for x in (logprob, logprob - shift, credit, mask, reference)]
    expected = published_loss(*args, 0.05, 0.2, 0.28, loss_norm, 9)
    weight = grpo.token_weights(mask, loss_norm, 9)
    got = grpo.policy_loss(logprob, logprob - shift, credit * mask, weight, reference, 0.05, 0.2, 0.28)
    assert got.item() == pytest.approx(expected, rel=1e-6)


def test_k3_is_an_unbiased_estimate_of_the_kl():
    """Guards against the wrong direction of the KL: its mean under pi is KL(pi || reference), summed exactly."""
    torch.manual_seed(2)
    pi, reference = torch.randn(2, 9).double().log_softmax(-1)
    exact = (pi.exp() * (pi - reference)).sum()
    torch.testing.assert_close((pi.exp() * grpo.k3(pi, reference)).sum(), exact)
    assert (grpo.k3(pi, reference) >= 0).all()


# -------------------------------------------------------------------------------------------------- update


def sgd(model, lr):
    """An Optimizer whose steps are plain: the rate times the gradient."""
    optimizer = grpo.Optimizer(model, lr)
    optimizer.adamw = torch.optim.SGD(optimizer.master.values(), lr)
    return optimizer


def gradient_of_update(model, batch, prompts, credit, **options):
    """The gradient that one update applies: what plain SGD with rate 1 takes off the weights."""
    before = [p.detach().clone() for p in model.parameters()]
    measured = grpo.update(
        model,
        sgd(model, 1.0),
        prompts,
        batch,
        credit,
        max_new_tokens=60,
        max_grad_norm=1e9,
        **options,
    )
    gradient = [b - p.detach() for b, p in zip(before, model.parameters())]
    with torch.no_grad():
        for p, b in zip(model.parameters(), before):
            p.copy_(b)
    return torch.cat([g.flatten() for g in gradient]), measured


LENGTHS, GROUPS = [5, 1, 3, 4, 2, 2, 1, 1, 6, 3, 3, 5], [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def step_by_hand(model):
    """Twelve responses to the four prompts of ASKED, off-policy, and their credit: none in question 1 and in row 8, so
    that question 2 has responses of one token only."""
    tokens, mask = responses(LENGTHS)
    batch = make_batch(LENGTHS, [0.0] * 12, GROUPS, tokens=tokens)
    with torch.no_grad():
        now = plain_logprobs(model, [ASKED[q] for q in GROUPS], tokens, mask)
    generator = torch.Generator().manual_seed(3)
    noise, credit = (torch.randn(mask.shape, generator=generator) * mask for _ in range(2))
    credit[3:6] = credit[8] = 0
    batch.logprob = now + 0.2 * noise
    return batch, credit


@KINDS
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kl", [0.0, 0.5])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("micro_batch", [1, 3, 99])
def test_updates_equal_plain_autograd(kind, tied, kl, checkpointed, micro_batch, exact):
    """Guards against a gradient lost or doubled between prompts and answers, at a layer, in a micro-batch, where layers
    are computed again, or from one update to the next: all rows at once, each with its own prompt, are the oracle."""
    ours = tiny(kind, tied)
    theirs, reference, (batch, credit) = copy.deepcopy(ours), copy.deepcopy(ours), step_by_hand(ours)
    for p in reference.parameters():
        p.data += 0.02 * torch.randn_like(p)
    options, losses, norms = dict(reference=reference if kl else None, kl=kl), [], []
    plainly = sgd(theirs, 0.05)
    for _ in range(2):
        theirs.zero_grad()
        losses.append(plain_update(theirs, ASKED, batch, credit, **options).item())
        norms.append(math.sqrt(sum(p.grad.square().sum().item() for p in theirs.parameters())))
        plainly.adamw.step()
    ours.checkpoint_activations = checkpointed
    got = grpo.update(ours, sgd(ours, 0.05), ASKED, batch, credit, max_new_tokens=9, updates_per_batch=2,
                      max_grad_norm=1e9, micro_batch=micro_batch, **options)  # fmt: skip
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters()):
        assert 1e-4 < other.grad.abs().max() < 1e3, name
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-10, rtol=0, msg=name)
        torch.testing.assert_close(mine, other, atol=1e-10, rtol=0, msg=name)
    expected = statistics.mean(losses), statistics.mean(norms)
    assert (got["loss"], got["grad_norm"]) == pytest.approx(expected, abs=1e-10)
    assert 0 < got["clip_fraction"] < 1 and got["ratio_error"] > 0.1 and losses[0] != losses[1]


def test_an_update_reads_each_prompt_once_and_no_row_without_credit(exact, monkeypatch):
    """Guards against work for nothing: prompts read again for every micro-batch, rows and questions without credit."""
    model, calls, hidden = tiny("qwen2"), [], Qwen2.hidden
    batch, credit = step_by_hand(model)

    def spy(model, tokens, pad=None, past=None, hide=None):
        calls.append(("prompts" if isinstance(past, Prompts) else "answers", len(tokens)))
        return hidden(model, tokens, pad, past, hide)

    monkeypatch.setattr(Qwen2, "hidden", spy)
    grpo.update(model, sgd(model, 0.1), ASKED, batch, credit, max_new_tokens=9, updates_per_batch=2, micro_batch=3)
    # Rows 1, 6 and 7 have one token, which the prompt's state predicts: nothing is left to read. Five more have credit.
    assert calls == [("prompts", 3), ("answers", 3), ("answers", 2)] * 2


def some_batch():
    """Six responses to three questions, and credit: none in rows 1, 4 and 5."""
    batch = make_batch([3, 1, 2, 5, 4, 2], [0.0] * 6, [0, 0, 1, 1, 2, 2])
    credit = batch.mask * torch.tensor([1.0, 0, 1, -1, 0, 0])[:, None]
    credit[0, :2] = 0  # one token with credit is enough
    return batch, credit


def told(plan):
    """The same in Python: questions, and of each micro-batch its rows, which question each answers, and its length."""
    questions, parts = plan
    return questions.tolist(), [(rows.tolist(), which.tolist(), length) for rows, which, length in parts]


def test_micro_batches_by_hand():
    """Guards against a row with another question's prompt, rows without credit, and a long row among short ones."""
    batch, credit = some_batch()
    assert told(grpo.micro_batches(batch, credit, 2, True)) == ([1, 0], [([2, 0], [0, 1], 3), ([3], [0], 5)])
    assert told(grpo.micro_batches(batch, credit, 4, False)) == (
        [1, 2, 0], [([1, 2, 5, 0], [2, 0, 1, 2], 3), ([4, 3], [1, 0], 5)])  # fmt: skip
    assert told(grpo.micro_batches(batch, 0 * credit, 2, True)) == ([], [])


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_micro_batches_of_several_processes(processes, skip, monkeypatch):
    """Guards against a response that no process, or more than one, updates on, and the long ones all on the same."""
    batch, credit = some_batch()
    rows, loads = [], []
    for rank in range(processes):
        monkeypatch.setattr(grpo, "world", lambda: (rank, processes))
        questions, parts = told(grpo.micro_batches(batch, credit, 2, skip))
        rows += [row for part, _, _ in parts for row in part]
        loads.append(sum(int(batch.mask[part].sum()) for part, _, _ in parts))
        for part, which, _ in parts:
            assert [questions[w] for w in which] == batch.group[part].tolist()
    assert sorted(rows) == ([0, 2, 3] if skip else [0, 1, 2, 3, 4, 5])
    expected = {True: [[10], [7, 3], [7, 3, 0], [7, 3, 0, 0]], False: [[17], [7, 10], [7, 6, 4], [7, 6, 4, 0]]}
    assert loads == expected[skip][processes - 1]


def test_shares_are_all_of_the_work(monkeypatch):
    """Guards against a thing that no process, or more than one, does, and one that does twice as much as another."""
    assert grpo.world() == (0, 1) and grpo.share(5) == slice(0, 5)
    same = torch.ones(3, 2)
    assert grpo.gather(same, 3) is same
    for size, n in itertools.product((1, 2, 3, 5), range(8)):
        monkeypatch.setattr(grpo, "world", lambda: (size - 1, size))
        parts = [list(range(n))[grpo.share(n, rank)] for rank in range(size)]
        assert sum(parts, []) == list(range(n)) and parts[-1] == list(range(n))[grpo.share(n)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("loss_norm", grpo.LOSS_NORMS)
def test_micro_batches_change_nothing(codec, random_model, loss_norm):
    """Guards against statistics over a micro-batch: sizes 1, 7 and all give the same gradient and the same figures."""
    _, batch, prompts = step_batch(codec)
    credit = torch.randn_like(batch.logprob) * batch.mask
    results = [
        gradient_of_update(random_model, batch, prompts, credit, micro_batch=size, loss_norm=loss_norm)
        for size in (1, 7, len(credit))
    ]
    for gradient, measured in results[:2]:
        torch.testing.assert_close(gradient, results[2][0], rtol=1e-6, atol=1e-9)
        for name in ("loss", "grad_norm", "clip_fraction", "ratio_error"):
            assert measured[name] == pytest.approx(results[2][1][name], rel=1e-5)
    assert results[0][0].norm() > 1e-6


def test_gradient_of_the_update_by_finite_differences(codec, random_model):
    """Guards against a gradient that is not that of sum_t credit_t log pi(token_t) / N."""
    _, batch, prompts = step_batch(codec, answers=2)
    batch.logprob = grpo.response_logprobs(
        random_model, past(random_model, prompts, batch.group), batch.tokens, batch.mask
    ).detach()
    credit = torch.randn(batch.mask.shape).double() * batch.mask
    gradient, _ = gradient_of_update(random_model, batch, prompts, credit)
    noise = torch.randn(len(gradient), dtype=torch.float64)
    direction = gradient / gradient.norm() + noise / noise.norm()  # what the gradient says, and what it might miss

    def objective(shift):
        vector = torch.nn.utils.parameters_to_vector(random_model.parameters()).detach()
        torch.nn.utils.vector_to_parameters(vector + shift * direction, random_model.parameters())
        total = 0.0
        with torch.no_grad():
            for i in range(len(credit)):  # one response at a time, no padding
                response = batch.tokens[i][batch.mask[i]]
                prompt = prompts[batch.group[i]]
                log_probs = random_model(torch.cat((torch.tensor(prompt), response))[None, :-1])[0].log_softmax(-1)[
                    len(prompt) - 1 :
                ]
                total += (log_probs.gather(1, response[:, None])[:, 0] * credit[i][batch.mask[i]]).sum().item()
        torch.nn.utils.vector_to_parameters(vector, random_model.parameters())
        return -total / batch.mask.sum().item()

    slope = (objective(1e-3) - objective(-1e-3)) / 2e-3
    assert (gradient @ direction).item() == pytest.approx(slope, rel=2e-3)


def test_rows_without_credit_can_be_left_out(codec, random_model):
    """Guards against an N that forgets them: the gradient is that of the whole step."""
    _, batch, prompts = step_batch(codec)
    credit = torch.randn_like(batch.logprob) * batch.mask
    credit[::2] = 0
    _, left_out = grpo.micro_batches(batch, credit, 4, skip=True)
    assert sum(len(rows) for rows, _, _ in left_out) == len(credit) // 2
    skipping, _ = gradient_of_update(random_model, batch, prompts, credit)
    all_rows, _ = gradient_of_update(random_model, batch, prompts, credit, reference=random_model, kl=0.0)
    torch.testing.assert_close(skipping, all_rows, rtol=1e-6, atol=1e-9)


def test_a_step_without_any_credit_changes_no_weight(codec, random_model):
    """Guards against a crash, or a figure invented, when every group has equal rewards."""
    _, batch, prompts = step_batch(codec)
    gradient, measured = gradient_of_update(random_model, batch, prompts, torch.zeros_like(batch.logprob))
    assert not gradient.any() and measured["ratio_error"] is None and measured["grad_norm"] == 0


def test_first_update_is_on_policy_and_later_ones_are_clipped(codec):
    """Guards against recorded log-probs that disagree with the update's, and a ratio that never moves."""
    model, batch, prompts = step_batch(codec)
    credit = none(batch)
    assert credit.any()
    options = dict(max_new_tokens=60, max_grad_norm=1.0)
    first = grpo.update(model, grpo.Optimizer(model, 1e-3), prompts, batch, credit, **options)
    assert first["ratio_error"] < 1e-5 and first["clip_fraction"] == 0
    model, batch, prompts = step_batch(codec)
    later = grpo.update(
        model, grpo.Optimizer(model, 1e-3), prompts, batch, credit, updates_per_batch=4, **options
    )
    assert later["ratio_error"] < 1e-5 and later["clip_fraction"] > 0


def test_figures_by_hand():
    """Guards against a clip counted on the side where it does not bind: limits 0.9 and 1.3, against padding that is
    counted, a signed log ratio, and one taken after the first update."""
    ratio = torch.tensor([[1.2, 1.4, 0.85, 0.95, 1.4, 0.85, 1.4]]).double()
    credit = torch.tensor([[1.0, 1, 1, 1, -1, -1, 1]]).double()
    mask, zero = torch.tensor([[True] * 6 + [False]]), torch.zeros_like(ratio)
    inputs = torch.tensor(2.5), ratio.log(), zero, credit, mask
    change = sum(abs(math.log(r)) for r in (1.2, 1.4, 0.85, 0.95, 1.4, 0.85))
    first = grpo.figures(*inputs, None, 0.1, 0.3, True)
    assert first.tolist() == pytest.approx([2.5, 2, 0, 6, change, 6], abs=1e-6)
    for t in range(6):  # which two
        alone = grpo.figures(torch.tensor(0.0), *(x[:, t : t + 1] for x in inputs[1:]), None, 0.1, 0.3, True)
        assert alone[1] == (t in (1, 5))
    reference = torch.full_like(ratio, -0.5)
    k3 = sum(math.exp(-0.5 - math.log(r)) + 0.5 + math.log(r) - 1 for r in (1.2, 1.4, 0.85, 0.95, 1.4, 0.85))
    later = grpo.figures(*inputs, reference, 0.1, 0.3, False)
    assert later.tolist() == pytest.approx([2.5, 2, k3, 6, 0, 0], abs=1e-6)
    expected = {"loss": 2.5, "clip_fraction": 1 / 3, "ratio_error": change / 6, "kl": k3 / 12}
    assert grpo.metrics(first + later, 2, True) == pytest.approx(expected, abs=1e-6)
    assert grpo.metrics(first, 1, False)["kl"] is None
    assert set(grpo.metrics(0 * first, 1, True).values()) == {0.0, None}


def test_figures_with_kl_away_from_ratio_one(codec, random_model):
    """Guards against swapped clips, a KL to the old policy or of another weight, and sums over updates."""
    _, batch, prompts = step_batch(codec, answers=2)
    reference = copy.deepcopy(random_model)
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(torch.randn_like(p) * 0.02)
        now, ref = (grpo.response_logprobs(m, past(m, prompts, batch.group), batch.tokens, batch.mask)
                    for m in (random_model, reference))  # fmt: skip
    batch.logprob = now + 0.4 * torch.randn_like(now) * batch.mask
    credit = torch.randn_like(now) * batch.mask
    args = [x.tolist() for x in (now, batch.logprob, credit, batch.mask, ref)]
    expected = published_loss(*args, 0.05, 0.1, 0.3, "token", 60)
    k3 = [math.exp(r - n) - (r - n) - 1 for r, n in zip(ref[batch.mask].tolist(), now[batch.mask].tolist())]
    optimizer = sgd(random_model, 0.0)  # every update is the same
    options = dict(reference=reference, kl=0.05, clip_low=0.1, clip_high=0.3, max_new_tokens=60)
    results = [
        grpo.update(random_model, optimizer, prompts, batch, credit, updates_per_batch=n, **options) for n in (1, 2)
    ]
    for got in results:
        assert got["loss"] == pytest.approx(expected, rel=1e-4) and got["kl"] == pytest.approx(
            statistics.mean(k3), rel=1e-4
        )
        assert got["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=1e-6)


def test_gradient_is_clipped_and_its_norm_reported_before(codec, random_model):
    """Guards against a limit that is ignored, and a reported norm that can't exceed it."""
    _, batch, prompts = step_batch(codec)
    credit = torch.randn_like(batch.logprob) * batch.mask
    norm = gradient_of_update(random_model, batch, prompts, credit)[0].norm().item()
    before = torch.nn.utils.parameters_to_vector(random_model.parameters()).detach().clone()
    optimizer = sgd(random_model, 1.0)
    got = grpo.update(random_model, optimizer, prompts, batch, credit, max_new_tokens=60, max_grad_norm=norm / 4)
    moved = torch.nn.utils.parameters_to_vector(random_model.parameters()).detach() - before
    assert got["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert moved.norm().item() == pytest.approx(norm / 4, rel=1e-3)


def test_kl_pulls_towards_the_reference(codec, random_model):
    """Guards against a KL penalty that is reported and not in the gradient."""
    model, batch, prompts = step_batch(codec)
    reference = load_model(BUNDLED)
    reference.real_vocab = codec.size
    zero = torch.zeros_like(batch.logprob)
    still, measured = gradient_of_update(model, batch, prompts, zero, reference=reference, kl=0.1)
    assert measured["kl"] == pytest.approx(0, abs=1e-6) and still.norm() < 1e-4
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    divergence = []
    optimizer = grpo.Optimizer(model, 1e-3)
    for _ in range(20):
        divergence.append(
            grpo.update(model, optimizer, prompts, batch, zero, reference=reference, kl=1.0, max_new_tokens=60)["kl"]
        )
    assert divergence[0] > 0.01 and divergence[-1] < 0.5 * divergence[0]


# ----------------------------------------------------------------------------------------------- optimizer


def small_bf16():
    """A bf16 model whose every weight is between 0.005 and 0.02 in size, where neighbours are 3e-5 or more apart."""
    model = tiny("qwen3", tied=False).bfloat16()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((torch.rand(p.shape) * 0.015 + 0.005) * torch.randn(p.shape).sign())
    return model


def give(model, gradients):
    """Give each parameter its gradient (a number, or one of its shape), by a backward pass."""
    sum((p * g).sum() for p, g in zip(model.parameters(), gradients)).backward()


def test_small_steps_of_bf16_weights_are_not_lost():
    """Guards against steps of 1e-6 that rounding swallows one by one, as it does in a plain AdamW on bf16 weights."""
    model, steps = small_bf16(), 50
    plain, start = copy.deepcopy(model), [p.detach().clone() for p in model.parameters()]
    whole = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    options = dict(lr=1e-6, betas=(0.8, 0.95), weight_decay=0.1)
    ours = grpo.Optimizer(model, **options)
    exactly, naive = torch.optim.AdamW(whole, **options), torch.optim.AdamW(plain.parameters(), **options)
    direction = [torch.randn(p.shape).sign() for p in whole]
    for _ in range(steps):
        gradients = [(d * (1 + torch.rand(d.shape))).bfloat16() for d in direction]
        ours.zero_grad()
        give(model, gradients)
        ours.step(1e9)
        for p, q, g in zip(whole, plain.parameters(), gradients):
            p.grad, q.grad = g.float(), g
        exactly.step()
        naive.step()
    moved = []
    for w, master, p, q, s in zip(model.parameters(), ours.master.values(), whole, plain.parameters(), start):
        assert w.dtype == torch.bfloat16 and master.dtype == torch.float32 and torch.equal(w, master.bfloat16())
        close(master, p, 5e-8)
        assert (p - s.float()).abs().min() > 0.9 * steps * 1e-6
        moved.append(w != s)
        assert torch.equal(q, s)
    assert torch.cat([m.flatten() for m in moved]).float().mean() > 0.4


def test_bf16_gradients_are_summed_in_float32():
    """Guards against the gradients of small micro-batches lost in those of large ones, ones left from the step before,
    and a norm taken after clipping: 256 + 1 is 256 in bf16."""
    model = small_bf16()
    optimizer, count = grpo.Optimizer(model, 1e-3), sum(p.numel() for p in model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        for part in (256.0, 1.0):
            give(model, itertools.repeat(part))
        assert all(p.grad is None for p in model.parameters())  # they take no memory
        assert all((p.grad == 257).all() for p in optimizer.master.values())
        assert optimizer.step(1.0) == pytest.approx(257 * count**0.5, rel=1e-5)
        clipped = [p.grad.flatten() for p in optimizer.master.values()]
        assert torch.cat(clipped).norm().item() == pytest.approx(1, rel=1e-4)


@KINDS
def test_the_update_of_a_bf16_model_is_that_of_its_weights_in_float32(kind):
    """Guards against a gradient that does not arrive in the float32 weights, or arrives twice, on any way it takes."""
    model = tiny(kind, tied=True).bfloat16()
    whole = tiny(kind, tied=True)
    whole.load_state_dict(model.state_dict())
    batch, credit = step_by_hand(whole)
    optimizers = [sgd(m, 0.1) for m in (model, whole)]
    norm = "model.norm.weight"
    assert optimizers[1].master[norm] is whole.get_parameter(norm)  # no copy where none is needed
    for m, optimizer in zip((model, whole), optimizers):
        grpo.update(m, optimizer, ASKED, batch, credit, max_new_tokens=9, max_grad_norm=1e9, micro_batch=2)
    for (name, got), expected in zip(optimizers[0].master.items(), optimizers[1].master.values()):
        error = (got.grad - expected.grad).norm() / expected.grad.norm()
        assert got.grad.dtype == torch.float32 and error < 0.1, (name, error)
        assert torch.equal(model.get_parameter(name), got.bfloat16())


def test_a_step_without_any_credit_decays_momentum(exact):
    """Guards against a step that is left out, or repeats the gradient before: AdamW goes on with a gradient of 0."""
    ours = tiny("qwen3")
    theirs, (batch, credit) = copy.deepcopy(ours), step_by_hand(ours)
    options = dict(lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
    optimizer, plainly = grpo.Optimizer(ours, **options), torch.optim.AdamW(theirs.parameters(), **options)
    before = []
    for c in (credit, 0 * credit, 0 * credit):
        before.append(copy.deepcopy(ours))
        grpo.update(ours, optimizer, ASKED, batch, c, max_new_tokens=9, max_grad_norm=1e9)
        theirs.zero_grad()
        plain_update(theirs, ASKED, batch, c)
        plainly.step()
        for a, b, was in zip(ours.parameters(), theirs.parameters(), before[-1].parameters()):
            torch.testing.assert_close(a, b, atol=1e-8, rtol=0)
            assert (a - was).abs().max() > 1e-3


# ---------------------------------------------------------------------------------------------- credit log


def test_credit_log_holds_every_token_in_forty_bytes(tmp_path):
    """Guards against a log that can't see the method, that mixes reward and advantage, or that holds padding."""
    batch = make_batch(
        [2, 3],
        [0.5, -0.25],
        reward=torch.tensor([1.1, 0.1]),
        groups=[0, 1],
        tokens=torch.tensor([[5, 6, 0], [7, 8, 9]]),
        role=torch.tensor([[0, 1, 0], [2, 1, 0]], dtype=torch.int8),
    )
    batch.logprob, batch.entropy, batch.logit_grad = (
        -torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3) + 10,
        torch.arange(6.0).view(2, 3) + 20,
    )
    batch.in_answer[1, 2] = True
    credit = torch.tensor([[0.1, 0.2, 0], [0.3, 0.4, 0.5]])
    grpo.write_credit_log(tmp_path / "step-000007.npz", 7, batch, credit)
    log = np.load(tmp_path / "step-000007.npz")
    expected = {
        "step": [7] * 5,
        "response": [0, 0, 1, 1, 1],
        "group": [0, 0, 1, 1, 1],
        "position": [0, 1, 0, 1, 2],
        "token": [5, 6, 7, 8, 9],
        "advantage": [0.5, 0.5, -0.25, -0.25, -0.25],
        "credit": [0.1, 0.2, 0.3, 0.4, 0.5],
        "reward": [1.1, 1.1, 0.1, 0.1, 0.1],
        "role": [0, 1, 2, 1, 0],
        "in_answer": [0, 0, 0, 0, 1],
        "logprob": [0, -1, -3, -4, -5],
        "entropy": [10, 11, 13, 14, 15],
        "logit_grad": [20, 21, 23, 24, 25],
    }
    assert set(log.files) == set(expected)
    for name, values in expected.items():
        assert log[name].tolist() == pytest.approx(values)
    assert sum(log[name].dtype.itemsize for name in log.files) == 40
    assert [p.name for p in tmp_path.iterdir()] == ["step-000007.npz"]
