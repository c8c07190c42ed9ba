"""The critic and the importance head: what they compute, how they learn, what they must not know, and their files."""
import math
import re
import statistics

import pytest
import torch

from countdown_task import Puzzle
from methods.heads import HEADS, Critic, Importance, load_head, save_head
from qwen2_model import load_model
from rollout import rollout
from tests.fixtures import BUNDLED, make_batch, make_written
from train import Settings

MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]).bool()
REWARD = torch.tensor([1.1, 0.0, 0.1, -1.5])
HIDDEN = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(0)) * 3 + 1  # four responses


def random_critic(size=8):
    """A critic whose values are not all 0."""
    torch.manual_seed(0)
    critic = Critic(size)
    torch.nn.init.normal_(critic.value.outer.weight, std=0.5)
    torch.nn.init.normal_(critic.value.outer.bias)
    return critic


def batch_of(hidden=HIDDEN, mask=MASK, **fields):
    """The responses of these hidden states."""
    return make_batch(mask.sum(1).tolist(), [9.0] * len(mask), hidden=hidden, **fields)


def weights(model):
    """All parameters in one row."""
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def value_by_hand(head, x):
    """The number () of one hidden state (D,), in plain formulas."""
    x = (x - x.mean()) / ((x - x.mean()).square().mean() + 1e-5).sqrt()
    y = head.inner.weight @ x + head.inner.bias
    return head.outer.weight[0] @ (y / (1 + (-y).exp())) + head.outer.bias[0]


def test_values_by_hand_and_zero_on_padding():
    """Guards against another network, padding with a value, and a new critic that prefers some states."""
    critic = random_critic()
    values = critic.read(HIDDEN, MASK)
    for i, t in MASK.nonzero().tolist():
        assert values[i, t].item() == pytest.approx(value_by_hand(critic.value, HIDDEN[i, t]).item(), abs=1e-5)
    assert not values[~MASK].any()
    assert not Critic(8).read(HIDDEN, MASK).any()
    assert torch.equal(weights(Critic(8)), weights(Critic(8)))
    assert len(weights(critic)) == 8 * 8 + 8 + 8 + 1


def test_bfloat16_states_are_computed_in_float32():
    """Guards against values rounded to bfloat16: credit functions use the differences between neighbours."""
    critic, rounded = random_critic(), HIDDEN.bfloat16()
    values = critic.read(rounded, MASK)
    assert torch.equal(values, critic.read(rounded.float(), MASK))
    assert not torch.equal(values, values.bfloat16().float())
    critic.learn(batch_of(rounded, critic=values.detach(), reward=REWARD))
    assert not torch.equal(weights(critic), weights(random_critic()))


