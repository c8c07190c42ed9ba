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
import transfer_queue
from hydra import compose, initialize_config_module
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base

import bridges.verl
from grpo import compare
from methods.registry import CREDIT_FUNCTIONS
from plumbing.launch import BUNDLED
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
    rows, order = {}, torch.randperm(Q * G, generator=torch.Generator().manual_seed(0)).tolist()
    for i in order:
        n, own = int(batch.mask[i].sum()), batch.mask[i]
        scores = torch.zeros(n)
        scores[-1] = batch.reward[i]
        rows[f"puzzle{batch.group[i]}_{i}_0"] = dict(
            uid=f"puzzle{batch.group[i]}", prompts=torch.tensor(batch.prompts[batch.group[i]]), rm_scores=scores,
            responses=batch.tokens[i][own], response_mask=own[own].long(), old_log_probs=batch.logprob[i][own],
            rollout_log_probs=batch.logprob[i][own], entropy=batch.entropy[i][own])
    for k in range(2):
        zero, one = torch.zeros(1), torch.ones(1, dtype=torch.long)
        rows[f"padding_{k}_0"] = dict(uid="padding", prompts=one, responses=one, response_mask=one * 0, rm_scores=zero,
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


def test_several_advantages_of_a_response_are_refused():
    """As of GAE: the function would start from one of them. And groups of unequal size."""
    ones = torch.ones(3)
    data = dict(uid=["a", "a"], prompts=[ones.long()] * 2, responses=[ones.long()] * 2, response_mask=[ones] * 2,
                rm_scores=[ones] * 2, advantages=[torch.arange(3.0), ones])
    with pytest.raises(ValueError, match="several advantages: take grpo"):
        bridges.verl.credit_of(data, BUNDLED, 1, "none")
    with pytest.raises(ValueError, match="unequal size"):
        bridges.verl.credit_of(data | {"uid": ["a", "b"], **{n: data[n] + data[n][:1] for n in data if n != "uid"}} | {
            "uid": ["a", "b", "b"]}, BUNDLED, 1, "none")
