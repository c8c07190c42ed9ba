"""Decoders, which read a token of each row at a time: one into a cache of fixed memory, one by a recorded step. A first
reading can skip them.

On a GPU a decode step is a CUDA graph: its kernels are recorded once and replayed together, since the GPU would wait
for Python else. A replay has the same shapes each time. So it computes all B rows, those that have ended, too, and
attention looks at all columns of the cache, of which the unused ones are at Cache.NOWHERE, so nobody sees them.
"""
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

REPLAYED_ON = {"cuda"}  # devices that replay a recorded step: 2.4 times as fast there


def new_decoder(model: Any, cache: Any, room: int) -> "Decoder":
    """A decoder that reads one new token of each row at a time, at most `room` times, behind what a Cache holds."""
    return (GraphDecoder if cache.length.device.type in REPLAYED_ON else Decoder)(model, cache, room)


class Decoder:
    """Reads into a Cache with room for all tokens, in place and without gradient, and lets rows go. It is handed to the
    model as the cache: position, mask, advance and extend are what that asks of one."""

    def __init__(self, model: Any, cache: Any, room: int):
        cache.keys, cache.values = ([F.pad(x, (0, 0, 0, room)) for x in side] for side in (cache.keys, cache.values))
        self.model, self.cache, self.mask = model, cache, cache.mask

    def states(self, tokens: Tensor) -> Tensor:
        """The states (R, D) that follow a new token of each row, tokens (R,)."""
        return self.model.hidden(tokens[:, None], self)[:, 0]

    @property
    def position(self) -> Tensor:
        return self.cache.position

    def advance(self, S: int) -> Tensor:
        return self.cache.advance(S)

    def extend(self, layer: int, past: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (side[layer][:, :, : past + 1] for side in (self.cache.keys, self.cache.values))
        keys[:, :, past:], values[:, :, past:] = k, v
        return keys, values

    def keep(self, running: Tensor, *values: Tensor) -> list[Tensor]:
        """Drop the rows where running (R,) is False. Returns what values (R,) have of the others, in their new places.

        Few rows are copied: of the first `count` places, those whose row ended are gaps, and as many running rows lie
        beyond `count`; the k-th gap takes the k-th of them. Running 1 0 1 1 0: row 3 moves into gap 1, order 0 3 2.
        """
        count, C, cache = int(running.sum()), self.position.shape[1], self.cache
        if count == len(running):
            return list(values)
        order = torch.arange(count, device=running.device)  # (count,) the old index of the row in each place
        gaps = (~running[:count]).nonzero()[:, 0]
        order[gaps] = running[count:].nonzero()[:, 0] + count
        for x in (*cache.keys, *cache.values):
            x[gaps, :, :C] = x[order[gaps], :, :C]
        cache.keys, cache.values = [x[:count] for x in cache.keys], [x[:count] for x in cache.values]
        cache.position, cache.length = cache.position[order], cache.length[order]
        return [x[order] for x in values]


class GraphDecoder(Decoder):
    """Reads with all B rows, in fixed shapes. Without a CUDA device nothing is recorded: for tests."""

    def __init__(self, model: Any, cache: Any, room: int):
        super().__init__(model, cache, room)
        B, past = cache.position.shape
        self.rows = torch.arange(B, device=cache.length.device)  # (B',) the running ones
        self.token, self.column = torch.zeros_like(self.rows)[:, None], self.rows.new_tensor([past - 1])  # the latest
        cache.position = F.pad(cache.position, (0, room), value=cache.NOWHERE)  # (B, columns) none read yet
        self.changing = cache.position, cache.length, self.column
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

    def states(self, tokens: Tensor) -> Tensor:
        """Of the running rows alone, (B', D)."""
        self.token[self.rows, 0] = tokens
        if self.graph is None:
            return self.model.hidden(self.token, self)[self.rows, 0]
        self.graph.replay()
        return self.output[self.rows, 0]

    def keep(self, running: Tensor, *values: Tensor) -> list[Tensor]:
        """The other rows stay where they are, and are no longer looked at."""
        self.rows = self.rows[running]
        return [x[running] for x in values]

    def advance(self, S: int) -> Tensor:
        own = self.cache.length[:, None].clone()  # (B, 1)
        self.cache.length += 1  # in place, for the graph
        self.column += 1
        self.position.index_copy_(1, self.column, own)
        return own

    def extend(self, layer: int, past: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return keys.index_copy_(2, self.column, k), values.index_copy_(2, self.column, v)
