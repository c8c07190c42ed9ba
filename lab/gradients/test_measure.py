"""Noise and bias: estimates by definition, gradients as training applies them, and the whole command."""
import math
import re
from copy import deepcopy

import numpy as np
import pytest
import torch

import countdown_task
import grpo
import start
from lab import heads, statistics
from lab.gradients import measure
from methods.registry import CREDIT_FUNCTIONS
from methods.heads import HEADS, Critic, Importance
from plumbing.optimizer import Optimizer
from plumbing.run_folder import copy_tokenizer
from qwen2_model import save_model
from rollout import Policy
from settings import Settings
from tasks import latin_task
from tests.fixtures import BUNDLED
from tests.plain import flat_gradient, plain_logprobs


def test_the_table_of_methods_by_definition():
    """Guards against pairs of a batch with itself, n for n - 1, figures in another row, another reference than the
    last, an interval of something else, and a cosine without a signal, also where two negative ones multiply."""
    x, n = np.random.default_rng(0).normal(size=(4, 9, 40)), 9  # three methods and the reference, batches, parameters
    x[:, :, 0] += np.array([5.0, -4.0, 0.0, 6.0])[:, None]
    x[1, :, 1] += 3
    x[2] -= x[2].mean(0)

    def crossed(a, b):
        return np.mean([a[i] @ b[j] for i in range(len(a)) for j in range(len(a)) if i != j])

    def signal(a, b):
        variance = a.var(0, ddof=1).sum()
        return (a.mean(0) @ a.mean(0) - variance / len(a)) / variance

    def cosine(a, b):
        return crossed(a, b) / (crossed(a, a) * crossed(b, b)) ** 0.5

    rows = measure.table_methods(measure.products(torch.tensor(x)), ["one", "two", "weak"]).rows
    weak = x[2] @ x[2].T
    assert rows[2][2] == "" and rows[3][2].startswith("1.00")
    assert math.isnan(measure.corrected_cosine(weak, weak, weak, np.ones(n, bool)))
    for i, j, figure in [(0, 1, signal), (1, 1, signal), (3, 1, signal), (0, 2, cosine), (1, 2, cosine)]:
        value = figure(x[i], x[3])
        without = [figure(*(np.delete(g, k, 0) for g in (x[i], x[3]))) for k in range(n)]
        half = 1.96 * (n - 1) * np.std(without, ddof=1) / n**0.5
        found = [float(text) for text in re.findall(r"-?\d+\.\d+", rows[i][j])]
        assert found == pytest.approx([value, value - half, value + half], abs=6e-3)


def test_method_gradients_are_what_training_applies(tokenizer, random_model, exact, monkeypatch):
    """Guards against another normalizer than training's, a prompt of another puzzle, and a policy gradient that is not
    the one of r - the others' mean."""
    few, s = {name: CREDIT_FUNCTIONS[name] for name in ("none", "random")}, Settings(responses=3, max_grad_norm=math.inf)
    monkeypatch.setattr(heads, "LIMIT", 9)
    random_model.real_vocab = tokenizer.size
    policy = Policy(random_model, tokenizer, countdown_task)
    puzzles = [countdown_task.Puzzle((3, 4, 5), 8), countdown_task.Puzzle((11, 2, 7), 30)]  # prompts of unequal length
    batches = [heads.sample(policy, puzzles, 3, (0, step)) for step in (1, 2)]
    for batch, lengths in zip(batches, ((9, 9, 9, 9, 3, 9), (2, 7, 5, 8, 1, 4))):
        batch.mask &= torch.arange(batch.mask.shape[1]) < torch.tensor(lengths)[:, None]
        batch.reward = torch.rand(6, generator=torch.Generator().manual_seed(1))
        batch.advantage = grpo.compare(batch)
    found = measure.method_gradients(batches, few.values())
    assert found.shape[:2] == (3, 2)
    for i, batch in enumerate(batches):
        for k, method in enumerate(few.values()):
            twin = deepcopy(random_model)
            grpo.update(policy._replace(model=twin), Optimizer(twin, 0.0), batch, method(batch), s)
            applied = -torch.cat([w.grad.flatten() for w in twin.parameters()])
            torch.testing.assert_close(found[k, i], applied, rtol=1e-4, atol=1e-5 * applied.abs().max().item())
        reward = batch.reward.view(2, 3)
        weight = (reward - (reward.sum(1, keepdim=True) - reward) / 2).view(6, 1) / 6
        prompts = [batch.prompts[g] for g in batch.group.tolist()]
        logprob = plain_logprobs(random_model, prompts, batch.tokens, batch.mask)
        torch.testing.assert_close(found[-1, i], flat_gradient(random_model, (weight * logprob).sum()))


