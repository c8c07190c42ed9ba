"""Tests of sampler.py and the readers of methods/queries.py: the cache, sampling, and reading responses again.

The oracle is transformers, without cache, padding or batch. (tests/test_grpo.py has gradients through the caches.)
"""
import inspect
import math
import re
import textwrap
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qwen2_model
import sampler
from methods.queries import attention_paid, logprobs_without
from extras.prefixes import read_prefixes
from plumbing.compute import distinct_texts
from qwen2_model import Cache, Qwen2, load_model
from sampler import Rules, choose, draw, generate, logprobs_of, of_like_length, read_responses, states_of
from tests.random_checkpoints import HF, assert_close, both

REAL = 19  # tokens that exist; V - REAL rows of the embedding stand for none
PROMPTS = [[5, 1, 8, 2, 2, 9, 4], [5], [18, 1, 1], [18, 1, 1, 15, 2]]  # two begin another
ENDS = [3, 17]


def uniforms(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Random numbers (rows, columns), float64 in [0, 1)."""
    return torch.from_numpy(np.random.default_rng(seed).random((rows, columns)))


def random_model(family: str, folder, **options) -> tuple[torch.nn.Module, Qwen2]:
    """A small model of transformers, and ours, in float64, whose last V - REAL tokens would be the most likely ones."""
    hf, _ = both(family, folder, tie_word_embeddings=False, **options)
    with torch.no_grad():
        hf.lm_head.weight[REAL:] *= 3
    hf.save_pretrained(folder)
    model = load_model(folder, dtype=torch.float64)
    model.real_vocab = REAL
    return hf.double(), model


def as_batch(tokens: Tensor, mask: Tensor, group: Tensor) -> SimpleNamespace:
    """What `read` asks of a batch, of responses of one turn."""
    return SimpleNamespace(tokens=tokens, mask=mask, group=group, prompts=PROMPTS, before=({},) * len(tokens))


def walk(log_probs: list[float], u: float) -> int:
    """The token at which the cumulative softmax of the log-probs passes u."""
    largest = max(log_probs)
    weights = [math.exp(x - largest) for x in log_probs]
    total = math.fsum(weights)
    return next(token for token, so_far in enumerate(accumulate(weights)) if so_far / total > u)


def test_draw_keeps_the_tail_of_a_large_vocabulary_and_returns_no_impossible_token():
    """Guards against sums in fp32: below 1, its numbers are as far apart as nine tokens of this tail. And against a
    token of probability 0, and an index past the last token, at the extreme random numbers."""
    logits = torch.zeros(6, 151_936)
    logits[:, 0] = math.log(999 * 151_935)  # p = 0.999
    log_probs, u = logits.log_softmax(-1), 0.9991 + 0.0008 * uniforms(6, 1)[:, 0]
    assert draw(log_probs.exp(), u)[:, 0].tolist() == [walk(log_probs[0].tolist(), x) for x in u.tolist()]
    torch.manual_seed(0)
    log_probs = F.dropout(torch.rand(500, 37), 0.5).log().log_softmax(-1)  # half of them are impossible
    for u, end in ((0.0, 0), (np.nextafter(1.0, 0.0), -1)):
        expected = [row.isfinite().nonzero()[end].item() for row in log_probs]
        assert draw(log_probs.exp(), torch.full((500,), u, dtype=torch.float64))[:, 0].tolist() == expected


@torch.no_grad()
def naive_sample(hf: torch.nn.Module, prompt: list[int], row: list[float], excluded: int | None, temperature: float,
                 greedy: bool) -> tuple[list[int], Tensor]:
    """One response, and its log-prob, entropy and logit_grad (3, length), from their definitions."""
    response, statistics = [], []
    for u in row:
        logits = hf(torch.tensor([prompt + response])).logits[0, -1, :REAL] / temperature
        allowed = logits.tolist()
        if not response and excluded is not None:
            allowed[excluded] = -math.inf
        token = allowed.index(max(allowed)) if greedy else walk(allowed, u)
        p, onehot = logits.softmax(-1), F.one_hot(torch.tensor(token), REAL)
        statistics.append([p[token].log(), -(p * p.log()).sum(), (onehot - p).norm()])
        response.append(token)
        if token in ENDS:
            break
    return response, torch.tensor(statistics, dtype=torch.float64).T


@pytest.fixture
def way(request, monkeypatch):
    """How `generate` works: as on a CPU; drawing one row at a time; as on a GPU, without a graph."""
    if request.param == "row by row":
        monkeypatch.setattr(sampler, "LOGITS_AT_ONCE", 1)
    if request.param == "replayed":
        monkeypatch.setattr(sampler, "RECORDED_ON", ("cpu",))


def windowed(plain: torch.nn.Module, monkeypatch) -> torch.nn.Module:
    """The same weights with the sliding window of transformers; and with the line of docs/extend.md in our model."""
    page = (Path(sampler.__file__).parent / "docs" / "extend.md").read_text(encoding="utf-8")
    line, behind = re.search(r"\| `(sees &= .*)`, as a line behind `(.*)` in `Cache.sees` ", page).groups()
    source = textwrap.dedent(inspect.getsource(Cache.sees)).replace(behind, f"{behind}; {line}", 1)
    exec(source, names := vars(qwen2_model) | {})
    monkeypatch.setattr(Cache, "sees", names["sees"])
    hf = HF["qwen2"][1](HF["qwen2"][0].from_dict(plain.config.to_dict() | {
        "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "layer_types": None})).double()
    hf.load_state_dict(plain.state_dict())
    return hf.eval()


@pytest.mark.slow
@pytest.mark.parametrize("family, constrained, temperature, greedy, window, way", [
    ("qwen2", False, 1.0, False, False, ""), ("llama", True, 0.7, False, False, ""),
    ("qwen3", True, 0.7, True, False, ""), ("llama", False, 0.7, False, False, "row by row"),
    ("qwen2", True, 0.7, False, False, "row by row"), ("qwen3", False, 0.7, False, False, "replayed"),
    ("llama", True, 1.0, False, False, "replayed"), ("qwen2", True, 0.7, True, False, "replayed"),
    ("qwen2", False, 1.0, False, True, ""), ("qwen2", False, 1.0, False, True, "replayed")], indirect=["way"])
def test_generate_equals_a_naive_sampler(family, constrained, temperature, greedy, window, way, tmp_path, monkeypatch):
    """Guards against another prompt, padding, limit or token than meant, statistics of another distribution, an update
    that computes another log-prob than was sampled from, and, with a window, a mask that is made in another place."""
    hf, model = random_model(family, tmp_path)
    hf = windowed(hf, monkeypatch) if window else hf
    model.temperature = temperature
    B, T = 24, 7
    u, watched, limit, excluded = uniforms(B, T, seed=2), [], None, None
    if constrained:
        limit = torch.arange(B) % T + 1
        excluded = generate(model, PROMPTS, u, ENDS).tokens[:, 0]  # what would have come first
    s = generate(model, PROMPTS, u, ENDS, Rules(limit, excluded, greedy, lambda *progress: watched.append(progress)))
    expected = [naive_sample(hf, PROMPTS[i // 6], u[i, : limit[i] if constrained else T].tolist(),
                             excluded[i].item() if constrained else None, temperature, greedy) for i in range(B)]
    lengths = [len(response) for response, _ in expected]
    assert [row[mask].tolist() for row, mask in zip(s.tokens, s.mask)] == [response for response, _ in expected]
    assert s.ended.tolist() == [response[-1] in ENDS for response, _ in expected]
    assert s.mask.tolist() == [[t < n for t in range(max(lengths))] for n in lengths]
    assert not s.tokens[~s.mask].any()
    got = torch.stack((s.logprob, s.entropy, s.logit_grad), dim=1)  # (B, 3, T)
    assert got.dtype == torch.float64 and not got.requires_grad
    assert_close(got, torch.stack([F.pad(x, (0, max(lengths) - x.shape[1])) for _, x in expected]), 1e-5)
    assert_close(read_responses(model, as_batch(s.tokens, s.mask, torch.arange(B) // 6), torch.arange(B)), s.logprob, 1e-5)
    assert watched == [(t, sum(n > t for n in lengths) / B) for t in range(1, max(lengths) + 1)]
    assert len(set(lengths)) >= 4 and 0 < s.ended.sum() < B  # they end at different times, and some are cut off


@pytest.mark.parametrize("broken, name, way", [
    (math.nan, "norm", ""), (math.nan, "layers.1.down", "row by row"), (math.inf, "embedding", "replayed"),
    (math.inf, "embedding", "")], indirect=["way"])
def test_broken_weights_give_log_probs_that_are_not_finite(broken, name, way, tmp_path):
    """Guards against tokens drawn from NaN in silence, and against an index error in place of FloatingPointError."""
    _, model = random_model("qwen2", tmp_path)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[7] = broken
    s = generate(model, PROMPTS, uniforms(8, 5), ENDS)
    assert not s.logprob.isfinite().all()
    assert 0 <= s.tokens.min() and s.tokens.max() < REAL


def test_facts_of_tokens_keep_the_digits_of_float32(tmp_path):
    """Of a model in bfloat16; and of a token with p = 1 - 3e-9, which float32 rounds to 1: its logit gradient is that of
    float64."""
    _, model = random_model("qwen2", tmp_path)
    s = generate(model.bfloat16(), PROMPTS, uniforms(8, 5), ENDS)
    for found in (s.logprob, s.entropy, s.logit_grad):
        assert found.dtype == torch.float32 and not torch.equal(found, found.bfloat16().float())
    logits, u = torch.tensor([[0.0, -20, -21]]), torch.zeros(1, dtype=torch.float64)
    (_, fine), (_, found) = choose(logits.double(), u), choose(logits, u)
    assert found[0, 2].item() == pytest.approx(fine[0, 2].item(), rel=1e-5) and 0 < fine[0, 2] < 1e-8


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_prefixes_cut_out_of_longer_texts_are_as_if_read_alone(family, tmp_path):
    """Guards against a key that is not turned to its new column, turned the wrong way or twice, another row's text, and
    padding that is seen: the same tokens are drawn, with the same log-probs, in any order of the prompts."""
    _, model = random_model(family, tmp_path)
    prompts = [[5, 1, 8, 2, 2, 9, 4], [5, 1, 8], [18, 1, 1], [5], [18, 1, 1, 15, 2], [18, 1], [18, 1, 1], [7], [1, 8]]
    u, moved = uniforms(18, 6), Rules(read_prompts=read_prefixes)
    for order in (prompts, prompts[::-1], prompts[1:2] * 9, [[4], [4, 4]] * 3, [[5], [7]]):
        rows = u[: 2 * len(order)]
        alone, found = (generate(model, order, rows, ENDS, rules) for rules in (Rules(), moved))
        assert torch.equal(found.tokens, alone.tokens)
        assert_close(found.logprob, alone.logprob, 1e-12)
    assert generate(model, prompts, u, ENDS, moved).logprob.abs().max() > 1


@given(prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12))
def test_no_text_is_the_beginning_of_another(prompts):
    """Guards against a prompt that is read twice, or whose text begins with something else."""
    texts, text_of = distinct_texts(prompts)
    assert all(texts[i][: len(prompt)] == prompt for i, prompt in zip(text_of, prompts))
    assert sum(other[: len(text)] == text for other in texts for text in texts) == len(texts)  # each itself alone
    assert all(text in prompts for text in texts)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), at_once=st.integers(1, 5))
def test_rows_of_like_length_are_all_rows_with_little_padding(lengths, at_once):
    """Guards against a row that is lost or read twice, too many for the memory, parts that could be one, and padding
    of more than a third."""
    groups = of_like_length(torch.tensor(lengths), at_once)
    assert sorted(torch.cat(groups).tolist()) == [*range(len(lengths))]
    assert all(lengths[a[0]] >= lengths[a[-1]] >= lengths[b[0]] for a, b in pairwise([*groups, groups[-1][-1:]]))
    assert all(len(a) == at_once or lengths[b[0]] < 0.75 * lengths[a[0]] for a, b in pairwise(groups))
    assert max(map(len, groups)) <= at_once
    assert all(min(own) >= 0.75 * max(own) for own in ([lengths[i] for i in group] for group in groups))


@torch.no_grad()
@pytest.mark.parametrize("family, options, like", [
    ("qwen2", {}, 0.1), ("qwen3", {"num_key_value_heads": 6}, 0.75), ("llama", {"num_key_value_heads": 1}, 0.99),
    ("qwen3", {"num_hidden_layers": 1, "head_dim": 16}, 0.99)])
def test_states_attention_and_hidden_tokens_equal_transformers(family, options, like, tmp_path, monkeypatch):
    """Guards against another layer, scale or column, padding that is seen, hidden tokens that shift the others, and
    rows that get what belongs to others of their length, or are left out."""
    monkeypatch.setattr(sampler, "LIKE", like)
    hf, model = random_model(family, tmp_path, **options)
    hf.set_attn_implementation("eager")
    mask, puzzle = torch.arange(8) < torch.tensor([6, 1, 5, 6])[:, None], torch.tensor([2, 1, 3, 2])  # (B, T), (B,)
    tokens = torch.randint(REAL, mask.shape, generator=torch.Generator().manual_seed(0))  # in the padding, too
    hide = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    hide[0, 0] = True
    asked = partial(read_responses, model, as_batch(tokens, mask, puzzle), torch.arange(4))
    attention, states = asked(partial(attention_paid, T=8)), asked(states_of)  # (B, T, T), (B, T, D)
    without = asked(logprobs_without, [hide])  # (B, T)
    assert (without - asked(logprobs_of)).abs().max() > 0.1
    for i, L in enumerate(mask.sum(1).tolist()):
        prompt = PROMPTS[puzzle[i]]
        P, row = len(prompt), torch.tensor([prompt + tokens[i, :L].tolist()])
        found = hf(row, output_attentions=True, output_hidden_states=True)
        assert_close(states[i, :L], found.hidden_states[-1][0, P - 1 : -1], 1e-5)
        assert_close(attention[i, :L, :L], found.attentions[-1][0].mean(0)[P - 1 : -1, P:].tril(-1), 1e-5)  # (L, L)
        hidden = F.pad(hide[i, :L], (P, 0))  # (P + L,)
        blocked = (hidden & ~torch.eye(P + L, dtype=bool)) | torch.ones(P + L, P + L, dtype=bool).triu(1)
        bias = torch.zeros(1, 1, P + L, P + L, dtype=torch.float64).masked_fill(blocked, -1e300)
        logits = hf(row, attention_mask=bias, position_ids=torch.arange(P + L)[None]).logits[0, P - 1 : -1, :REAL]
        assert_close(without[i, :L], logits.log_softmax(-1)[torch.arange(L), tokens[i, :L]], 1e-5)
    short = read_responses(model, as_batch(tokens[:, :1], mask[:, :1], puzzle), torch.arange(4), partial(attention_paid, T=1))
    assert short.tolist() == [[[0.0]]] * 4
    assert attention[0].count_nonzero() == 15  # of tokens 1 to 5 to the ones before them
