"""Sampling by all processes of a run together. A first reading can skip it: with one process it is `generate`."""
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from plumbing.processes import gather, my_share, world
from sampler import Samples, generate


def generate_in_processes(policy: Any, prompts: list[list[int]], uniforms: Tensor, limit: Tensor | None = None,
                          excluded: Tensor | None = None, greedy: bool = False,
                          watch: Callable | None = None) -> Samples:
    """`generate`, with the prompts shared among the processes. Every process returns the samples of all of them."""
    model, G = policy.model, len(uniforms) // len(prompts)
    mine = my_share(list(range(len(prompts))))  # of n processes, each has every n-th prompt
    rows = torch.tensor([q * G + g for q in mine for g in range(G)], dtype=torch.long)  # (M,) of this process
    samples = None  # a process without a prompt has none
    if mine:
        limit, excluded = (None if x is None else x[rows] for x in (limit, excluded))
        samples = generate(model, [prompts[q] for q in mine], uniforms[rows], policy.tokenizer.end_tokens, limit,
                           excluded, greedy, watch)
    if world()[1] > 1:
        samples = gather_samples(samples, G, model.output_weight.device)
    if not samples.logprob.isfinite().all():  # all processes hold the same samples, so all of them raise
        raise FloatingPointError("the model's logits are not finite: its weights are broken, or --lr is too high")
    return samples


def gather_samples(samples: Samples | None, G: int, device: torch.device) -> Samples:
    """The samples of all processes, in the order of the prompts, padded on the right to the longest response."""
    own = []  # for each prompt of this process its six tensors, of G rows each
    if samples is not None:
        for group in zip(*(x.cpu().split(G) for x in samples)):  # six lists of chunks -> six chunks of each prompt
            own.append([x.clone() for x in group])  # a pickled view would carry the storage of the whole tensor
    groups = gather(own)  # in the order of the prompts: gather undoes my_share
    T = max(tokens.shape[1] for tokens, *_ in groups)
    fields = []
    for parts in zip(*groups):  # a field of each prompt: (G, t), or (G,) of `ended`
        padded = [F.pad(x, (0, T - x.shape[1])) if x.dim() == 2 else x for x in parts]
        fields.append(torch.cat(padded).to(device))
    return Samples(*fields)
