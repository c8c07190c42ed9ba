"""The critic and the importance head: what they compute, how they learn, what they must not know, and their files."""
import re
import statistics
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from methods.heads import HEADS, Critic, Importance, load_head, save_head
from qwen2_model import load_model
from tests.fixtures import BUNDLED, make_batch

ADAMW = partial(torch.optim.AdamW, lr=5e-4, weight_decay=0.0)  # the heads' own
MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]).bool()
REWARD, SUCCESS = torch.tensor([1.1, 0.0, 0.1, -1.5]), torch.tensor([1.0, 0, 0, 1])
HIDDEN = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(0)) * 3 + 1  # four responses
STATES, TARGET = HIDDEN[MASK], REWARD[MASK.nonzero()[:, 0]]  # (N, 8), (N,) of their tokens


def random_head(name="critic", size=8):
    """A head whose numbers are not all 0."""
    torch.manual_seed(0)
    head = HEADS[name](size)
    for p in head.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return head


def batch_of(**fields):
    """The four responses."""
    return make_batch(MASK.sum(1).tolist(), [9.0] * 4, hidden=HIDDEN, **fields)


def weights(model):
    """All parameters in one row."""
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def value_by_hand(probe, x):
    """The numbers (N,) of hidden states (N, D), in plain formulas."""
    x = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    y = x @ probe.inner.weight.T + probe.inner.bias
    return (y / (1 + (-y).exp())) @ probe.outer.weight[0] + probe.outer.bias[0]


def test_values_by_hand_and_zero_on_padding():
    """Guards against another network, a new critic that prefers some states, and values rounded to bfloat16."""
    critic = random_head()
    values = critic.read(HIDDEN, MASK)
    torch.testing.assert_close(values[MASK], value_by_hand(critic.value, STATES), atol=1e-5, rtol=0)
    assert not values[~MASK].any()
    assert not Critic(8).read(HIDDEN, MASK).any() and torch.equal(weights(Critic(8)), weights(Critic(8)))
    assert torch.equal(critic.read(HIDDEN.bfloat16(), MASK), critic.read(HIDDEN.bfloat16().float(), MASK))


