"""The critic: a small head on the model's hidden states that says, before each token, what reward is to be expected.

`ppo` and `learned_importance` need one. How it differs from PPO's usual critic (1707.06347):
1. It has no transformer of its own: it reads the policy's last hidden states, and no gradient flows back into them.
2. It learns the outcome itself, the reward of the whole response, at every token (GAE's lambda = 1), and not a target
   that its own estimates went into: the reward comes once, at the end, and would take many steps to get to the front.
3. It scores a batch before it learns from it, in that order by construction: else the score would know the reward.

Run it:  python critic.py        fits one to the bundled model, and says how well it predicts success (two minutes)
"""
import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import grpo
from countdown_task import Codec, Problem, generate_problems
from mitigations import TokenBatch
from qwen2_model import Qwen2, load_model, replace_file

FILE = "critic.safetensors"  # in the model folder
SIZE, PUZZLES = 96, 100  # responses in a batch of `main`; batches until it meets a puzzle again
LR, EPOCHS, CLIP = 5e-4, 4, 0.2  # of AdamW; steps on each batch as a whole; how far a value may move in them


class Critic(nn.Module):
    """Hidden state (..., D) -> expected reward (...). It learns, by its own optimizer, from what it scored last."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False)  # models differ in the size of their states
        self.inner, self.outer = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, 1)
        with torch.random.fork_rng(devices=[]):  # the same first weights in every run
            torch.manual_seed(0)
            self.inner.reset_parameters()
        nn.init.zeros_(self.outer.weight)  # before it has learned anything, all states are worth the same
        nn.init.zeros_(self.outer.bias)
        self.optimizer = torch.optim.AdamW(self.parameters(), LR, weight_decay=0.0)
        self.scored = None  # hidden states, mask and values of the last batch, until it has learned from them
        self.trained = False  # whether there is anything to keep

    def forward(self, hidden: Tensor) -> Tensor:
        return self.outer(F.silu(self.inner(self.norm(hidden.float()))))[..., 0]

    @torch.no_grad()
    def score(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Values (B, T) of hidden states (B, T, D), 0 on padding."""
        value = self(hidden) * mask  # (B, T)
        self.scored = hidden, mask, value
        return value

    def learn(self, reward: Tensor) -> None:
        """Move towards the rewards (B,) of the responses scored last; nothing to do where none were.

        Value loss 0.5 * max((V - r)^2, (clipped V - r)^2), clipped to within CLIP of the score (1707.06347).
        """
        if self.scored is None:
            return
        (hidden, mask, old), self.scored, self.trained = self.scored, None, True
        states, old, target = hidden[mask], old[mask], reward[:, None].expand(mask.shape)[mask]  # (N, D), (N,), (N,)
        for _ in range(EPOCHS):
            value = self(states)  # (N,)
            near = old + (value - old).clamp(-CLIP, CLIP)  # (N,)
            loss = 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def save(self, folder: Path) -> None:
        """Write it beside the model's weights."""
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        replace_file(folder / FILE, lambda part: save_file(tensors, part))


def load_critic(folder: str | Path, model: Qwen2) -> Critic:
    """The critic saved beside a model; a new one where there is none. ValueError when the file does not fit."""
    critic, file = Critic(model.config.hidden_size).to(model.output_weight.device), Path(folder) / FILE
    if file.is_file():
        try:
            critic.load_state_dict(load_file(file))
            critic.trained = True
        except (SafetensorError, RuntimeError):
            raise ValueError(f"{file} is broken or of another size; remove it to begin with a new critic") from None
    return critic


# ------------------------------------------------------------------------------------------- how good it is


def sample(model: Qwen2, codec: Codec, problems: list[Problem], critic: Critic, key: tuple[int, int]) -> TokenBatch:
    """A fresh response to each problem, of at most 140 tokens, scored by the critic."""
    uniforms = grpo.draw_uniforms(*key, len(problems), 1, 140)
    batch = grpo.rollout(model, codec, problems, uniforms, key=key, critic=critic)
    batch.values()
    return batch


def fit(model: Qwen2, codec: Codec, batches: int, outcome: str) -> tuple[Critic, float]:
    """A critic of a fixed model, fitted to the `reward` or `success` of fresh responses, and what they earned on
    average."""
    critic = Critic(model.config.hidden_size).to(model.output_weight.device)
    problems, earned = generate_problems(SIZE * PUZZLES, "train"), []
    start = time.perf_counter()
    for i in range(batches):
        batch = sample(model, codec, problems[i % PUZZLES :: PUZZLES], critic, (0, i + 1))
        critic.learn(getattr(batch, outcome))
        earned.append(getattr(batch, outcome))
        grpo.progress("fitting the critic", i + 1, batches, start)
    return critic, torch.cat(earned).mean().item()


def squared_errors(batch: TokenBatch, rate: float) -> np.ndarray:
    """(responses, 5, 2) mean squared error, of the critic's values and of the rate, in each fifth before <answer>.

    NaN where a response has no token there.
    """
    before = batch.mask & ~batch.in_answer  # (B, T)
    place = torch.arange(before.shape[1]) * 5 // before.sum(1, keepdim=True).clamp(min=1)  # (B, T) 0..4
    errors = torch.stack([(v - batch.success[:, None]) ** 2 * torch.ones_like(batch.logprob)
                          for v in (batch.values(), rate)], dim=-1)  # (B, T, 2)
    fifths = [torch.where((before & (place == i))[..., None], errors, torch.nan).nanmean(1) for i in range(5)]
    return torch.stack(fifths, 1).numpy()


def main() -> None:
    """Fit a critic to the success of a fixed model's responses; print its Brier score on held-out puzzles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent / "models" / "countdown-tiny"))
    parser.add_argument("--batches", type=int, default=100, help="of 96 responses, to learn from (default 100)")
    args = parser.parse_args()
    try:
        model, codec = load_model(args.model), Codec(args.model)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    if args.batches < 1:
        sys.exit("error: --batches must be at least 1")
    model.real_vocab = codec.size
    critic, rate = fit(model, codec, args.batches, "success")
    problems = generate_problems(14 * SIZE, "heldout")
    tests = [sample(model, codec, problems[i::14], critic, (1, i + 1)) for i in range(14)]
    report(tests, rate)


def report(tests: list[TokenBatch], rate: float) -> None:
    """Print Brier scores by relative position, the critic's and those of always saying `rate`, and what is gained."""
    errors = np.concatenate([squared_errors(batch, rate) for batch in tests])  # (B, 5, 2)
    success = torch.cat([batch.success for batch in tests]).mean()
    print(f"success: {rate:.1%} of the responses it learned from, {success:.1%} of the {len(errors)} held-out ones\n\n"
          f"| before `<answer>` | Brier score, critic | base rate | gain |\n|---|--:|--:|--:|")
    whole = np.nanmean(errors, axis=1, keepdims=True)  # (B, 1, 2)
    names = [f"{20 * i}-{20 * i + 20}%" for i in range(5)] + ["all of it"]
    for name, error in zip(names, np.concatenate((errors, whole), 1).transpose(1, 0, 2)):
        error = error[~np.isnan(error[:, 0])]  # very short responses have no token in some fifth
        gain = error[:, 1] - error[:, 0]
        print(f"| {name} | {error[:, 0].mean():.4f} | {error[:, 1].mean():.4f} | "
              f"{gain.mean():+.4f} ± {1.96 * grpo.standard_error(gain):.4f} |")


if __name__ == "__main__":
    main()
