"""CreditTrainer beside TRL's own trainer, and beside ours on the same responses. Oracles: TRL, hand computation."""
import math
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

import countdown_task
from bridges.foreign import TASK
from bridges.trl import CreditTrainer
from grpo import compare, shape_reward, update
from methods import MITIGATIONS, ORDER
from mitigations import uniform
from plumbing.launch import BUNDLED
from plumbing.registry import assign_credit
from queries import Queries
from qwen2_model import save_model, to_checkpoint
from rollout import rollout
from start import load_policy, parse_flags

ROOT = Path(__file__).parents[1]
Q, G, LIMIT = 6, 4, 60
PUZZLES = countdown_task.load("train", 40)


def grader(name):
    """A reward function: this part of the reward of rows n."""
    def part(completions, n, **_):
        return [countdown_task.grade(text, PUZZLES[i])[name] for text, i in zip(completions, n)]
    part.__name__ = name
    return part


def make(cls, folder, config=None, model=BUNDLED, dtype=torch.float32, **options):
    """A trainer on the bundled model, with Countdown."""
    usual = dict(output_dir=str(folder), max_steps=3, per_device_train_batch_size=8, num_generations=G, use_cpu=True,
                 max_completion_length=40, bf16=False, learning_rate=2e-3, report_to=[], save_strategy="no", seed=3,
                 disable_tqdm=True, reward_weights=[1.0, 0.1], gradient_checkpointing=False, logging_steps=1)
    rows = [{"prompt": "".join(countdown_task.prompt(puzzle, False)), "n": i} for i, puzzle in enumerate(PUZZLES)]
    return cls(Qwen2ForCausalLM.from_pretrained(model, dtype=dtype), [grader("answer"), grader("format")],
               trl.GRPOConfig(**usual | (config or {})), **{"train_dataset": datasets.Dataset.from_list(rows)} | options,
               processing_class=PreTrainedTokenizerFast.from_pretrained(BUNDLED))


def trained(cls, folder, config=None, **options):
    """The weights after three steps, and what was logged, but for times and our own columns."""
    trainer = make(cls, folder, config, **options)
    trainer.train()
    ours = lambda name: any(word in name for word in ("time", "per_second", "credit/"))
    logs = [{name: x for name, x in row.items() if not ours(name)} for row in trainer.state.log_history]
    return {name: weight.detach() for name, weight in trainer.model.named_parameters()}, logs


def reads(batch):
    """GRPO's credit, after a look at all that is found late."""
    assert batch.entropy.shape == batch.logit_grad.shape == batch.role.shape
    return uniform(batch)


@pytest.mark.parametrize("config", [
    {}, dict(num_iterations=2), dict(steps_per_generation=4, gradient_accumulation_steps=2), dict(loss_type="grpo"),
    dict(gradient_accumulation_steps=2), dict(mask_truncated_completions=True, num_iterations=2), dict(beta=0.04),
    dict(loss_type="cispo", epsilon_high=1.2), dict(top_entropy_quantile=0.2), dict(bf16=True),
    dict(loss_type="grpo", importance_sampling_level="sequence")], ids=str)
def test_none_is_trl_to_the_bit(config, tmp_path):
    """Guards against anything that changes a run: a drawn number, a rounding, a mask, the order of rows."""
    expected = trained(trl.GRPOTrainer, tmp_path, config)
    start = Qwen2ForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).state_dict()
    assert max((weight - start[name]).abs().max() for name, weight in expected[0].items()) > 1e-3
    for credit in ("none", reads) if config.get("importance_sampling_level") != "sequence" else ("none",):
        weights, logs = trained(CreditTrainer, tmp_path, config, credit=credit)
        assert logs == expected[1] and all(torch.equal(weight, weights[name]) for name, weight in expected[0].items())


# ------------------------------------------------------------------------------------------- the same responses


def sample(folder, words=""):
    """Our batch in float64, its policy, and the model that sampled it in a folder."""
    s = parse_flags(shlex.split(words))[0]
    policy, s = load_policy(s), replace(s, answers=G, questions=Q, max_new_tokens=LIMIT, seed=0, micro_batch=99)
    policy.model.double()
    generator = torch.Generator().manual_seed(2)
    reference = load_policy(s).model.double()
    for weight in reference.parameters():
        weight.data += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
    save_model(policy.model, folder / "policy")
    save_model(reference, folder / "reference")
    policy = policy._replace(reference=reference)
    batch = rollout(policy, policy.task.load("train", Q), s, 1)
    batch.ask = Queries(policy, batch, s, 1)
    return batch, policy, s


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    return (folder := tmp_path_factory.mktemp("sampled")), *sample(folder)


