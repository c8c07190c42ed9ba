"""The attention credit of the original's code: by hand, by loops over transformers' attention, and its scores."""
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import countdown_task
from lab.estimates import cell, read_table
from lab.original import attention
from lab.truth import score
from lab.truth.scoring import score as score_of
from methods import MITIGATIONS
from plumbing.report import Estimate
from queries import Queries
from rollout import rollout
from settings import Settings
from tests.fixtures import BUNDLED, make_batch


def test_weights_by_hand():
    """Guards against an answer that begins in time, a token that pays itself or gets its own, a last one that asks."""
    paid = torch.full((4, 6, 6), 9.0)
    paid[0, 4] = torch.tensor([0.1, 0.3, 0.2, 9, 9, 9])  # token 2, the one before the answer, asks; it is column 3
    paid[0, 5] = torch.tensor([0.2, 0.0, 0.4, 0.1, 9, 9])
    paid[1, 2, 0] = 0.3
    in_answer = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 0, 0, 0], [0] * 5, [1, 0, 0, 0, 0]]).bool()
    batch = make_batch([5, 2, 5, 1], [1.0] * 4, in_answer=in_answer)
    found = attention.input_weights(paid, batch, 2.0)
    # n is 3 and 2, so the weights are 0.5 + 2 (1 + a) / 4 and 0.5 + 2 (1 + a) / 3; without an answer, or where it is
    # the last token alone, 2.5.
    assert found[0].tolist() == pytest.approx([1.15, 1.15, 1.3, 1.05, 1, 1])
    assert found[1].tolist() == pytest.approx([0.5 + 2.6 / 3] + [0.5 + 2 / 3] * 5)
    assert (found[2:] == 2.5).all()
    assert attention.input_weights(paid, batch, 20.0)[0, 0] == 3


def coded(text, prompt, texts, M):
    """Their loops in words of our own: the weights of the len(text) - 1 inputs, from attention M between them."""
    starts = [i for i in range(len(texts)) if len("".join(texts[: i + 1])) >= "".join(texts).find("<answer>")]
    start = prompt + starts[0] if "<answer>" in "".join(texts) else len(text)
    weight, asked = torch.ones(len(text) - 1), range(start, len(text))
    for query in asked:
        if query < len(weight):
            weight[:query] += M[query, :query]
    if start < len(weight):
        weight /= len(asked) + 1
    return (0.5 + 2 * weight).clamp(0.1, 3)


@torch.no_grad()
def test_weights_by_loops_over_the_attention_of_transformers(policy):
    """Guards against a row or a column that is off by one, and a prompt's last token that is not there."""
    hf = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32, attn_implementation="eager").eval()
    s = Settings(answers=4, max_new_tokens=50)
    batch = rollout(policy, countdown_task.load("heldout", 3), s, step=0)
    batch.ask = Queries(policy, batch, s, 0)
    found = attention.attention_as_coded(batch)
    for i, L in enumerate(batch.mask.sum(1).tolist()):
        prompt = batch.prompts[batch.group[i]]
        text = prompt + batch.tokens[i, :L].tolist()
        M = hf(torch.tensor([text[:-1]]), output_attentions=True).attentions[-1][0].mean(0)
        expected = coded(text, len(prompt), [batch.text[i][a:b] for a, b in batch.spans[i]], M)
        torch.testing.assert_close(found[i, :L], expected[len(prompt) - 1 :], atol=1e-5, rtol=0)
    assert 0 < batch.in_answer.any(1).sum() < len(found)


def test_published_scores_come_out_again():
    """Guards against a figure that the published arrays do not give. (Cosines take a minute, and are left out.)"""
    truth = score.read_truth(score.TRUTH / "ground_truth.npz")
    batch = score.load_batch(truth, score.Options(), ())
    written = {row[0]: row[1:4] for row in read_table(attention.FILE, "Attention credit against A*")[1]}
    for name, credit in attention.forms(batch).items():
        s = score_of(credit[batch.mask].numpy(), truth["a_star"], truth, Estimate(0.0))
        assert [*map(cell, (s.location, s.within_spearman, s.within_pearson))] == written.pop(name)
    assert not written


def test_the_command_scores_it_without_rescaling(tmp_path, monkeypatch, capsys):
    """Guards against a function that no flag reaches; it is registered for this test alone."""
    scored = []
    monkeypatch.setattr(score, "own_scores", lambda *arguments: scored.extend(arguments) or [Estimate(0.5)] * 5)
    words = f"--mitigation attention_as_coded --normalize none --credit_scale 1 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["attention.py", *words.split()])
    try:
        attention.main()
    finally:
        MITIGATIONS.pop("attention_as_coded")
    assert "| attention_as_coded credit_scale=1.0 normalize=none (yours) |" in capsys.readouterr().out
    credit, batch, _ = scored
    assert credit == pytest.approx((batch.advantage[:, None] * attention.attention_as_coded(batch, 1.0))[batch.mask])
