"""verl's own method, config and queue, on a batch of ours. Runs in an environment of its own:

    pip install -r bridges/verl-requirements.txt
    VERL_USE_EXTERNAL_MODULES=bridges.verl python -m pytest -o addopts= bridges/test_verl.py
"""
import importlib.util
import os
import sys
from dataclasses import replace

import pytest
import torch

if not importlib.util.find_spec("verl"):
    pytest.skip("verl is not installed", allow_module_level=True)
import ray
from transformers import PreTrainedTokenizerFast
import transfer_queue
from hydra import compose, initialize_config_module
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base

import bridges.verl
from grpo import compare
from methods.registry import CREDIT_FUNCTIONS
from plumbing.launch import BUNDLED
from plumbing.tokenizer import Tokenizer
from rollout import rollout
from settings import Settings
from start import load_policy

Q, G = 6, 4
METHODS = {"none": {}, "entropy_ratio": {}, "token_type": {"filler": 0.2}, "inverse_logprob": {}, "prefix_tree": {},
           "outcome_conditional": {}, "advantage_reweighting": {}, "entropy_masking": {}, "tempo": {}}


@pytest.fixture(scope="module")
def batch():
    s = Settings(responses=G, questions=Q, max_new_tokens=60, seed=1)
    policy = load_policy(s)
    batch = rollout(policy, policy.task.load("train", Q), s, 1)
    assert 0 < batch.success.sum() < Q * G
    return batch


@pytest.fixture(scope="module")
def queue():
    """verl's queue, in a Ray of this machine."""
    ray.init(num_cpus=16, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}})
    transfer_queue.init()
    yield transfer_queue
    ray.shutdown()


def composed(*overrides):
    """verl's own config."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", ["algorithm.adv_estimator=grpo", f"actor_rollout_ref.rollout.n={G}",
                                       f"actor_rollout_ref.model.path={BUNDLED}", *overrides])


def advantages(batch, queue, *overrides):
    """What PPOTrainer._compute_advantage writes into the queue for the batch's responses, groups shuffled and with two
    rows of padding: their advantages (n,), in the batch's order, then those of the padding."""
    config = composed(*overrides)
    trainer = object.__new__(trainer_base.get_trainer_cls("sync"))
    trainer.config, trainer.use_reference_policy, trainer.global_steps = config, False, 1
    trainer.credit_reader = Tokenizer(BUNDLED)
    rows, order = {}, torch.randperm(Q * G, generator=torch.Generator().manual_seed(0)).tolist()
    for i in order:
        n, own = int(batch.mask[i].sum()), batch.mask[i]
        scores = torch.zeros(n)
        scores[-1] = batch.reward[i]
        rows[f"puzzle{batch.group[i]}_{i}_0"] = dict(
            uid=f"puzzle{batch.group[i]}", prompts=torch.tensor(batch.prompts[batch.group[i]]), rm_scores=scores,
            responses=batch.tokens[i][own], response_mask=own[own].long(), loss_mask=own[own].long(), old_log_probs=batch.logprob[i][own],
            rollout_log_probs=batch.logprob[i][own], entropy=batch.entropy[i][own])
    for k in range(2):
        zero, one = torch.zeros(1), torch.ones(1, dtype=torch.long)
        rows[f"padding_{k}_0"] = dict(uid="padding", prompts=one, responses=one, response_mask=one * 0, loss_mask=one * 0, rm_scores=zero,
                                      old_log_probs=zero, rollout_log_probs=zero, entropy=zero)
    for key, row in rows.items():
        queue.kv_put(key=key, partition_id="train", fields=row, tag={})
    meta, metrics = KVBatchMeta(keys=[*rows], partition_id="train", tags=[{} for _ in rows]), {}
    trainer._compute_advantage(meta, metrics)
    found = queue.kv_batch_get(keys=[*rows], partition_id="train", select_fields=["advantages"])["advantages"].unbind()
    queue.kv_clear(keys=[*rows], partition_id="train")
    return [found[order.index(i)] for i in range(Q * G)], found[Q * G :], metrics


def test_none_is_verl_to_the_bit(batch, queue):
    theirs, padding, metrics = advantages(batch, queue)
    assert "credit/std" not in metrics and torch.cat(theirs).std() > 0.5
    ours, padding, metrics = advantages(batch, queue, "+credit.name=none")
    assert all(map(torch.equal, theirs, ours)) and not torch.cat(padding).any()
    assert metrics["credit/std"] == pytest.approx(torch.cat(ours + list(padding)).std().item())