def four_steps(head, loss, make_optimizer=ADAMW):
    """The weights after four steps on a loss of the head."""
    optimizer = make_optimizer(head.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        loss(head).backward()
        optimizer.step()
    return weights(head)


def value_loss(critic, clip):
    """PPO's value loss, a mean over tokens."""
    value, old = value_by_hand(critic.value, STATES), value_by_hand(random_head().value, STATES).detach()  # (N,) each
    move = value - old
    near = torch.where(move.abs() <= clip, value, old + clip * move.sign())
    return 0.5 * torch.stack(((value - TARGET) ** 2, (near - TARGET) ** 2)).amax(0).mean()


@pytest.mark.parametrize("make_optimizer, fast", [
    (ADAMW, False), (partial(torch.optim.SGD, lr=0.3), True),  # steps so large that values are clipped
], ids=["AdamW", "SGD"])
def test_a_critic_learns_by_hand(make_optimizer, fast):
    """Guards against min for max, a clip around the target, padding in the mean, another scale, rate or decay, and a
    loss or share of variance that a critic could only have once it knew the rewards."""
    critic, expected = random_head(), four_steps(random_head(), partial(value_loss, clip=0.2), make_optimizer)
    if fast:
        critic.optimizer = make_optimizer(critic.parameters())
    errors, target = (TARGET - value_by_hand(critic.value, STATES)).tolist(), TARGET.tolist()
    assert critic.learn(batch_of(reward=REWARD)) == {
        "critic_loss": pytest.approx(sum(e * e for e in errors) / 2 / len(errors), rel=1e-5),
        "explained_variance": pytest.approx(1 - statistics.pvariance(errors) / statistics.pvariance(target), rel=1e-4)}
    torch.testing.assert_close(weights(critic), expected, rtol=0, atol=1e-3 if fast else 1e-4)
    unclipped = four_steps(random_head(), partial(value_loss, clip=9.0), make_optimizer)
    assert ((expected - unclipped).abs().max() > 0.02) == fast
    assert critic.learn(batch_of(reward=torch.full((4,), 100.1)))["explained_variance"] is None


def pooled_by_hand(head, i):
    """The weights of the tokens of response i, and the logit of its success."""
    size, value = value_by_hand(head.score, HIDDEN[i, MASK[i]]).exp(), value_by_hand(head.value, HIDDEN[i, MASK[i]])
    return size / size.sum(), (size * value).sum() / size.sum()


def importance_loss(head):
    """The cross entropy of success, response by response."""
    p = [pooled_by_hand(head, i)[1].sigmoid() for i in range(4)]
    return -sum(torch.log(q if right else 1 - q) for q, right in zip(p, SUCCESS)) / 4


def test_a_critic_learns_large_rewards_as_fast_as_small_ones():
    """64 times the reward is exactly 64 times the values: Adam sees the same. Guards against V in units of the scale, a
    jump where a larger reward comes, and a head of before that no longer loads."""
    def critic_after(rewards):
        critic, generator, columns = Critic(8), torch.Generator().manual_seed(0), []
        for reward in rewards:
            hidden, mask = torch.randn(2, 5, 8, generator=generator), torch.ones(2, 5).bool()
            batch = SimpleNamespace(ask=SimpleNamespace(hidden=hidden), mask=mask, logprob=torch.zeros(2, 5),
                                    reward=torch.tensor([reward, 0.5 * reward], dtype=torch.float64))
            columns.append(critic.learn(batch))
        return critic, critic.read(hidden, mask), columns, hidden, mask
    _, small, few, *_ = critic_after([1.0] * 5)
    critic, large, many, hidden, mask = critic_after([64.0] * 5)
    assert torch.equal(large, 64 * small) and small.any() and critic.scale == 64
    assert [row["critic_loss"] for row in many] == pytest.approx([64**2 * row["critic_loss"] for row in few])
    assert [row["explained_variance"] for row in many] == pytest.approx([row["explained_variance"] for row in few])
    before = critic.read(hidden, mask)
    critic.fit_scale(torch.tensor([-300.0, 2.0]))
    assert critic.scale == 256
    torch.testing.assert_close(critic.read(hidden, mask), before)
    critic.fit_scale(torch.tensor([3.0]))
    assert critic.scale == 256
    critic.load_state_dict({name: x for name, x in critic.state_dict().items() if name != "scale"})
    assert critic.scale == 1


def test_importance_and_what_it_learns_by_hand():
    """Guards against padding in the softmax, scores and values swapped, a new head that prefers some tokens, another
    loss, a mean over tokens, and a head that trains only its scores or its values."""
    head, by_hand = random_head("importance"), random_head("importance")
    found, logits = head.read(HIDDEN, MASK), head(HIDDEN, MASK)
    for i in range(4):
        expected, logit = pooled_by_hand(head, i)
        assert found[i].tolist() == pytest.approx(expected.tolist() + [0.0] * (4 - len(expected)), abs=1e-5)
        assert logits[i].item() == pytest.approx(logit.item(), abs=1e-5)
    assert torch.equal(Importance(8).read(HIDDEN, MASK), MASK / MASK.sum(1, keepdim=True))
    four_steps(by_hand, importance_loss)
    head.learn(batch_of(success=SUCCESS))
    for one in (head, by_hand):
        one.score.outer.bias.data.zero_()  # no softmax depends on it, so that rounding alone moves it
    torch.testing.assert_close(weights(head), weights(by_hand), rtol=0, atol=1e-4)
    assert (weights(head) - weights(random_head("importance"))).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["critic", "importance"])
def test_a_saved_head_comes_back_a_missing_one_is_new_and_another_is_refused(name, tmp_path):
    """Guards against a tensor that is not saved, a file that is not read, and a head that silently starts anew."""
    model, file = load_model(BUNDLED), tmp_path / f"{name}.safetensors"
    assert torch.equal(weights(load_head(name, tmp_path, model)), weights(HEADS[name](128)))
    save_head(name, random_head(name, 128), tmp_path)
    assert torch.equal(weights(load_head(name, tmp_path, model)), weights(random_head(name, 128)))
    for write in (lambda: save_head(name, random_head(name, 64), tmp_path), lambda: file.write_text("no tensors")):
        write()
        with pytest.raises(ValueError, match=re.escape(f"{file} is broken or another model's")):
            load_head(name, tmp_path, model)
