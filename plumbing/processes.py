"""Several processes, started by torchrun: each works on every N-th prompt or group, and gradients are summed.

    torchrun --nproc_per_node 2 train.py --mitigation none

Without torchrun there is one process: it works on all of them, and nothing is exchanged.
"""
import os
import sys
from collections import Counter
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def world() -> tuple[int, int]:
    """The rank of this process and the number of processes: (0, 1) unless torchrun started several."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def leads() -> bool:
    """Whether this process prints and writes files: true for the only one, and for the first of several."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def join(device: str) -> str:
    """Connect to the other processes, if there are any. Returns this one's device: each process has its own GPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return device
    # The first optimizer would import this module, which then holds on to the process group: gloo's threads would
    # outlive the interpreter and now and then abort a process that has already finished.
    import torch.distributed.nn  # noqa: F401
    kind = device.partition(":")[0]
    dist.init_process_group("gloo" if kind == "cpu" else None)
    if not leads():
        sys.stdout = open(os.devnull, "w")
    return device if kind == "cpu" else f"{kind}:{os.environ['LOCAL_RANK']}"


def leave() -> None:
    """Disconnect from the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


def first_alone(work: Callable[[], Any]) -> Any:
    """What `work` returns in the first process, in every process; or the ValueError or OSError that it raised there."""
    result = error = None
    if leads():
        try:
            result = work()
        except (ValueError, OSError) as raised:
            error = raised
    result, error = gather([(result, error)])[0]
    if error:
        raise error
    return result


def check_equal(values: dict) -> None:
    """ValueError unless every process has the same values."""
    everyone = gather([values])
    for name in values:
        if any(other[name] != everyone[0][name] for other in everyone):
            raise ValueError(f"the processes have different values of --{name}: start all with the same flags")


def my_part(items: list) -> list:
    """This process's part of a list: every N-th item, starting at its rank."""
    rank, size = world()
    return items[rank::size]


def shared(function: Callable, items: list, **rows: Tensor | None) -> tuple | list:
    """function(items, **rows) -> tensors and tuples, with the items shared among all processes; all of them get all.
    Arguments (rows is None, or has as many for each item) and results have equally many rows for each item. Results
    (rows, T) are padded on the right to the longest T."""
    if world()[1] == 1:
        return function(items, **rows)

    def by_item(mine: list[int]) -> list[list]:
        """The results of some items, apart."""
        own = {name: None if x is None else x.unflatten(0, (len(items), -1))[mine].flatten(0, 1)
               for name, x in rows.items()}
        found = function([items[i] for i in mine], **own)
        size = len(found[0]) // len(mine)  # copies, because a view would carry all rows to another process
        return [[x[i : i + size].cpu().clone() if isinstance(x, Tensor) else x[i : i + size] for x in found]
                for i in range(0, size * len(mine), size)]

    def joined(field: tuple) -> Tensor | tuple:
        """A field of all items' results as one."""
        if isinstance(field[0], tuple):
            return sum(field, ())
        rows = [row for x in field for row in x]
        return pad_sequence(rows, batch_first=True) if rows[0].dim() else torch.stack(rows)

    mine = my_part(list(range(len(items))))
    return [joined(field) for field in zip(*gather(by_item(mine) if mine else []))]


def gather(results: list) -> list:
    """The results of all processes, one per item of their `my_part(items)`, in the order of the items."""
    if world()[1] == 1:
        return results
    shares = [None] * world()[1]
    dist.all_gather_object(shares, results)
    return [share[i] for i in range(len(shares[0])) for share in shares if i < len(share)]  # the first one is longest


def sum_over_processes(tensors: list[Tensor]) -> None:
    """Replace each tensor, in place, by its sum over the processes."""
    if dist.is_initialized():
        for tensor in tensors:
            dist.all_reduce(tensor)


def sum_by_name(values: dict) -> Counter:
    """The sums, over the processes, of the numbers that have the same name; a process may lack some."""
    total = Counter()
    for own in gather([{name: float(value) for name, value in values.items()}]):
        total.update(own)
    return total