def learn_by_hand(make_optimizer, clip):
    """Weights after four steps on PPO's value loss, token by token."""
    critic, tokens = random_critic(), MASK.nonzero().tolist()
    optimizer = make_optimizer(critic.parameters())
    old = {(i, t): value_by_hand(critic.value, HIDDEN[i, t]).item() for i, t in tokens}
    for _ in range(4):
        loss = 0.0
        for i, t in tokens:
            value, r = value_by_hand(critic.value, HIDDEN[i, t]), REWARD[i].item()
            move = value.item() - old[i, t]
            near = value if abs(move) <= clip else torch.tensor(old[i, t] + math.copysign(clip, move))
            loss = loss + 0.5 * max((value - r) ** 2, (near - r) ** 2) / len(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(critic)


@pytest.mark.parametrize("make_optimizer, fast", [
    (lambda p: torch.optim.AdamW(p, 5e-4, weight_decay=0.0), False),  # the critic's own
    (lambda p: torch.optim.SGD(p, 0.3), True),  # steps so large that values are clipped
], ids=["AdamW", "SGD"])
def test_learning_by_hand(make_optimizer, fast):
    """Guards against min for max, a clip around the target, padding in the mean, another scale, rate or decay."""
    critic, expected = random_critic(), learn_by_hand(make_optimizer, clip=0.2)
    if fast:
        critic.optimizer = make_optimizer(critic.parameters())
    critic.learn(batch_of(critic=critic.read(HIDDEN, MASK).detach(), reward=REWARD))
    torch.testing.assert_close(weights(critic), expected, rtol=0, atol=1e-3 if fast else 1e-4)
    assert ((expected - learn_by_hand(make_optimizer, clip=9.0)).abs().max() > 0.02) == fast


def test_values_of_a_batch_know_neither_its_rewards_nor_move_the_model(policy):
    """Guards against values that change once the rewards are known, and a critic that trains the model."""
    policy, s = policy._replace(heads={"critic": random_critic(128)}), Settings(answers=2, max_new_tokens=9)
    batch, before = rollout(policy, [Puzzle((4, 3, 5), 8)], s, 1), weights(policy.model)
    values = batch.ask.head("critic").clone()
    assert not values.requires_grad
    batch.reward = torch.tensor([1.0, 0.0])
    policy.heads["critic"].learn(batch)
    assert torch.equal(batch.ask.head("critic"), values)
    assert not torch.equal(policy.heads["critic"].read(batch.ask.hidden, batch.mask), values)  # it has learned
    assert torch.equal(weights(policy.model), before)
    assert all(p.grad is None and p.requires_grad for p in policy.model.parameters())


def test_the_process_critic_learns_what_is_still_to_come():
    """Guards against the reward as its target, and the number of calculations so far."""
    batch = make_written([["1+2=3", ",", "3", "*", "3=9", ""], ["no", ""]], [0.0] * 2)
    target = HEADS["process_critic"](8).target(batch)
    assert target.tolist() == [[2, 1, 1, 1, 1, 0], [0] * 6]


SUCCESS = torch.tensor([1.0, 0, 0, 1])


def random_importance(size=8):
    """An importance head that prefers some tokens."""
    head = Importance(size)
    torch.manual_seed(1)
    for p in (head.score.outer.weight, head.value.outer.weight):
        torch.nn.init.normal_(p, std=0.5)
    return head


def pooled_by_hand(head, i):
    """The weights of the tokens of response i, and the logit of its success, token by token."""
    states = [HIDDEN[i, t] for t in range(int(MASK[i].sum()))]
    sizes = [value_by_hand(head.score, x).exp() for x in states]
    weights = [size / sum(sizes) for size in sizes]
    return weights, sum(w * value_by_hand(head.value, x) for w, x in zip(weights, states))


def test_importance_by_hand_and_equal_at_first():
    """Guards against padding in the softmax, scores and values swapped, and a new head that prefers some tokens."""
    head = random_importance()
    found, logits = head.read(HIDDEN, MASK), head(HIDDEN, MASK)
    for i in range(4):
        expected, logit = pooled_by_hand(head, i)
        assert found[i].tolist() == pytest.approx([w.item() for w in expected] + [0.0] * (4 - len(expected)), abs=1e-5)
        assert logits[i].item() == pytest.approx(logit.item(), abs=1e-5)
    assert torch.equal(Importance(8).read(HIDDEN, MASK), MASK / MASK.sum(1, keepdim=True))


def test_importance_learns_by_hand():
    """Guards against another loss, a mean over tokens, and a head that trains only its scores or its values."""
    head, by_hand = random_importance(), random_importance()
    optimizer = torch.optim.AdamW(by_hand.parameters(), 5e-4, weight_decay=0.0)
    for _ in range(4):
        p = [pooled_by_hand(by_hand, i)[1].sigmoid() for i in range(4)]
        loss = -sum(torch.log(q if right else 1 - q) for q, right in zip(p, SUCCESS)) / 4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    head.learn(batch_of(success=SUCCESS))
    for one in (head, by_hand):
        one.score.outer.bias.data.zero_()  # no softmax depends on it, so that rounding alone moves it
    torch.testing.assert_close(weights(head), weights(by_hand), rtol=0, atol=1e-4)
    assert (weights(head) - weights(random_importance())).abs().max() > 1e-3


def test_a_saved_head_comes_back_and_a_missing_one_is_new(tmp_path):
    """Guards against a tensor that is not saved, and a file that is not read."""
    model = load_model(BUNDLED)
    assert not load_head("critic", tmp_path, model).read(torch.randn(4, 4, 128), MASK).any()
    assert not load_head("importance", tmp_path, model).score(torch.randn(4, 4, 128)).any()
    save_head("critic", random_critic(128), tmp_path)
    save_head("importance", random_importance(128), tmp_path)
    assert torch.equal(weights(load_head("critic", tmp_path, model)), weights(random_critic(128)))
    assert torch.equal(weights(load_head("importance", tmp_path, model)), weights(random_importance(128)))


def test_a_file_that_does_not_fit_is_refused_by_name(tmp_path):
    """Guards against a critic that silently starts anew."""
    file = tmp_path / "critic.safetensors"
    for write in (lambda: save_head("critic", Critic(64), tmp_path), lambda: file.write_text("no tensors")):
        write()
        with pytest.raises(ValueError, match=re.escape(f"{file} is broken or another model's")):
            load_head("critic", tmp_path, load_model(BUNDLED))


def test_what_a_critic_says_of_itself_is_of_its_values_before_it_learned():
    """Guards against a loss and a share of variance that a critic could only have once it knew the rewards."""
    critic = random_critic()
    values = critic.read(HIDDEN, MASK)[MASK].tolist()
    target = [REWARD[i].item() for i, _ in MASK.nonzero().tolist()]
    errors = [r - v for r, v in zip(target, values)]
    assert critic.learn(batch_of(reward=REWARD)) == {
        "critic_loss": pytest.approx(sum(e * e for e in errors) / 2 / len(errors), rel=1e-5),
        "explained_variance": pytest.approx(1 - statistics.pvariance(errors) / statistics.pvariance(target), rel=1e-4)}
    assert critic.learn(batch_of(reward=torch.ones(4)))["explained_variance"] is None
