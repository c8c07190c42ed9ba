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
import math
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from countdown_task import Codec, Problem, annotate, find_steps, fingerprint, reward
from mitigations import TokenBatch, group_advantage
from qwen2_model import Answers, Prompts, Qwen2, Samples, generate, replace_file, token_logprobs

LOSS_NORMS = ("token", "sequence", "constant")
EVALUATION = 2**32 - 1  # the `step` of the random numbers that evaluate: no training step has it
ROWS_AT_ONCE = 768  # fresh ends sampled together


# --------------------------------------------------------------------------------------- several processes


def world() -> tuple[int, int]:
    """The number of this process, and how many share the work: (0, 1) unless torchrun started several."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def share(n: int, rank: int | None = None) -> slice:
    """The part of n things that this process, or that of `rank`, does."""
    me, size = world()
    rank = me if rank is None else rank
    return slice(n * rank // size, n * (rank + 1) // size)


def portion(n: int) -> slice:
    """This process's share of n things, or one thing where it has none: `gather` leaves out what came of that."""
    mine = share(n)
    return mine if mine.start < mine.stop else slice(0, 1)


def gather(mine: Tensor, n: int, each: int = 1) -> Tensor:
    """The rows of n things, `each` of a thing, from the processes' portions; shorter rows padded with 0 on the right."""
    size = world()[1]
    if size == 1:
        return mine
    counts = [(part.stop - part.start) * each for part in (share(n, rank) for rank in range(size))]
    shape = torch.tensor(mine.shape, device=mine.device)
    dist.all_reduce(shape, dist.ReduceOp.MAX)
    room = mine.new_zeros(shape.tolist())
    room[tuple(slice(length) for length in mine.shape)] = mine
    parts = [torch.empty_like(room) for _ in range(size)]
    dist.all_gather(parts, room)
    return torch.cat([part[:count] for part, count in zip(parts, counts)])


def sum_over_processes(tensors: list[Tensor]) -> None:
    """Replace each tensor by its sum over the processes; small ones travel together."""
    if world()[1] == 1:
        return
    small, large = ([x for x in tensors if (x.numel() < 2**20) == kind] for kind in (True, False))
    flat = torch.cat([x.flatten() for x in small])
    for sent in [dist.all_reduce(x, async_op=True) for x in (flat, *large)]:
        sent.wait()
    for x, total in zip(small, flat.split([x.numel() for x in small])):
        x.copy_(total.view_as(x))


# ------------------------------------------------------------------------------------------------- rollout


def draw_uniforms(seed: int, step: int, questions: int, answers: int, length: int) -> Tensor:
    """The chance of a whole step (questions * answers, length), each question's from a generator of its own.

    So a response does not depend on the other questions, nor on how many processes share the step.
    """
    rows = [np.random.default_rng([seed, step, question]).random((answers, length)) for question in range(questions)]
    return torch.from_numpy(np.concatenate(rows))


