#!/usr/bin/env bash
# in short (trainers): PPOLearner cuts rewards to whole numbers: 0.9 trains as 0, and the log shows 0.9.
# guessed: Tunix's PPOLearner trains on the rewards that its reward functions return, which its docstring calls floats
# seen: it writes them into a table of whole numbers, so all between -1 and 1 are 0, and 1.9 is 1; JAX warns once of a
# cast. With a reward of 0.9 the step is the step of no reward, to the bit. rewards/score/mean logs 0.9 all the same,
# and rewards/reward/mean 0. The KL penalty is subtracted later and keeps its fraction
# with: google-tunix 0.1.7, jax 0.10.2, flax 0.12.8
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q google-tunix==0.1.7 jax==0.10.2 flax==0.12.8
JAX_PLATFORMS=cpu venv/bin/python -W ignore - 2>errors.txt <<'EOF' || { cat errors.txt; exit 1; }
import jax
import numpy as np
import optax
from flax import nnx
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.tests import test_common as toys

mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


def step(rewards):
    """One step of PPO on two prompts: the mean rewards that it logs, and the policy's weights after it."""
    def model():
        return toys.ToyTransformer(toys.ModelConfig(vocab_size=len(toys.MockVocab.DEFAULT_MAPPING)), rngs=nnx.Rngs(0))

    config = ClusterConfig(
        role_to_mesh={role: mesh for role in (Role.ACTOR, Role.CRITIC, Role.REFERENCE, Role.ROLLOUT)},
        training_config=RLTrainingConfig(
            actor_optimizer=optax.sgd(0.1), critic_optimizer=optax.sgd(0.1), eval_every_n_steps=10, max_steps=1),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=6, max_prompt_length=8, kv_cache_size=32, seed=jax.random.key(0)))
    logged = {}
    cluster = RLCluster(actor=model(), critic=toys.ToyTransformerWithScoreHead(model(), rngs=nnx.Rngs(1)),
                        reference=model(), tokenizer=toys.MockVocab(), cluster_config=config)
    keep = cluster.buffer_metrics
    cluster.buffer_metrics = lambda found, **rest: (logged.update(found), keep(found, **rest))[1]
    learner = PPOLearner(cluster, PPOConfig(), reward_fns=lambda prompts, completions, **columns: rewards)
    learner.train([{"prompts": np.array(["hello world", "My name"])}])
    means = [round(float(logged[f"rewards/{name}/mean"][0]), 6) for name in ("score", "reward")]
    weights = jax.tree.leaves(nnx.state(cluster.actor_trainer.model, nnx.Param))
    return means, np.concatenate([np.asarray(x).ravel() for x in weights])


_, none = step([0.0, 0.0])
for rewards in ([0.9, -0.5], [1.0, 0.0], [1.9, 0.3]):
    (score, reward), weights = step(rewards)
    print(f"rewards {rewards}: rewards/score/mean {score}, rewards/reward/mean {reward}, "
          f"weights differ from those without a reward by {abs(weights - none).max():.6f}")
    assert abs(score - np.mean(rewards)) < 1e-6 and abs(reward - np.mean(np.trunc(rewards))) < 0.01
    assert (weights == none).all() == (rewards == [0.9, -0.5])
EOF
