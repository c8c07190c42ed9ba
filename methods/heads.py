"""Small heads on the model's hidden states: the critics, and the one that learns which tokens are important.

The critic predicts, before each token, the response's reward: `ppo`, `ppo_process` and `value_change` give credit by
it. How it differs from PPO's usual critic (arXiv 1707.06347):
1. It has no transformer of its own. It reads the policy's last hidden states, and no gradient flows back into them.
2. Its target at every token is the reward of the whole response: generalized advantage estimation (1506.02438) with
   lambda = 1. With targets from its own estimates, the reward would take many steps from the last token to the first.
3. It predicts the values of a batch before it learns from that batch. So no value has seen its own reward.

The process critic, for `ppo_process`, predicts how many true calculations follow. The importance head, for
`learned_importance`, shares points 1 and 3. It predicts a response's success from all its tokens together, and learns
how much to look at each of them.

A head is an nn.Module made from the hidden size, with `read(hidden, mask) -> (B, T)`, asked for as
batch.ask.head(name); `learn(batch)`, called after the credit of a step is known, which may return columns of
metrics.csv: numbers, or None, by name; and an `optimizer`, if it needs one. What it remembers is in parameters and
buffers. To add one, write it here and name it in HEADS. A credit function that needs it
says so in its decorator: needs=("critic",).
"""
from functools import partial
from pathlib import Path
from typing import Any, Callable

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW

from methods.calculations import calculation_ends, from_here_on
from plumbing.files import read_tensors, replace_file
from qwen2_model import Qwen2
from rollout import TokenBatch

LR = 5e-4  # of AdamW
EPOCHS = 4  # optimizer steps on each batch
CLIP = 0.2  # a value that has moved this far towards its target is not pulled any further


class Probe(nn.Module):
    """Two linear layers from a hidden state (..., D) to a number (...)."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False)  # the scale of hidden states differs by model
        self.inner, self.outer = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, 1)
        with torch.random.fork_rng(devices=[]):  # the same initial weights whatever the --seed
            torch.manual_seed(0)
            self.inner.reset_parameters()
        nn.init.zeros_(self.outer.weight)  # untrained, it gives every state the same number: it prefers no token
        nn.init.zeros_(self.outer.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Numbers (...) of hidden states (..., D), in float32 also where the states are in bfloat16."""
        return self.outer(F.silu(self.inner(self.norm(hidden.float()))))[..., 0]


def whole_reward(batch: TokenBatch) -> Tensor:
    """What a critic should have said before each token (B, T): the reward of the whole response."""
    return batch.reward.to(batch.logprob)[:, None].expand(batch.mask.shape)


def calculations_ahead(batch: TokenBatch) -> Tensor:
    """What the process critic should have said (B, T): how many true calculations end at this token or later."""
    return from_here_on(calculation_ends(batch)[1])


class Critic(nn.Module):
    """Predicts, before each token, the sum of the rewards still to come.

    Its probe says it in units of `scale`, the largest power of two within the largest target so far: CLIP and the rate
    fit targets near 1, and a reward of 100 would take thousands of batches.
    """

    def __init__(self, hidden_size: int, target: Callable[[TokenBatch], Tensor] = whole_reward):
        super().__init__()
        self.value, self.target = Probe(hidden_size), target
        self.register_buffer("scale", torch.ones(()))
        self.optimizer = AdamW(self.parameters(), LR, weight_decay=0.0)

    def read(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Values (B, T) of hidden states (B, T, D), 0 on padding."""
        return self.value(hidden) * self.scale * mask

    def load_state_dict(self, state: dict, *further: Any) -> Any:
        """That of before, in which every scale was 1, fits, too."""
        return super().load_state_dict({"scale": torch.ones(())} | state, *further)

    @torch.no_grad()
    def fit_scale(self, target: Tensor) -> None:
        """A larger unit for larger targets (N,); the values stay what they are."""
        unit = 2.0 ** target.abs().max().clamp(min=1).log2().floor()
        if unit > self.scale:
            for weight in self.value.outer.parameters():
                weight *= self.scale / unit
            self.scale.copy_(unit)

    def learn(self, batch: TokenBatch) -> dict[str, float | None] | None:
        """Train on the target r of each token of a batch whose values were predicted before.

        Value loss 0.5 * max((V - r)^2, (V' - r)^2), where V' is V held within CLIP of the old value. Once V has moved
        by CLIP towards r, the second term is the larger and has no gradient: one batch moves no value far. This is
        OpenAI's PPO code; the paper (1707.06347) uses the plain square.

        Returns columns of metrics.csv, of the values as they were predicted: half their mean squared error, and the
        share of the target's variance that they explain.
        """
        hidden, mask = batch.ask.hidden, batch.mask  # (B, T, D), (B, T)
        states = hidden[mask]  # (N, D)
        target = self.target(batch)[mask]  # (N,)
        self.fit_scale(target)
        old, target = self.value(states).detach(), target / self.scale  # (N,) each
        error, spread = target - old, target.double().var(correction=0)  # (N,), ()
        measured = {"critic_loss": 0.5 * (error**2).mean().item() * self.scale.item() ** 2,
                    "explained_variance": (1 - error.var(correction=0) / spread).item() if spread > 0 else None}
        for _ in range(EPOCHS):
            value = self.value(states)  # (N,)
            clipped = old + (value - old).clamp(-CLIP, CLIP)  # (N,)
            loss = 0.5 * torch.maximum((value - target) ** 2, (clipped - target) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return measured if self.target is whole_reward else None  # the process critic's would have the same names


class Importance(nn.Module):
    """Which tokens tell whether a response succeeds: attention pooling over its hidden states (1802.04712).

    Each token has a score and a value. The mean of the values, weighted by the softmax of the scores over the
    response, is the logit of its success. Training to predict success teaches the scores where to look.
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        self.score, self.value = Probe(hidden_size), Probe(hidden_size)
        self.optimizer = AdamW(self.parameters(), LR, weight_decay=0.0)

    def read(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """The softmax (B, T) of the scores of hidden states (B, T, D) over each response; 0 on padding."""
        return self.score(hidden).masked_fill(~mask, -torch.inf).softmax(1)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """The logit (B,) of each response's success."""
        return (self.read(hidden, mask) * self.value(hidden)).sum(1)

    def learn(self, batch: TokenBatch) -> None:
        """Train on the success, 0 or 1, of each response of a batch. It has no columns in metrics.csv."""
        hidden = batch.ask.hidden  # (B, T, D)
        for _ in range(EPOCHS):
            loss = F.binary_cross_entropy_with_logits(self(hidden, batch.mask), batch.success)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


HEADS = {"process_critic": partial(Critic, target=calculations_ahead), "importance": Importance, "critic": Critic}


def save_head(name: str, head: Critic | Importance, folder: Path) -> None:
    """Write the weights of a head into a folder."""
    folder.mkdir(exist_ok=True)
    replace_file(folder / f"{name}.safetensors", lambda part: save_file(head.state_dict(), part))


def load_head(name: str, folder: str | Path, model: Qwen2) -> Critic | Importance:
    """One of HEADS as saved in the folder of a model, in its heads/ or, as once, beside the weights, or a new one if
    there is none; ValueError for a file that does not fit."""
    head = HEADS[name](model.config.hidden_size).to(model.output_weight.device)
    inner, file = (Path(folder, part, f"{name}.safetensors") for part in ("heads", ""))
    file = inner if inner.is_file() else file
    if file.is_file():
        try:
            head.load_state_dict(read_tensors(file))
        except (ValueError, RuntimeError):
            raise ValueError(f"{file} is broken or another model's; remove it to start with a new one") from None
    return head
