"""How well the critic predicts: its Brier score on held-out puzzles, by position in the response.

The Brier score is the mean squared error of a predicted probability of success. A critic that knows nothing would
always predict the base rate, the share of responses that succeed; the gain over that is what it has learned. Only
tokens before `<answer>` count, because at the end the outcome is there to be read.

Run it:  python -m lab.truth.critic        fits a critic to the bundled model, about two minutes
"""
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from countdown_task import generate_puzzles
from grpo import compare
from methods import MITIGATIONS
from methods.heads import HEADS, Critic, Importance, load_head, save_head
from plumbing.flags import new_parser
from plumbing.launch import lacking
from plumbing.progress import Progress, fail, one_sentence
from plumbing.registry import CreditFunction, required
from rollout import Policy, TokenBatch, rollout
from train import BUNDLED, Settings, load_policy, standard_error

SIZE, PUZZLES = 96, 100  # responses in a batch; batches after which the puzzles repeat
HELD_OUT = 14  # batches to measure on
FITTED = ("critic", "importance")  # heads: only methods that need no other one are scored
LIMIT = Settings.max_new_tokens


def sample(policy: Policy, puzzles: list, answers: int, key: tuple[int, int]) -> TokenBatch:
    """Responses to puzzles; key: seed and step. The policy is its own reference."""
    seed, step = key
    s = Settings(seed=seed, answers=answers, max_new_tokens=LIMIT)
    batch = rollout(policy._replace(reference=policy.model), puzzles, s, step)
    batch.advantage = compare(batch)
    return batch


def fitted_methods(task: ModuleType) -> dict[str, CreditFunction]:
    """The methods that a task allows and that need no head but FITTED; without `oracle`, which is the truth itself."""
    needs = {name: {*required(name, {})} for name in MITIGATIONS if name != "oracle"}
    return {name: MITIGATIONS[name] for name, asked in needs.items()
            if not lacking(tuple(asked), task, HEADS) and not asked & (HEADS.keys() - {*FITTED})}


def fit(policy: Policy, batches: int, outcome: str) -> tuple[Critic, Importance, float]:
    """Both heads, fitted to a fixed model's responses, and the mean of the outcome, `reward` or `success`, that the
    critic learned."""
    size, device, outcomes = policy.model.config.hidden_size, policy.model.output_weight.device, []
    critic, importance = Critic(size).to(device), Importance(size).to(device)
    policy = policy._replace(heads={"critic": critic})
    puzzles, progress = policy.task.load("train", SIZE * PUZZLES), Progress("fitting the critic", batches)
    for i in range(batches):
        batch = sample(policy, puzzles[i % PUZZLES :: PUZZLES], 1, (0, i + 1))
        outcomes.append(getattr(batch, outcome))  # (SIZE,)
        critic.learn(replace(batch, reward=outcomes[-1]))
        importance.learn(batch)
        progress.show(i + 1)
    return critic, importance, torch.cat(outcomes).mean().item()


def find_heads(folder: Path, model_folder: str, policy: Policy, batches: int) -> dict[str, Critic | Importance]:
    """Critic and importance head in `folder`, or those beside the model, or new ones, fitted and saved in `folder`."""
    for place in (folder, Path(model_folder)):
        if all((place / f"{name}.safetensors").is_file() for name in FITTED):
            return {name: load_head(name, place, policy.model) for name in FITTED}
    print(f"no critic beside the model: fitting one to {batches} batches of responses", flush=True)
    critic, importance, _ = fit(policy, batches, "reward")
    save_head("critic", critic, folder)
    save_head("importance", importance, folder)
    return {"critic": critic, "importance": importance}


def squared_errors(batch: TokenBatch, rate: float) -> np.ndarray:
    """Mean squared error (B, 5, 2) of the critic's values and of the base rate, in each fifth of the tokens before
    <answer>; NaN where a response has no token there."""
    before = batch.mask & ~batch.in_answer  # (B, T)
    fifth = torch.arange(before.shape[1]) * 5 // before.sum(1, keepdim=True).clamp(min=1)  # (B, T)
    values = batch.ask.head("critic")  # (B, T)
    predictions = torch.stack((values, torch.full_like(values, rate)), dim=-1)  # (B, T, 2)
    errors = (predictions - batch.success[:, None, None]) ** 2  # (B, T, 2)
    means = [torch.where((before & (fifth == i))[..., None], errors, torch.nan).nanmean(1) for i in range(5)]
    return torch.stack(means, dim=1).numpy()


def report(tests: list[TokenBatch], rate: float) -> None:
    """Print Brier scores by position, of the critic and of the base rate, and the critic's gain."""
    errors = np.concatenate([squared_errors(batch, rate) for batch in tests])  # (B, 5, 2)
    success = torch.cat([batch.success for batch in tests]).mean()
    print(f"success: {rate:.1%} of the responses it learned from, {success:.1%} of the {len(errors)} held-out ones\n\n"
          f"| before `<answer>` | Brier score, critic | base rate | gain |\n|---|--:|--:|--:|")
    overall = np.nanmean(errors, axis=1, keepdims=True)  # (B, 1, 2)
    names = [f"{20 * i}-{20 * i + 20}%" for i in range(5)] + ["all of it"]
    for name, part in zip(names, np.concatenate((errors, overall), axis=1).transpose(1, 0, 2)):
        critic, base = part[~np.isnan(part[:, 0])].T  # (B',) each; a short response has no token in some fifths
        print(f"| {name} | {critic.mean():.4f} | {base.mean():.4f} | "
              f"{(base - critic).mean():+.4f} ± {1.96 * standard_error(base - critic):.4f} |")


@one_sentence()
def main() -> None:
    """Fit a critic to the success of a fixed model's responses, and report on held-out puzzles."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--model", default=str(BUNDLED), help="a model folder, such as a run's checkpoint")
    parser.add_argument("--batches", type=int, default=100, help="of 96 responses, to learn from (default 100)")
    args = parser.parse_args()
    if args.batches < 1:
        fail("--batches must be at least 1")
    policy = load_policy(Settings(model=args.model))
    critic, _, rate = fit(policy, args.batches, "success")
    policy = policy._replace(heads={"critic": critic})
    puzzles = generate_puzzles(HELD_OUT * SIZE, "heldout")
    report([sample(policy, puzzles[i::HELD_OUT], 1, (1, i + 1)) for i in range(HELD_OUT)], rate)


if __name__ == "__main__":
    main()
