"""What several test files need: the bundled tokenizer, a small random model, and a batch made by hand."""

import dataclasses
import itertools
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from countdown_task import Codec, annotate, find_steps
from mitigations import TokenBatch
from qwen2_model import Qwen2, read_config
from train import BUNDLED


@pytest.fixture(scope="session")
def codec():
    """The tokenizer of the bundled model."""
    return Codec(BUNDLED)


@pytest.fixture
def random_model(codec):
    """A two-layer Qwen2 with large random weights, in float64, so that gradients can be compared to rounding."""
    torch.manual_seed(0)
    config = read_config(
        {
            "model_type": "qwen2",
            "vocab_size": codec.size,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        }
    )
    model = Qwen2(config).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.fixture
def exact():
    """All in float64: two ways to compute the same agree to 1e-10."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def unasked(*_):
    """Stands for a callable of the TokenBatch that a test did not expect to be called."""
    raise AssertionError("this method asked the model")


def make_batch(lengths, advantages, groups=None, **fields) -> TokenBatch:
    """A TokenBatch with responses of the given lengths and everything a test does not name left neutral."""
    B, T, Q = len(lengths), max(lengths), 1 + max(groups or [0])
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    neutral = dict(
        tokens=torch.zeros(B, T, dtype=torch.long),
        mask=mask,
        logprob=-torch.ones(B, T) * mask,
        entropy=torch.ones(B, T) * mask,
        logit_grad=torch.ones(B, T) * mask,
        reward=torch.zeros(B),
        success=torch.zeros(B),
        format=torch.ones(B),
        ended=torch.ones(B, dtype=torch.bool),
        group=torch.tensor(groups or [0] * B),
        numbers=[(1, 2, 3)] * Q,
        target=[6] * Q,
        advantage=torch.tensor(advantages),
        role=torch.zeros(B, T, dtype=torch.int8),
        in_answer=torch.zeros(B, T, dtype=torch.bool),
        text=[""] * B,
        spans=[[(0, 0)] * n for n in lengths],
        steps=[[]] * B,
        normalize="response",
        generator=lambda name: torch.Generator().manual_seed(0),
        **dict.fromkeys(("hidden", "attention", "values", "reference_logprob", "logprob_without", "rollouts"), unasked),
    )
    return TokenBatch(**neutral | fields)


def make_written(pieces, advantages, groups=None, **fields) -> TokenBatch:
    """make_batch of responses given as the text of each of their tokens; a last piece "" is the end token."""
    texts, lengths = ["".join(row) for row in pieces], [len(row) for row in pieces]
    spans = []
    for row in pieces:
        stops = list(itertools.accumulate(map(len, row)))
        spans.append([(stop - len(piece), stop) for piece, stop in zip(row, stops)])
    batch = make_batch(lengths, advantages, groups, text=texts, spans=spans, steps=[find_steps(t) for t in texts])
    for i, length in enumerate(lengths):
        role, in_answer = annotate(texts[i], spans[i])
        batch.role[i, :length], batch.in_answer[i, :length] = torch.from_numpy(role), torch.from_numpy(in_answer)
    batch.ended = torch.tensor([row[-1] == "" for row in pieces])
    return dataclasses.replace(batch, **fields)
