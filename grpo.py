"""GRPO: rollout -> TokenBatch -> advantage -> credit -> loss -> update, and the log of every token's credit.

    gradient = sum_t credit_t * grad log pi(token_t)

Every method of mitigations.py fills in `credit` (B, T); nothing here depends on which. How this differs from the paper
(DeepSeekMath, 2402.03300):
1. The loss is averaged over the tokens of the whole step (DAPO, 2503.14476) instead of within each response first;
   --loss_norm sequence is the paper's, constant is Dr. GRPO's (2503.20783).
2. No KL penalty unless --kl asks for it, and one update a batch, so that the ratio is 1 and nothing is clipped.
3. The log-probs of the sampling policy are those recorded by the sampler, not those of another forward.
4. A group whose rewards are all equal has advantage 0 exactly.

Run it:  python train.py --mitigation none
"""
import sys
from functools import cache, partial
from pathlib import Path
from typing import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from countdown_task import Codec, Problem, annotate, find_steps, fingerprint, reward
from mitigations import TokenBatch, group_advantage
from qwen2_model import Qwen2, Samples, generate, left_pad, take

LOSS_NORMS = ("token", "sequence", "constant")
EVALUATION = 2**32 - 1  # the `step` of the random numbers that evaluate: no training step has it
ROWS_AT_ONCE = 768  # fresh ends sampled together
LOGITS_AT_ONCE = 2**26  # elements of a (tokens, V) tensor: above it, the update computes logits in pieces


# ------------------------------------------------------------------------------------------------- rollout


def draw_uniforms(seed: int, step: int, questions: int, answers: int, length: int) -> Tensor:
    """The chance of a whole step (questions * answers, length), each question's from a generator of its own.

    So a response does not depend on the other questions, nor on how many processes share the step.
    """
    rows = [np.random.default_rng([seed, step, question]).random((answers, length)) for question in range(questions)]
    return torch.from_numpy(np.concatenate(rows))