def respond(model: Qwen2, codec: Codec, problems: list[Problem], uniforms: Tensor,
            prefixes: list[list[int]] | None = None, limit: Tensor | None = None,
            not_first: Tensor | None = None) -> tuple[Samples, list, list[dict]]:
    """Sample and grade as many responses as uniforms (B, T) has rows, as many to each problem, those of one together.

    prefixes: tokens with which the responses to each problem begin; limit (B,): how many more each may have; not_first
    (B,): the one that must not be next. Returns the samples, and of each whole response its (text, spans) and its
    reward.
    """
    prefixes = prefixes or [[]] * len(problems)
    prompts = [codec.prompt(problem) + prefix for problem, prefix in zip(problems, prefixes)]
    samples = sample(model, prompts, uniforms, codec.end_tokens, limit, not_first)
    lengths, G = samples.mask.sum(1).tolist(), len(uniforms) // len(problems)
    sampled = [row[:length] for row, length in zip(samples.tokens.tolist(), lengths)]
    decoded = [codec.decode(prefixes[i // G] + row) for i, row in enumerate(sampled)]
    return samples, decoded, [reward(text, *problems[i // G]) for i, (text, _) in enumerate(decoded)]


def sample(model: Qwen2, prompts: list[list[int]], uniforms: Tensor, end_tokens: list[int],
           limit: Tensor | None, not_first: Tensor | None = None) -> Samples:
    """`generate`, each process for its share of the prompts; every process gets the samples of all."""
    G, mine = len(uniforms) // len(prompts), portion(len(prompts))
    rows = slice(mine.start * G, mine.stop * G)
    limit, not_first = (None if x is None else x[rows] for x in (limit, not_first))
    samples = generate(model, prompts[mine], uniforms[rows], end_tokens, limit=limit, not_first=not_first)
    samples = gather_samples(samples, len(prompts), G)
    if not samples.logprob.isfinite().all():  # said by all processes, or by none
        raise FloatingPointError("the model's logits are not finite: its weights are broken, or --lr is too high")
    return samples


def gather_samples(samples: Samples, Q: int, G: int) -> Samples:
    """Those of all Q questions from the processes' shares of them, in one message."""
    if world()[1] == 1:
        return samples
    *columns, ended = samples  # five of (b, T), (b,)
    packed = torch.stack([x.double() for x in (*columns, ended[:, None].expand(samples.mask.shape))], dim=2)  # (b, T, 6)
    packed = gather(packed, Q, G)  # (B, T, 6)
    tokens, mask, *facts = (x.to(kind.dtype) for x, kind in zip(packed.unbind(2), columns))
    return Samples(tokens, mask, *facts, packed[:, 0, 5].bool())


def rollout(model: Qwen2, codec: Codec, problems: list[Problem], uniforms: Tensor, *, advantage: str = "grpo",
            normalize: str = "response", key: tuple[int, int] = (0, 0), reference: Qwen2 | None = None,
            critic: nn.Module | None = None, micro_batch: int = 16) -> TokenBatch:
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
    def ask(about: Callable, of: Qwen2, rows: Tensor, hide: Tensor | None = None) -> Tensor:
        """about(model, Answers, tokens, mask, hide) for the responses rows (N,), `micro_batch` of them at once
        (N, T, ...); each process for its share."""
        read = Prompts(of, [codec.prompt(problem) for problem in problems])
        parts = []
        for part in torch.arange(len(rows))[portion(len(rows))].split(micro_batch):
            i = rows[part]  # (b,)
            parts.append(about(of, Answers(read, group[i]), tokens[i], mask[i], None if hide is None else hide[part]))
        return gather(torch.cat(parts), len(rows))

    def reference_logprob() -> Tensor:
        if reference is None:
            raise ValueError("no start model was kept: call reference_logprob in the credit function's own code")
        return ask(response_logprobs, reference, every)

    every = torch.arange(len(tokens))  # (B,)
    hidden = cache(lambda: ask(response_states, model, every))
    return {
        "generator": generator,
        "hidden": hidden,
        "attention": cache(lambda: ask(response_attention, model, every)),
        "values": cache(lambda: critic.score(hidden(), mask)),
        "reference_logprob": cache(reference_logprob),
        "logprob_without": partial(ask, response_logprobs, model),
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


def progress(what: str, done: int, total: int, start: float | None = None) -> None:
    """How far something is, and when it will end if it began at `start` (time.perf_counter), on one line of the
    terminal that the next one overwrites."""
    if sys.stderr.isatty() and world()[0] == 0:
        eta = "" if start is None else f"ETA {clock((time.perf_counter() - start) / done * (total - done))} "
        print(f"{what}: {done}/{total} {eta}", end="\r", file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Minutes and seconds, 1:05."""
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"


def standard_error(values: np.ndarray) -> float:
    """Standard error of the mean of independent values; NaN for a single one."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


# ---------------------------------------------------------------------------------------------------- loss


def response_states(model: Qwen2, past: Answers, tokens: Tensor, mask: Tensor, hide: Tensor | None = None) -> Tensor:
    """The last hidden state (B, T, D) that predicts each token of the responses (B, T) to the prompts in past.

    With response_attention, the only place that knows how prompt and response lie. A prompt is one row, read once; its
    responses are rows of their own that look at it. The state that predicts a token stands one column before it:

        prompt    pad  2    +          response  3    end          P = 3, T = 2
        predicts            3          predicts  end
    """
    first = past.last()[:, None]  # (B, 1, D)
    if tokens.shape[1] == 1:
        return first
    hide = None if hide is None else hide[:, :-1]
    return torch.cat((first, model.hidden(tokens[:, :-1], past=past, hide=hide)), dim=1)


def response_attention(model: Qwen2, past: Answers, tokens: Tensor, mask: Tensor, hide: None = None) -> Tensor:
    """How much the state that predicts token t looks at token u (B, T, T), in the last layer, mean over heads."""
    T = tokens.shape[1]
    own = torch.zeros(*tokens.shape, T, device=tokens.device)  # (B, T, T)
    if T > 1:  # the state before token 0 is the prompt's; at the last token nobody looks
        own[:, 1:, :-1] = model.attention(tokens[:, :-1], past=past)[:, :, 1 - T :]
    return own


def response_logprobs(model: Qwen2, past: Answers, tokens: Tensor, mask: Tensor, hide: Tensor | None = None) -> Tensor:
    """log pi (B, T) of response tokens (B, T) with gradient, 0 on padding; hide: see response_states."""
    states = response_states(model, past, tokens, mask, hide)[mask]  # (N, D)
    logprob = token_logprobs(model, states, tokens[mask])  # (N,)
    return logprob.new_zeros(mask.shape).masked_scatter(mask, logprob)


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


class Optimizer:
    """AdamW (1711.05101) on float32 weights, which it keeps beside the model's own where those have fewer bits.

    Else a step of 1e-6 would be lost in rounding. They, and Adam's moments, may live on another device than the model:
    gradients go there as they come, micro-batch by micro-batch.
    """

    def __init__(self, model: Qwen2, lr: float, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0,
                 device: str | None = None):
        self.weights = dict(model.named_parameters())
        first = model.output_weight
        self.separate = first.dtype.itemsize < 4 or device is not None and torch.device(device) != first.device
        self.master = self.weights
        if self.separate:
            self.master = {name: nn.Parameter(w.detach().to(device or w.device, torch.float32, copy=True))
                           for name, w in self.weights.items()}
            for name, w in self.weights.items():
                w.register_post_accumulate_grad_hook(partial(self.take_gradient, self.master[name]))
        self.zero_grad()
        self.adamw = torch.optim.AdamW(self.master.values(), lr, betas, weight_decay=weight_decay, fused=True)

    @staticmethod
    def take_gradient(master: Tensor, weight: Tensor) -> None:
        """Add the gradient that has just come in to those of the micro-batches before, in float32."""
        master.grad.add_(weight.grad.to(master.device))
        weight.grad = None

    def zero_grad(self) -> None:
        """Gradients of 0, not None: in a step without any, Adam's momentum still acts and decays."""
        for w in self.master.values():
            w.grad = torch.zeros_like(w) if w.grad is None else w.grad.zero_()

    @torch.no_grad()
    def step(self, max_grad_norm: float) -> float:
        """Sum the gradients of all processes, clip them, move the weights; the norm before clipping."""
        sum_over_processes([w.grad for w in self.master.values()])
        norm = nn.utils.clip_grad_norm_(self.master.values(), max_grad_norm).item()
        if not math.isfinite(norm):  # else checkpoint and state would be written without a number in them
            raise FloatingPointError("the gradient is not finite: --lr is too high, or credit too large")
        self.adamw.step()
        self.copy_back()
        return norm

    @torch.no_grad()
    def copy_back(self) -> None:
        """Round the float32 weights into the model's."""
        if self.separate:
            for name, w in self.weights.items():
                w.copy_(self.master[name])


def update(model: Qwen2, optimizer: Optimizer, prompts: list[list[int]], batch: TokenBatch, credit: Tensor, *,
           reference: Qwen2 | None = None, kl: float = 0.0, clip_low: float = 0.2, clip_high: float = 0.2,
           loss_norm: str = "token", max_new_tokens: int, updates_per_batch: int = 1, max_grad_norm: float = 1.0,
           micro_batch: int = 16) -> dict[str, float | None]:
    """`updates_per_batch` optimizer steps on one batch; prompts: one a question. The figures of metrics.csv.

    Micro-batches save memory and change nothing: every share of the loss is fixed for the whole step before. A prompt
    is read once for all its responses; what their gradients ask of it is summed before it goes back through it.
    """
    weight = token_weights(batch.mask, loss_norm, max_new_tokens)  # (B, T)
    questions, parts = micro_batches(batch, credit, micro_batch, skip=reference is None)
    prompts = [prompts[q] for q in questions.tolist()]
    references = [None] * len(parts)
    if reference is not None and parts:
        with torch.no_grad():
            read = Prompts(reference, prompts)
            references = [response_logprobs(reference, Answers(read, which), batch.tokens[r, :T], batch.mask[r, :T])
                          for r, which, T in parts]
    norm, sums = 0.0, torch.zeros(6, dtype=torch.float64)
    for epoch in range(updates_per_batch):
        optimizer.zero_grad()
        if parts:
            read = Prompts(model, prompts)
            leaf = read.detach()
        for (rows, which, T), ref in zip(parts, references):
            mask, old, c = batch.mask[rows, :T], batch.logprob[rows, :T], credit[rows, :T]  # (b, T), b rows at once
            logprob = response_logprobs(model, Answers(leaf, which), batch.tokens[rows, :T], mask)  # (b, T)
            loss = policy_loss(logprob, old, c, weight[rows, :T], ref, kl, clip_low, clip_high)
            loss.backward()
            sums += figures(loss, logprob, old, c, mask, ref, clip_low, clip_high, epoch == 0)
        if parts:
            read.backward(leaf)
        norm += optimizer.step(max_grad_norm) / updates_per_batch
    return metrics(sums, updates_per_batch, reference is not None) | {"grad_norm": norm}


@torch.no_grad()
def figures(loss: Tensor, logprob: Tensor, old: Tensor, credit: Tensor, mask: Tensor, reference: Tensor | None,
            clip_low: float, clip_high: float, first: bool) -> Tensor:
    """Sums (6,) over a micro-batch: its loss; tokens whose gradient the clip removes; k3; tokens; and, only in the
    first update on a batch, abs(log ratio) and tokens."""
    log_ratio, c = (logprob - old)[mask], credit[mask]  # (N,)
    ratio = log_ratio.exp()
    clipped = (ratio * c > ratio.clamp(1 - clip_low, 1 + clip_high) * c).sum()
    divergence = k3(logprob, reference)[mask].sum() if reference is not None else 0.0
    N = len(c)
    return torch.tensor([loss, clipped, divergence, N, log_ratio.abs().sum() * first, N * first], dtype=torch.float64)


def metrics(sums: Tensor, updates: int, with_kl: bool) -> dict[str, float | None]:
    """The figures of a step from their sums (6,) over its micro-batches, of all processes; None where nothing was."""
    sum_over_processes([sums])
    loss, clipped, divergence, N, error, first = sums.tolist()
    return {"loss": loss / updates, "clip_fraction": clipped / N if N else None,
            "ratio_error": error / first if first else None, "kl": divergence / N if N and with_kl else None}


def micro_batches(batch: TokenBatch, credit: Tensor, size: int, skip: bool) -> tuple[Tensor, list]:
    """The questions (q,) this process updates on; and of its responses, `size` at a time and like lengths together,
    the rows (b,), which of the questions each answers (b,), and the length of the longest.

    skip: leave out the responses whose credit is 0 on every token, which have no gradient. The questions with the
    most tokens are dealt out first, each to the process that has the fewest.
    """
    rank, processes = world()
    lengths = batch.mask.sum(1)  # (B,)
    used = (credit != 0).any(1) if skip else torch.ones_like(lengths, dtype=torch.bool)  # (B,)
    load = torch.zeros(len(batch.numbers), dtype=torch.long, device=lengths.device)
    load = load.index_add(0, batch.group, lengths * used)  # (Q,) tokens to update on
    dealt, hands = [0] * processes, [[] for _ in range(processes)]
    for question in load.argsort(descending=True, stable=True).tolist():
        least = dealt.index(min(dealt))
        dealt[least] += int(load[question])
        hands[least] += [question] * bool(load[question])
    questions = torch.tensor(hands[rank], dtype=torch.long, device=load.device)  # (q,)
    place = torch.full_like(load, -1).index_put((questions,), torch.arange(len(questions), device=load.device))  # (Q,)
    rows = lengths.argsort(stable=True)
    rows = rows[used[rows] & (place[batch.group[rows]] >= 0)]
    parts = rows.split(size) if len(rows) else ()
    return questions, [(part, place[batch.group[part]], int(lengths[part].max())) for part in parts]


# ---------------------------------------------------------------------------------------------- credit log


def write_credit_log(file: Path, step: int, batch: TokenBatch, credit: Tensor) -> None:
    """Write one row a token of the step, 40 bytes each, as flat numpy arrays. File name `step-000001.npz`."""
    replace_file(file, lambda part: np.savez(part, **log_columns(step, batch, credit)))


def log_columns(step: int, batch: TokenBatch, credit: Tensor) -> dict[str, np.ndarray]:
    """The columns (N,) of the credit log, one row for each of the N tokens of a step."""
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
    return {name: values[batch.mask].cpu().numpy().astype(kind) for name, (values, kind) in columns.items()}