def test_methods_without_their_heads_or_task_are_left_out():
    """Guards against a head that nobody fits, and the truth as a method beside itself."""
    assert CREDIT_FUNCTIONS.keys() - heads.fitted_methods(countdown_task) == {"oracle", "ppo_process"}
    assert CREDIT_FUNCTIONS.keys() - heads.fitted_methods(countdown_task, HEADS) == {"oracle"}
    assert not {"ppo", "learned_importance"} & heads.fitted_methods(countdown_task, ()).keys()
    assert "causal_ablation" not in heads.fitted_methods(latin_task)


@pytest.mark.slow
def test_the_whole_command(tokenizer, random_model, tmp_path, monkeypatch, run_program, refusal):
    """Guards against batches that share puzzles or random numbers, a table that is not written, a second call that
    gives other numbers, heads that are fitted again, or to the same responses or scored puzzles, and a traceback where
    no group has a gradient. Responses have at most 12 tokens, end anywhere and may earn something."""
    for name, value in {"LIMIT": 12, "SIZE": 4, "PUZZLES": 2, "RESAMPLES": 40, "BATCHES": 4,
                        "CRITIC_BATCHES": 3}.items():
        for module in (heads, measure, statistics):
            monkeypatch.setattr(module, name, value, raising=False)
    two = {name: CREDIT_FUNCTIONS[name] for name in ("none", "ppo")}
    monkeypatch.setattr(measure, "fitted_methods", lambda task: two)
    monkeypatch.setattr(countdown_task, "grade", lambda text, puzzle: {
        "answer": float(sum(map(ord, text)) % 3 == 0), "format": 0.5 * (len(text) % 3)})
    monkeypatch.setattr(tokenizer, "end_tokens", list(range(0, tokenizer.size, 8)))
    monkeypatch.setattr(start, "Tokenizer", lambda folder: tokenizer)
    copy_tokenizer(BUNDLED, tmp_path)
    save_model(random_model.float(), tmp_path)
    calls, fitted, learned, texts, sample = [], [], [], [], measure.sample
    for kind in (Critic, Importance):
        monkeypatch.setattr(kind, "learn", lambda head, batch, learn=kind.learn: (
            learned.append(type(head)), learn(head, batch)))
    monkeypatch.setattr(measure, "sample", lambda *arguments: calls.append(arguments) or sample(*arguments))
    monkeypatch.setattr(heads, "sample", lambda *arguments: fitted.append(arguments[1:]) or sample(*arguments))
    for _ in range(2):
        run_program(measure, "--model", tmp_path, "--out", tmp_path / "out")
        texts.append((tmp_path / "out" / "noise.md").read_text(encoding="utf-8"))
    assert [words[1:] for words in fitted] == [(1, (0, step)) for step in (1, 2, 3)]
    assert learned == [Critic, Importance] * 3
    assert {countdown_task.split(puzzle) for puzzles, *_ in fitted for puzzle in puzzles} == {"train"}
    assert [len(puzzles) for puzzles, *_ in fitted] == [4] * 3 and fitted[0][0] == fitted[2][0] != fitted[1][0]
    assert texts[0] == texts[1]
    stored = np.load(tmp_path / "out" / "noise.npz")
    assert str(measure.table_methods(stored["products"], stored["methods"])) == texts[0]
    assert texts[0].count("\n| ") == 4 and not re.search(r"\b(nan|inf)\b", texts[0])
    assert [key for *_, key, _ in calls[:4]] == [(0, 1000 + i) for i in range(4)]
    assert len({puzzle for _, puzzles, *_ in calls[:4] for puzzle in puzzles}) == 4 * 6
    one = "outcome_conditional", "--think_discount", "1", "--advantage", "rloo"  # the credit of none, by its default
    for words in (("none", "--advantage", "rloo"), one):
        run_program(measure, "--model", tmp_path, "--out", tmp_path / "one", "--mitigation", *words)
        texts.append((tmp_path / "one" / "noise.md").read_text(encoding="utf-8"))
    assert texts[2].splitlines()[-2].split("|")[2:] == texts[3].splitlines()[-2].split("|")[2:]
    assert f"| {' '.join(one)} |" in texts[3] and not list((tmp_path / "one").glob("*.safetensors"))
    of = "--out", tmp_path / "of", "--mitigation", "shuffled", "--of", "ppo"
    run_program(measure, "--model", tmp_path, *of)
    assert len(list((tmp_path / "of").glob("*.safetensors"))) == 2
    assert "process_critic, which is not fitted here" in refusal(measure, "--mitigation", "ppo_process")
    monkeypatch.setattr(countdown_task, "grade", lambda *_: dict.fromkeys(("answer", "format"), 0.0))
    assert "--model that solves some" in refusal(measure, "--out", tmp_path)