def respond(model: Qwen2, codec: Codec, problems: list[Problem], uniforms: Tensor,
            prefixes: list[list[int]] | None = None, limit: Tensor | None = None) -> tuple[Samples, list, list[dict]]:
    """Sample and grade as many responses as uniforms (B, T) has rows, as many to each problem, those of one together.

    prefixes: tokens with which the responses to each problem begin; limit (B,): how many more each may have. Returns
    the samples, and of each whole response its (text, spans) and its reward.
    """
    prefixes = prefixes or [[]] * len(problems)
    prompts = [codec.prompt(problem) + prefix for problem, prefix in zip(problems, prefixes)]
    samples = generate(model, prompts, uniforms, codec.end_tokens, limit=limit)
    lengths, G = samples.mask.sum(1).tolist(), len(uniforms) // len(problems)
    sampled = [row[:length] for row, length in zip(samples.tokens.tolist(), lengths)]
    decoded = [codec.decode(prefixes[i // G] + row) for i, row in enumerate(sampled)]
    return samples, decoded, [reward(text, *problems[i // G]) for i, (text, _) in enumerate(decoded)]


def rollout(model: Qwen2, codec: Codec, problems: list[Problem], uniforms: Tensor, *, advantage: str = "grpo",
            normalize: str = "response", key: tuple[int, int] = (0, 0), reference: Qwen2 | None = None,
            critic: nn.Module | None = None, micro_batch: int = 32) -> TokenBatch:
    """One step's responses, B / len(problems) to each problem, and all that a credit function may look at.

    key: seed and step, of which the chance of credit functions is made. reference: the start model, for methods that
    ask for its log-probs; critic: for those that ask for values.
    """
    samples, decoded, grades = respond(model, codec, problems, uniforms)
    (B, T), device = samples.tokens.shape, samples.tokens.device
    role, in_answer = np.zeros((B, T), np.int8), np.zeros((B, T), bool)
    for i, (text, spans) in enumerate(decoded):
        role[i, : len(spans)], in_answer[i, : len(spans)] = annotate(text, spans)
    total, success, format = torch.tensor([[g["reward"], g["answer"], g["format"]] for g in grades], device=device).T
    group = torch.arange(len(problems), device=device).repeat_interleave(B // len(problems))  # (B,)
    return TokenBatch(
        **samples._asdict(), reward=total, success=success, format=format, group=group,
        numbers=[p.numbers for p in problems], target=[p.target for p in problems],
        advantage=group_advantage(total.view(len(problems), -1), advantage).flatten(),
        role=torch.from_numpy(role).to(device), in_answer=torch.from_numpy(in_answer).to(device),
        text=[text for text, _ in decoded], spans=[spans for _, spans in decoded],
        steps=[find_steps(text) for text, _ in decoded], normalize=normalize,
        **callables(model, codec, problems, samples, group, uniforms.shape[1], key, reference, critic, micro_batch))


def callables(model: Qwen2, codec: Codec, problems: list[Problem], samples: Samples, group: Tensor, limit: int,
              key: tuple[int, int], reference: Qwen2 | None, critic: nn.Module | None, micro_batch: int) -> dict:
    """What a credit function may ask of the model about a step's responses, see TokenBatch; none runs until asked."""
    tokens, mask = samples.tokens, samples.mask  # (B, T)

    def generator(name: str) -> torch.Generator:
        return torch.Generator().manual_seed(fingerprint(f"{name} {key}") >> 1)

    @torch.no_grad()
    def ask(about: Callable, rows: Tensor, hide: Tensor | None = None) -> Tensor:
        """about(prompts, tokens, mask, hide) for the responses rows (N,), `micro_batch` of them at once: (N, T, ...)."""
        parts = []
        for part in torch.arange(len(rows)).split(micro_batch):
            i = rows[part]  # (b,)
            prompts = [codec.prompt(problems[g]) for g in group[i].tolist()]
            parts.append(about(prompts, tokens[i], mask[i], None if hide is None else hide[part]))
        return torch.cat(parts)

    def reference_logprob() -> Tensor:
        if reference is None:
            raise ValueError("no start model was kept: call reference_logprob in the credit function's own code")
        return ask(partial(response_logprobs, reference), every)

    every = torch.arange(len(tokens))  # (B,)
    hidden = cache(lambda: ask(partial(response_states, model), every))
    return {
        "generator": generator,
        "hidden": hidden,
        "attention": cache(lambda: ask(partial(response_attention, model), every)),
        "values": cache(lambda: critic.score(hidden(), mask)),
        "reference_logprob": cache(reference_logprob),
        "logprob_without": partial(ask, partial(response_logprobs, model)),
        "rollouts": lambda cuts, k: continue_from(model, codec, problems, samples, group, cuts, k, limit,
                                                  generator("rollouts")),
    }


def continue_from(model: Qwen2, codec: Codec, problems: list[Problem], samples: Samples, group: Tensor, cuts: Tensor,
                  k: int, limit: int, generator: torch.Generator) -> Tensor:
    """Mean reward (B, T), where cuts (B, T) is True, of k fresh ends of the response from before token t on; else 0.

    A fresh end has what is left of the limit. Those of like length are sampled together.
    """
    value, where = torch.zeros(cuts.shape), cuts.cpu().nonzero()  # (B, T), (C, 2)
    uniforms = torch.rand(len(where), k, limit, generator=generator, dtype=torch.float64)
    size = max(1, ROWS_AT_ONCE // k)  # cuts at once
    for part in where[:, 1].argsort().split(size) if len(where) else ():  # part: (c,) indices of cuts
        rows, places = where[part].T  # (c,), (c,)
        prefixes = [samples.tokens[i, :t].tolist() for i, t in where[part].tolist()]
        asked, left = [problems[g] for g in group[rows].tolist()], limit - places  # c of them, (c,)
        chance = uniforms[part, :, : left.max()].flatten(0, 1)  # (c * k, T')
        grades = respond(model, codec, asked, chance, prefixes, left.repeat_interleave(k))[2]
        value[rows, places] = torch.tensor([grade["reward"] for grade in grades]).view(-1, k).mean(1)
    return value.to(cuts.device)


def evaluate(model: Qwen2, codec: Codec, problems: list[Problem], answers: int, max_new_tokens: int,
             rows: int) -> np.ndarray:
    """Success (problems, answers) at temperature 1, with the same random numbers every time; about `rows` at once."""
    uniforms = draw_uniforms(0, EVALUATION, len(problems), answers, max_new_tokens)
    solved, some = [], max(1, rows // answers)  # puzzles at once
    for i in range(0, len(problems), some):
        grades = respond(model, codec, problems[i : i + some], uniforms[i * answers : (i + some) * answers])[2]
        solved += [grade["answer"] for grade in grades]
        progress("evaluating", len(solved), len(uniforms))
    return np.array(solved).reshape(len(problems), answers)


def progress(what: str, done: int, total: int) -> None:
    """How far something is, on one line of the terminal that the next one overwrites."""
    if sys.stderr.isatty():
        print(f"{what}: {done}/{total} ", end="\r", file=sys.stderr, flush=True)


def standard_error(values: np.ndarray) -> float:
    """Standard error of the mean of independent values; NaN for a single one."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


# ---------------------------------------------------------------------------------------------------- loss


def lay_out(prompts: list[list[int]], tokens: Tensor) -> tuple[Tensor, Tensor, int]:
    """Rows (B, P + T - 1) for the model, how many columns of each are padding (B,), and which column predicts token 0.

    The only place that knows how prompt and response lie in a row: the prompt in columns 0 .. P-1, padded on the left,
    the response in P .. P+T-1. The state that predicts a token stands one column before it:

        column          0    1    2   | 3    4          P = 3, T = 2
        row             pad  2    +   | 3    end
        predicts                   3    end             columns P-1 .. P+T-2
    """
    prompt_tokens, pad = left_pad(prompts, tokens.device)  # (B, P), (B,)
    return torch.cat((prompt_tokens, tokens), dim=1)[:, :-1], pad, prompt_tokens.shape[1] - 1


def response_states(model: Qwen2, prompts: list[list[int]], tokens: Tensor, mask: Tensor,
                    hide: Tensor | None = None) -> Tensor:
    """The last hidden state (B, T, D) that predicts each response token (B, T).

    hide (B, T) bool: tokens at which no later column may look.
    """
    rows, pad, first = lay_out(prompts, tokens)
    if hide is not None:
        hide = F.pad(hide, (first + 1, 0))[:, :-1]  # (B, P + T - 1)
    return model.hidden(rows, pad, hide=hide)[:, first:]


def response_attention(model: Qwen2, prompts: list[list[int]], tokens: Tensor, mask: Tensor,
                       hide: None = None) -> Tensor:
    """How much the state that predicts token t looks at token u (B, T, T), in the last layer, mean over heads."""
    rows, pad, first = lay_out(prompts, tokens)
    return F.pad(model.attention(rows, pad)[:, first:, first + 1 :], (0, 1))  # at the last token nobody looks


def response_logprobs(model: Qwen2, prompts: list[list[int]], tokens: Tensor, mask: Tensor,
                      hide: Tensor | None = None) -> Tensor:
    """log pi (B, T) of response tokens (B, T) with gradient, 0 on padding; hide: see response_states."""
    states = response_states(model, prompts, tokens, mask, hide)[mask]  # (N, D)
    size = max(1, LOGITS_AT_ONCE // model.real_vocab)  # states at once
    pieces = list(zip(states.split(size), tokens[mask].split(size)))

    def logprobs(s: Tensor, t: Tensor) -> Tensor:
        return take(model.log_probs(s), t)

    if len(pieces) > 1:  # a large vocabulary: forget each piece's logits, compute them again in the backward pass
        logprob = [checkpoint(logprobs, s, t, use_reentrant=False) for s, t in pieces]
    else:
        logprob = [logprobs(s, t) for s, t in pieces]
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, torch.cat(logprob))


def token_weights(mask: Tensor, loss_norm: str, max_new_tokens: int) -> Tensor:
    """The share (B, T) of each token in the loss of a step.

    token: 1 / N, N the step's tokens (DAPO). sequence: 1 / (B * L_i) (GRPO). constant: 1 / (B * max_new_tokens)
    (Dr. GRPO).
    """
    B, lengths = len(mask), mask.sum(1, keepdim=True)  # (B, 1)
    total = {"token": lengths.sum(), "sequence": B * lengths, "constant": torch.tensor(B * max_new_tokens)}
    return mask / total[loss_norm].to(mask.device)


def policy_loss(logprob: Tensor, old: Tensor, credit: Tensor, weight: Tensor, reference: Tensor | None = None,
                kl: float = 0.0, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """The loss, a scalar. Everything else is (B, T): log-probs now, at sampling time and of the start model,
    credit, and the share of each token. PPO's clip is 1707.06347's; clip_high 0.28 is DAPO's."""
    ratio = (logprob - old).exp()  # (B, T) pi / pi_old, 1 at the first update
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)  # (B, T)
    gain = torch.minimum(ratio * credit, clipped * credit)  # (B, T) the smaller, whatever the sign of the credit
    if reference is not None:
        gain = gain - kl * k3(logprob, reference)  # (B, T) stay near the start model
    return -(gain * weight).sum()


def k3(logprob: Tensor, reference: Tensor) -> Tensor:
    """Estimate (B, T) of KL(pi || reference) from samples of pi: exp(d) - d - 1 >= 0, d = log ref - log pi."""
    d = reference - logprob
    return d.exp() - d - 1


# -------------------------------------------------------------------------------------------------- update


def update(model: Qwen2, optimizer: torch.optim.Optimizer, prompts: list[list[int]], batch: TokenBatch, credit: Tensor,
           *, reference: Qwen2 | None = None, kl: float = 0.0, clip_low: float = 0.2, clip_high: float = 0.2,
           loss_norm: str = "token", max_new_tokens: int, updates_per_batch: int = 1, max_grad_norm: float = 1.0,
           micro_batch: int = 32) -> dict[str, float | None]:
    """`updates_per_batch` optimizer steps on one batch; prompts: one a question. The figures of metrics.csv.

    Micro-batches save memory and change nothing: every share of the loss is fixed for the whole step before.
    """
    weight = token_weights(batch.mask, loss_norm, max_new_tokens)  # (B, T)
    parts = micro_batches(batch.mask, credit, micro_batch, skip=reference is None)
    loss, norm, figures = 0.0, 0.0, []
    for _ in range(updates_per_batch):
        optimizer.zero_grad(set_to_none=False)  # a step without any credit still decays Adam's momentum
        for rows, T in parts:
            mask, old, c = batch.mask[rows, :T], batch.logprob[rows, :T], credit[rows, :T]  # (b, T), b rows at once
            inputs = [prompts[g] for g in batch.group[rows].tolist()], batch.tokens[rows, :T], mask
            with torch.no_grad():
                ref = None if reference is None else response_logprobs(reference, *inputs)  # (b, T)
            logprob = response_logprobs(model, *inputs)  # (b, T)
            part = policy_loss(logprob, old, c, weight[rows, :T], ref, kl, clip_low, clip_high)
            part.backward()
            loss += part.item() / updates_per_batch
            figures.append(ratio_figures(logprob.detach(), old, c, mask, ref, clip_low, clip_high))
        norm += torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item() / updates_per_batch
        optimizer.step()
    clipped, error, divergence = zip(*figures) if figures else ((), (), ())
    return {"loss": loss, "grad_norm": norm, "clip_fraction": mean(clipped), "ratio_error": mean(error[: len(parts)]),
            "kl": mean(divergence)}


def ratio_figures(logprob: Tensor, old: Tensor, credit: Tensor, mask: Tensor, reference: Tensor | None, clip_low: float,
                  clip_high: float) -> tuple[Tensor, Tensor, Tensor]:
    """Per token (N,): whether the clip removes its gradient, abs(log ratio), and k3 (empty without a reference)."""
    log_ratio, c = (logprob - old)[mask], credit[mask]
    ratio = log_ratio.exp()
    clipped = ratio * c > ratio.clamp(1 - clip_low, 1 + clip_high) * c
    return clipped, log_ratio.abs(), k3(logprob, reference)[mask] if reference is not None else log_ratio[:0]


def micro_batches(mask: Tensor, credit: Tensor, size: int, skip: bool) -> list[tuple[Tensor, int]]:
    """Rows to update on, `size` at a time, like lengths together, and the length of the longest of them.

    skip: leave out the rows whose credit is 0 on every token, which have no gradient.
    """
    lengths = mask.sum(1)  # (B,)
    rows = lengths.argsort()
    if skip:
        rows = rows[(credit[rows] != 0).any(1)]
    return [(part, int(lengths[part].max())) for part in rows.split(size)] if len(rows) else []


def mean(parts: Sequence[Tensor]) -> float | None:
    """Mean over all the values of some tensors; None when there are none."""
    values = torch.cat(parts) if parts else torch.empty(0)
    return values.double().mean().item() if len(values) else None


# ---------------------------------------------------------------------------------------------- credit log


def write_credit_log(file: Path, step: int, batch: TokenBatch, credit: Tensor) -> None:
    """Write one row a token of the step, 40 bytes each, as flat numpy arrays. File name `step-000001.npz`."""
    (B, T), device = batch.mask.shape, batch.mask.device
    position = torch.arange(T, device=device).expand(B, T)
    response = torch.arange(B, device=device)[:, None].expand(B, T)
    spread = {name: getattr(batch, name)[:, None].expand(B, T) for name in ("group", "advantage", "reward")}
    columns = {
        "step": (torch.full_like(position, step), np.int32),
        "response": (response, np.uint16), "group": (spread["group"], np.uint16), "position": (position, np.uint16),
        "token": (batch.tokens, np.int32),
        "logprob": (batch.logprob, np.float32), "entropy": (batch.entropy, np.float32),
        "logit_grad": (batch.logit_grad, np.float32), "advantage": (spread["advantage"], np.float32),
        "credit": (credit, np.float32), "reward": (spread["reward"], np.float32),
        "role": (batch.role, np.int8), "in_answer": (batch.in_answer, np.int8),
    }
    flat = {name: values[batch.mask].cpu().numpy().astype(kind) for name, (values, kind) in columns.items()}
    with file.with_suffix(".part").open("wb") as out:
        np.savez(out, **flat)
    file.with_suffix(".part").rename(file)  # a reader, or an interruption, never meets half a file
