"""A decode step as a CUDA graph: its kernels are recorded once and replayed together. Only a GPU needs this.

A replay has the same shapes each time. So it computes all B rows, those that have ended, too, and attention looks at
all columns of the cache, of which the unused ones are at a position that nobody has reached.
"""
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Replayed:
    """Stands in for a model and its Cache of qwen2_model.py, which has room, where each row reads a token at a time.
    Without a CUDA device nothing is recorded: for tests."""

    def __init__(self, model: Any, cache: Any):
        self.model, self.cache = model, cache
        self.rows = torch.arange(len(cache.length), device=cache.length.device)  # (B',) the running ones of all B
        self.token = torch.zeros_like(self.rows)[:, None]  # (B, 1)
        self.columns, self.column = cache.columns, self.rows.new_tensor([cache.columns])  # (1,) the next one
        self.position = F.pad(cache.position, (0, cache.room), value=2**62)  # (B, columns) a row never gets that far
        self.changing = self.position, cache.length, self.column
        self.graph = self.record() if self.token.is_cuda else None

    def record(self) -> "torch.cuda.CUDAGraph":
        """Record a step, after a first one that lets libraries set themselves up."""
        graph, aside, before = torch.cuda.CUDAGraph(), torch.cuda.Stream(), [x.clone() for x in self.changing]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self.model.hidden(self.token, self)
        torch.cuda.current_stream().wait_stream(aside)
        for x, old in zip(self.changing, before):
            x.copy_(old)
        with torch.cuda.graph(graph):
            self.output = self.model.hidden(self.token, self)  # (B, 1, D) where each replay leaves its result
        return graph

    def hidden(self, tokens: Tensor, _: Any) -> Tensor:
        """The states (B', 1, D) of new tokens (B', 1)."""
        self.token[self.rows] = tokens
        if self.graph is None:
            return self.model.hidden(self.token, self)[self.rows]
        self.graph.replay()
        return self.output[self.rows]

    def keep(self, running: Tensor) -> Tensor:
        """As Cache.keep. The other rows stay where they are, and are no longer looked at."""
        order = running.nonzero()[:, 0]  # (count,)
        self.rows = self.rows[order]
        return order

    # What a model asks of its cache, in fixed shapes: see Cache.

    def next_positions(self, S: int) -> Tensor:
        return self.cache.next_positions(S)

    def bias(self, own: Tensor) -> Tensor:
        self.position.index_copy_(1, self.column, own)
        return self.cache.mask(own[:, :, None], self.position[:, None])

    def extend(self, layer: int, _: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return keys.index_copy_(2, self.column, k), values.index_copy_(2, self.column, v)

    def advance(self, own: Tensor) -> None:
        self.cache.length += 1  # in place, for the graph
        self.column += 1