def given(batch, monkeypatch):
    """Let TRL have our responses instead of its own: the rows that are this process's. Returns the reward functions."""
    whole = [[(x, 0) for t in range(n + 1) for x in ()] for n in batch.mask.sum(1).tolist()]
    for i, (row, said) in enumerate(zip(batch.tokens, batch.before)):
        tokens = row[batch.mask[i]].tolist()
        for t in range(len(tokens) + 1):
            whole[i] += [(token, 0) for token in said.get(t, ())] + [(token, 1) for token in tokens[t : t + 1]]
    now = []

    def generate(self, prompts):
        now[:] = range(len(prompts) * self.accelerator.process_index, len(prompts) * (1 + self.accelerator.process_index))
        masks = [[mine for _, mine in whole[i]] for i in now] if any(batch.before) else None
        ids, texts = [[token for token, _ in whole[i]] for i in now], [batch.text[i] for i in now]
        return [batch.prompts[i // G] for i in now], ids, masks, texts, None, {}, None, []
    monkeypatch.setattr(trl.GRPOTrainer, "_generate", generate)

    def part(name):
        found = lambda completions, **_: [batch.grades[name][i].item() for i in now]
        found.__name__ = name
        return found
    return [part(name) for name in batch.weights]


def on_ours(folder, batch, monkeypatch, config=None, **options):
    """A trainer on our batch, in float64, and TRL's batch with its credit."""
    parts = given(batch, monkeypatch)
    config = dict(per_device_train_batch_size=Q * G, max_completion_length=LIMIT, seed=0, shuffle_dataset=False,
                  reward_weights=[*batch.weights.values()]) | (config or {})
    rows = datasets.Dataset.from_dict({"prompt": [str(q) for q in range(Q)]})
    trainer = make(CreditTrainer, folder / "out", config, folder / "policy", torch.float64, train_dataset=rows, **options)
    trainer.reward_funcs, trainer.reward_func_names = parts, [part.__name__ for part in parts]
    if trainer.ref_model:
        trainer.ref_model.load_state_dict(
            Qwen2ForCausalLM.from_pretrained(folder / "reference", dtype=torch.float64).state_dict())
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer, trainer._generate_and_score_completions([{"prompt": str(i // G)} for i in range(Q * G)])


def ours(batch, policy, words):
    """Credit and gradient of train.py's step, by a checkpoint's names."""
    s, hyper_parameters, *_ = parse_flags([*shlex.split(words), f"--max_new_tokens={LIMIT}", "--micro_batch=99"])
    batch = replace(batch, advantage=compare(batch, s.advantage, shape_reward(batch, s)))
    batch.ask = Queries(policy, batch, s, 1)
    credit = assign_credit(batch, partial(MITIGATIONS[s.mitigation], **hyper_parameters), s)
    still = SimpleNamespace(zero_grad=policy.model.zero_grad, step=lambda norm: 0.0)
    update(policy, still, batch, credit, s)
    return credit, to_checkpoint({name: w.grad for name, w in policy.model.named_parameters()}, policy.model.config)


def cosine_and_norm(a, b):
    """The cosine of two gradients by name, and the ratio of their norms."""
    a, b = (torch.cat([x[name].flatten() for name in sorted(b)]).double() for x in (a, b))
    return (a @ b / a.norm() / b.norm()).item(), (a.norm() / b.norm()).item()


METHODS = ["none", "curious --bonus 0.1", "outcome_conditional", "token_type --filler 0.2", "inverse_logprob",
           "advantage_reweighting", "entropy_weighted", "entropy_ratio", "entropy_masking", "prefix_tree", "tempo",
           "optimal_baseline", "ktae", "reward_decomposition --weights 0.1,0.3,1", "first_error", "process_reward",
           "dpo", "random", "inverted", "shuffled", "share", "positives", "expert_iteration", "regrade_ablation --tokens"]


@pytest.mark.parametrize("words", METHODS)
def test_the_first_gradient_is_ours(words, sampled, monkeypatch):
    """Guards against another column, advantage, role or log-prob than train.py's, and another weight in the loss."""
    folder, batch, policy, _ = sampled
    puzzle = lambda row: batch.puzzles[int(row["prompt"])]
    task = SimpleNamespace(**vars(TASK) | dict(
        calculations=lambda text, row: countdown_task.calculations(text, puzzle(row)), PARTS=countdown_task.PARTS,
        grade=lambda text, row, *_: countdown_task.grade(text, puzzle(row))))
    name, *_ = words.split()
    _, hyper_parameters, *_ = parse_flags(["--mitigation", *words.split()])
    trainer, inputs = on_ours(folder, batch, monkeypatch, {"beta": 1e-12} if name == "dpo" else {}, advantage="grpo",
                              credit=partial(MITIGATIONS[name], **hyper_parameters), success="answer", format="format",
                              task=task)
    trainer.compute_loss(trainer.model, inputs).backward()
    credit, gradient = ours(batch, policy, f"--mitigation {words}")
    torch.testing.assert_close(inputs["advantages"][batch.mask], credit[batch.mask].to(inputs["advantages"]),
                               atol=1e-4, rtol=1e-4)
    found = cosine_and_norm(gradient, {name: w.grad for name, w in trainer.model.named_parameters()})
    assert found == pytest.approx((1, 1), abs=2e-5)
