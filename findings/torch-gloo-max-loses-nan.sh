#!/usr/bin/env bash
# in short (engines): all_reduce with MAX over gloo loses most NaNs, so a maximum doesn't show that a process has one.
# guessed: all_reduce with MAX over gloo passes NaN on as torch.max does, so the maximum shows that some process has
# one
# seen: of each number one process's NaN survives (of a single number, that of process 0) and the others' vanish, in
# every process; reduce a flag of isnan instead
# with: torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0
GLOO_SOCKET_IFNAME=lo venv/bin/python -W ignore - <<'EOF'
import math
import multiprocessing
import os

import torch
import torch.distributed as dist

N = 3


def work(rank, queue):
    dist.init_process_group("gloo", init_method="file://" + FILE, rank=rank, world_size=N)
    for size in (1, 999):
        for bad in range(N):
            x = torch.full((size,), math.nan if rank == bad else 1.0)
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
            queue.put((size, bad, rank, x.isnan().tolist()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    FILE = os.path.abspath("rendezvous")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=work, args=(rank, queue)) for rank in range(N)]
    for process in processes:
        process.start()
    found = {}  # (size, process with NaN, process) -> which places of the maximum are NaN
    for _ in range(2 * N * N):
        *key, nan = queue.get(timeout=60)
        found[tuple(key)] = nan
    for process in processes:
        process.join()
    for (size, bad, rank), nan in sorted(found.items()):
        if rank == 0:
            print(f"{size} numbers, all NaN in process {bad}: share of NaN in the maximum {sum(nan) / size:.3f}")
    assert torch.tensor([math.nan, 1.0]).max().isnan()
    for size in (1, 999):
        assert all(found[size, bad, rank] == found[size, bad, 0] for bad in range(N) for rank in range(N))
        assert all(sum(place) == 1 for place in zip(*(found[size, bad, 0] for bad in range(N))))
    assert found[1, 0, 0] == [True]
EOF
