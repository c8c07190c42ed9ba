#!/usr/bin/env bash
# in short (trainers): Recurrent PPO reads returns on into the next episode where one was truncated,
# time_limit_bootstrap or not.
# guessed: where an episode of skrl is truncated, its returns take nothing from the episode behind it: they end in gamma
# times the value of the last observation with time_limit_bootstrap, in PPO as in its recurrent twin PPO_RNN
# seen: PPO is right with that option. PPO_RNN adds gamma times the value of the observation before, and then reads on
# over the cut, so an episode that was cut off is paid for what the next one earns; A2C_RNN, RPO_RNN and TRPO_RNN have
# the same lines. Without the option, which is the default, PPO reads on, too, silently. A limit of length is such a cut
# with: skrl 2.1.1, gymnasium 1.4.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q skrl==2.1.1 gymnasium==1.4.0 torch==2.13.0
venv/bin/python -W ignore - 2>errors.txt <<'EOF' || { cat errors.txt; exit 1; }
import gymnasium
import torch
from skrl.agents.torch.ppo import PPO, PPO_CFG, PPO_RNN
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model

spaces = dict(observation_space=gymnasium.spaces.Box(-100, 100, (1,)), action_space=gymnasium.spaces.Discrete(2))


def network(mixin, function):
    class Network(mixin, Model):
        def __init__(self):
            Model.__init__(self, **spaces, device="cpu")
            mixin.__init__(self)
            self.weight = torch.nn.Parameter(torch.ones(1))
        def compute(self, inputs, role):
            return function(inputs["observations"], self.weight), {}
    return Network()


# an observation, which is its own value, the next one, reward, terminated, truncated: two episodes, the first cut off
steps = [(10, 10, 0, 0, 0), (10, 4, 0, 0, 1), (1, 1, 0, 0, 0), (1, 0, 100, 1, 0)]


def returns(kind, bootstrap):
    models = {"policy": network(CategoricalMixin, lambda x, weight: weight.expand(len(x), 2)),
              "value": network(DeterministicMixin, lambda x, weight: x * weight)}
    agent = kind(models=models, memory=RandomMemory(memory_size=4, num_envs=1, device="cpu"), device="cpu", **spaces,
                 cfg=PPO_CFG(rollouts=4, discount_factor=0.9, gae_lambda=1.0, time_limit_bootstrap=bootstrap))
    agent.init()
    agent.enable_training_mode(True)
    for now, then, reward, terminated, truncated in torch.tensor(steps).float().view(4, 5, 1, 1):
        with torch.no_grad():  # as skrl's trainers do
            agent.record_transition(
                actions=agent.act(now, None, timestep=0, timesteps=4)[0], observations=now, next_observations=then,
                rewards=reward, terminated=terminated.bool(), truncated=truncated.bool(), infos={}, states=None,
                next_states=None, timestep=0, timesteps=4)
    agent.update(timestep=0, timesteps=4)
    return agent.memory.get_tensor_by_name("returns").flatten()


for kind, bootstrap, last in ((PPO, True, 0.9 * 4), (PPO_RNN, True, 0.9 * 10 + 0.9 * 90), (PPO, False, 0.9 * 90)):
    print(f"{kind.__name__}, time_limit_bootstrap {bootstrap}: returns {returns(kind, bootstrap).tolist()}")
    assert torch.allclose(returns(kind, bootstrap), torch.tensor([0.9 * last, last, 90.0, 100.0]))
EOF