@pytest.mark.parametrize("name", METHODS)
def test_credit_is_ours(name, batch, queue):
    """verl's deviation is the unbiased one: ours is larger by sqrt(G / (G - 1)), up to its 1e-6 and our 1e-4."""
    words = [f"+credit.name={name}", *(f"+credit.{flag}={value}" for flag, value in METHODS[name].items())]
    found, *_ = advantages(batch, queue, *words)
    expected = CREDIT_FUNCTIONS[name](replace(batch, advantage=compare(batch)), **METHODS[name])[batch.mask]
    torch.testing.assert_close(torch.cat(found) * (G / (G - 1)) ** 0.5, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("words, said", [
    (["+credit.name=vineppo"], "vineppo needs continuations"), (["+credit.name=zzz"], "no credit function 'zzz'"),
    (["+credit.name=dpo"], "dpo needs reference"),
    (["+credit.name=none", "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean"], "the mean of their credit"),
    (["+credit=none"], r"as \+credit.name=NAME"), (["+credit.name=none", "+credit.normalize=token"], "=token is none of"),
    (["+credit.name=none", "algorithm.adv_estimator=rloo", "+credit.powerr=1"], "none takes no powerr")])
def test_what_cannot_work_is_one_sentence_before_a_model_is_loaded(words, said):
    with pytest.raises(ValueError, match=said):
        trainer_base.PPOTrainer.__init__(None, composed(*words))


def test_what_verl_does_not_tell_is_named(batch, queue):
    with pytest.raises(ValueError, match="does not tell batch.logit_grad"):
        advantages(batch, queue, "+credit.name=optimal_baseline")


def hand_made(**more):
    """Three responses of four tokens to two prompts."""
    ones = torch.ones(4)
    return dict(uid=["a", "a", "b"], prompts=[ones.long()] * 3, responses=[ones.long() * 5] * 3, loss_mask=[ones] * 3,
                response_mask=[ones] * 3, rm_scores=[ones] * 3, entropy=[torch.tensor([1.0, 2, 3, 4])] * 3,
                old_log_probs=[-ones] * 3, advantages=[ones, -ones, ones * 0]) | more


def test_several_advantages_of_a_response_are_refused():
    """As of GAE: the function would start from one of them."""
    with pytest.raises(ValueError, match="several advantages: take grpo"):
        bridges.verl.credit_of(hand_made(advantages=[torch.arange(4.0)] * 3), Tokenizer(BUNDLED), 1, "none")


def test_a_rejected_token_is_no_tools_reply():
    """By hand: no turn begins behind it, and it gets nothing; a response rejected whole ends no run. Nor does a group
    that lacks one. A tool's reply is one still."""
    kept = [torch.tensor([1.0, 0, 1, 1]), torch.zeros(4), torch.ones(4)]
    found, left_out = bridges.verl.credit_of(hand_made(
        response_mask=kept, advantages=[kept[0], kept[1], torch.zeros(4)]), Tokenizer(BUNDLED), 1, "turn_mean")
    assert [row.tolist() for row in found] == [[1, 0, 1, 1], [0] * 4, [0] * 4] and left_out == 0
    replied = dict(response_mask=kept, loss_mask=[kept[0], *[torch.ones(4)] * 2])
    found, _ = bridges.verl.credit_of(hand_made(**replied), Tokenizer(BUNDLED), 1, "turn_mean")
    assert found[0].tolist() == pytest.approx([1 / (8 / 3), 0, 3.5 / (8 / 3), 3.5 / (8 / 3)])  # H over its mean, by turns


def test_rows_of_one_rollout_are_no_answers_to_one_prompt():
    """An agent loop gives two rows of a rollout: the second one's prompt is another, and the first are as without it."""
    prompts = [torch.tensor([1, 2]), torch.tensor([1, 2]), torch.tensor([3, 4, 5])]
    data = hand_made(uid=["a"] * 3, prompts=prompts, responses=[torch.tensor([5, 6, x, 7]) for x in (8, 9, 8)])
    found, left_out = bridges.verl.credit_of(data, Tokenizer(BUNDLED), 1, "prefix_tree")
    two, _ = bridges.verl.credit_of({name: x[:2] for name, x in data.items()}, Tokenizer(BUNDLED), 1, "prefix_tree")
    assert left_out == 0 and all(map(torch.equal, found[:2], two)) and two[0][0] != two[0][2]
    alone, left_out = bridges.verl.credit_of(hand_made(uid=["a"] * 3, prompts=prompts), Tokenizer(BUNDLED), 1,
                                             "turn_baseline")
    assert left_out == 1 and not alone[2].any()


def test_the_tokenizer_is_verls(tmp_path, monkeypatch):
    """A model's name on a hub, ~ or a tokenizer elsewhere: verl has resolved them when its trainer is made."""
    config = composed("+credit.name=none", "actor_rollout_ref.model.path=somebody/a-model")
    monkeypatch.setattr(trainer_base.PPOTrainer, "__init__", bridges.verl.checked(
        lambda self, config: setattr(self, "tokenizer", PreTrainedTokenizerFast.from_pretrained(BUNDLED))))
    trainer = object.__new__(trainer_base.get_trainer_cls("sync"))
    trainer_base.PPOTrainer.__init__(trainer, config)
    text = "Use 3 and 4."
    assert trainer.credit_reader.encode(text) == Tokenizer(BUNDLED).encode(text)
