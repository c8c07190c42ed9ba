"""A step of the KV cache as a CUDA graph: its kernels are recorded once and replayed together. Only a GPU needs this.

A replay has the same shapes each time. So it computes all B rows, those that have ended, too, and attention looks at
all columns, of which the cache's bias hides the unused ones.
"""
from typing import Any

import torch
from torch import Tensor


class Replayed:
    """A KVCache of sampler.py whose `step` is replayed. Without a CUDA device nothing is recorded: for tests."""

    def __init__(self, cache: Any):
        self.cache, self.last = cache, cache.last  # last (B, D)
        self.rows = torch.arange(len(self.last), device=self.last.device)  # (B',) the running ones of all B
        self.token, self.column = torch.zeros_like(self.rows), self.rows.new_tensor([cache.filled])  # (B,), (1,)
        cache.bias[..., cache.filled : -1] = float("-inf")  # the last column is that of the new token
        self.changing = cache.bias, cache.length, self.column
        self.graph = self.record() if self.last.is_cuda else None

    def record(self) -> "torch.cuda.CUDAGraph":
        """Record `compute`, after a first call that lets libraries set themselves up."""
        graph, aside, before = torch.cuda.CUDAGraph(), torch.cuda.Stream(), [x.clone() for x in self.changing]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self.compute()
        torch.cuda.current_stream().wait_stream(aside)
        for x, old in zip(self.changing, before):
            x.copy_(old)
        with torch.cuda.graph(graph):
            self.output = self.compute()  # (B, D) where each replay leaves its result
        return graph

    def compute(self) -> Tensor:
        """The states (B, D) after self.token (B,), whose keys and values then move to the column that comes next."""
        cache = self.cache
        states = cache.step_at(self.token, cache.bias.shape[3])  # (B, D)
        cache.keys.index_copy_(4, self.column, cache.keys[..., -1:])
        cache.values.index_copy_(3, self.column, cache.values[..., -1:, :])
        cache.bias.index_fill_(3, self.column, 0.0)
        self.column += 1
        return states

    def step(self, token: Tensor) -> Tensor:
        """As KVCache.step."""
        self.token[self.rows] = token
        if self.graph is None:
            return self.compute()[self.rows]
        self.graph.replay()
        return self.output[self.rows]

    def keep(self, running: Tensor) -> Tensor:
        """As KVCache.keep. The other rows stay where they are, and are no longer looked at."""
        order = running.nonzero()[:, 0]  # (count,)
        self.rows = self.rows[order]
        return order
