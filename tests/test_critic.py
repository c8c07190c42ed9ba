"""The critic: what it computes, how it learns, what it must not know, and its file.

Run it:  python -m pytest tests/test_critic.py
"""
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

import grpo
from countdown_task import Puzzle
from critic import FILE, Critic, load_critic
from qwen2_model import load_model
from train import BUNDLED

MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]).bool()
REWARD = torch.tensor([1.1, 0.0, 0.1, -1.5])


def states(seed=0, rows=4, size=8):
    """Random hidden states (rows, 4, size)."""
    return torch.randn(rows, 4, size, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def random_critic(size=8):
    """A critic whose values are not all 0."""
    torch.manual_seed(0)
    critic = Critic(size)
    torch.nn.init.normal_(critic.outer.weight, std=0.5)
    torch.nn.init.normal_(critic.outer.bias)
    return critic


def weights(model):
    """All parameters in one row."""
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def value_by_hand(critic, x):
    """The value () of one hidden state (D,), in plain formulas."""
    x = (x - x.mean()) / ((x - x.mean()).square().mean() + 1e-5).sqrt()
    y = critic.inner.weight @ x + critic.inner.bias
    return critic.outer.weight[0] @ (y / (1 + (-y).exp())) + critic.outer.bias[0]


def test_values_by_hand_and_zero_on_padding():
    """Guards against another network than the documented one, padding with a value, and an untrained critic that
    prefers some states or differs from run to run."""
    critic, hidden = random_critic(), states()
    values = critic.values(hidden, MASK)
    for i, t in MASK.nonzero().tolist():
        assert values[i, t].item() == pytest.approx(value_by_hand(critic, hidden[i, t]).item(), abs=1e-5)
    assert values.std() > 0.1
    assert not values[~MASK].any()
    assert not values.requires_grad
    assert not Critic(8).values(hidden, MASK).any()
    assert torch.equal(weights(Critic(8)), weights(Critic(8)))
    assert len(weights(critic)) == 8 * 8 + 8 + 8 + 1


def test_bfloat16_states_are_computed_in_float32():
    """Guards against values rounded to bfloat16: methods use the differences between neighbours."""
    critic, hidden = random_critic(), states().bfloat16()
    values = critic.values(hidden, MASK)
    assert torch.equal(values, random_critic().values(hidden.float(), MASK))
    assert not torch.equal(values, values.bfloat16().float())
    critic.learn(hidden, MASK, values, REWARD)
    assert not torch.equal(weights(critic), weights(random_critic()))


def learn_by_hand(hidden, make_optimizer, clip):
    """Weights after four steps on PPO's value loss, token by token, and how often the clip took hold."""
    critic, tokens, clipped = random_critic(), MASK.nonzero().tolist(), 0
    optimizer = make_optimizer(critic.parameters())
    old = {(i, t): value_by_hand(critic, hidden[i, t]).item() for i, t in tokens}
    for _ in range(4):
        loss = 0.0
        for i, t in tokens:
            value, r = value_by_hand(critic, hidden[i, t]), REWARD[i].item()
            move = value.item() - old[i, t]
            near = value if abs(move) <= clip else torch.tensor(old[i, t] + math.copysign(clip, move))
            clipped += bool((near - r) ** 2 > (value - r) ** 2)
            loss = loss + 0.5 * max((value - r) ** 2, (near - r) ** 2) / len(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(critic), clipped


@pytest.mark.parametrize("make_optimizer, fast", [
    (lambda p: torch.optim.AdamW(p, 5e-4, weight_decay=0.0), False),
    (lambda p: torch.optim.SGD(p, 0.3), True), (lambda p: torch.optim.AdamW(p, 0.03), True),
], ids=["its own", "fast SGD", "fast AdamW"])  # fmt: skip
def test_learning_by_hand(make_optimizer, fast):
    """Guards against min for max, a clip around the target, padding in the mean, another scale, rate or decay."""
    critic, hidden = random_critic(), states()
    if fast:  # steps so large that values are clipped
        critic.optimizer = make_optimizer(critic.parameters())
    (expected, clipped), (unclipped, _) = (learn_by_hand(hidden, make_optimizer, clip) for clip in (0.2, 9.0))
    critic.learn(hidden, MASK, critic.values(hidden, MASK), REWARD)
    torch.testing.assert_close(weights(critic), expected, rtol=0, atol=1e-3 if fast else 1e-4)
    assert (clipped > 0) == fast
    assert ((expected - unclipped).abs().max() > 0.02) == fast


def test_it_converges_to_the_mean_reward():
    """Guards against targets made of its own estimates, a discount, and a clip that never lets go."""
    critic, hidden = Critic(128), states(0, 1, 128)[:, :1].expand(4, 4, 128)
    for _ in range(100):
        critic.learn(hidden, MASK, critic.values(hidden, MASK), REWARD)
    mean = (MASK * REWARD[:, None])[MASK].mean().item()
    assert critic.values(hidden, MASK)[MASK].tolist() == pytest.approx([mean] * 10, abs=0.02)


def test_values_of_a_batch_know_neither_its_rewards_nor_move_the_model(codec):
    """Guards against values that change once the rewards are known, and a critic that trains the policy."""
    model, critic, values = load_model(BUNDLED), random_critic(128), []
    model.real_vocab, start, policy = codec.size, weights(critic), weights(model)
    for reward in (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])):
        torch.nn.utils.vector_to_parameters(start.clone(), critic.parameters())
        ask = grpo.rollout(model, codec, [Puzzle((4, 3, 5), 8)], grpo.draw_uniforms(0, 1, 1, 2, 9), critic=critic).ask
        values.append(ask.values.clone())
        critic.learn(ask.hidden, ask.samples.mask, ask.values, reward)
        assert torch.equal(ask.values, values[-1])
        assert not torch.equal(weights(critic), start)
    assert torch.equal(*values)
    assert torch.equal(weights(model), policy)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


# ---------------------------------------------------------------------------------------------------- its file


@pytest.fixture
def saved(tmp_path):
    """The file of a critic for the bundled model."""
    random_critic(128).save(tmp_path)
    return tmp_path / FILE


def test_a_saved_critic_comes_back(saved):
    """Guards against a tensor that is not saved, and a file that is not read."""
    model = load_model(BUNDLED)
    assert torch.equal(weights(load_critic(saved.parent, model)), weights(random_critic(128)))
    assert [file.name for file in saved.parent.iterdir()] == ["critic.safetensors"]
    saved.unlink()
    assert not load_critic(saved.parent, model).values(states(0, 4, 128), MASK).any()  # a new one


def change_tensors(file, change):
    """Rewrite the file with other tensors."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("damage", [
    lambda file: file.write_bytes(b""),
    lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\n"),
    lambda file: file.write_bytes(file.read_bytes()[:-1000]),
    lambda file: Critic(64).save(file.parent),
    lambda file: change_tensors(file, lambda tensors: tensors.pop("inner.bias")),
    lambda file: change_tensors(file, lambda tensors: tensors.update(extra=torch.ones(1))),
], ids=["empty", "text", "truncated", "another size", "a tensor missing", "a tensor too many"])  # fmt: skip
def test_a_broken_file_is_named_in_one_sentence(damage, saved):
    """Guards against a traceback, and against a critic that silently starts anew."""
    damage(saved)
    with pytest.raises(ValueError) as caught:
        load_critic(saved.parent, load_model(BUNDLED))
    assert str(saved) in str(caught.value)
    assert "\n" not in str(caught.value)
