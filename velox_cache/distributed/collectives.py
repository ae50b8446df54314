"""Collective calls of several processes, over mlx's own engine: `mx.distributed`, started by `mlx.launch`.

A *rank* is one of these processes. Sums of a calibration and short texts pass between ranks; nothing of a cache does.
All ranks of the group call a function of this module, in the same order. When a rank dies, the others raise
RuntimeError.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import mlx.core as mx
import numpy as np

from velox_cache.distributed.launcher import launched_rank

Group = mx.distributed.Group
Cell = TypeVar("Cell")


def world() -> Group | None:
    """The group of all processes that a launcher started; None for a process by itself.

    Raises RuntimeError when the other processes cannot be reached.
    """
    if launched_rank() is None:
        return None
    group = mx.distributed.init()
    return group if group.size() > 1 else None


def summed(array: mx.array, group: Group) -> mx.array:
    """The sum over ranks of arrays of one shape and dtype, evaluated. float64 is allowed."""
    return _evaluated(mx.distributed.all_sum(array, group=group, stream=mx.cpu))


def broadcast(array: mx.array, group: Group) -> mx.array:
    """Rank 0's array on every rank, bit for bit. Of the others' arrays only shape and dtype count."""
    return summed(array if group.rank() == 0 else mx.zeros_like(array, stream=mx.cpu), group)


def barrier(group: Group, stream: mx.Stream | mx.ThreadLocalStream) -> None:
    """Wait for what runs on `stream`, then for all ranks. A rank that exits earlier would cut off the others."""
    mx.synchronize(stream)
    summed(mx.zeros((1,)), group)


def on_all_ranks(yes: bool, group: Group | None) -> bool:
    """Whether `yes` holds on every rank."""
    return yes if group is None else "no" not in all_gather_texts("" if yes else "no", group)


def agreed_seed(group: Group) -> int:
    """A random seed, the same on all ranks."""
    return int(np.array(broadcast(mx.array([secrets.randbits(31)], mx.int32), group))[0])


def all_gather_texts(text: str, group: Group) -> list[str]:
    """The text of each rank, in the order of ranks, on every rank."""
    encoded = np.frombuffer(text.encode(), np.uint8)
    longest = mx.array([len(encoded)], mx.int32)
    length = int(np.array(_evaluated(mx.distributed.all_max(longest, group=group, stream=mx.cpu)))[0]) + 1
    padded = mx.array(np.pad(encoded, (0, length - len(encoded))))
    gathered = _evaluated(mx.distributed.all_gather(padded[None], group=group, stream=mx.cpu))
    return [bytes(row).rstrip(b"\0").decode() for row in np.array(gathered)]


@contextmanager
def failing_together(group: Group | None) -> Iterator[None]:
    """A block of work that each rank does by itself. If it raises on one rank, it raises on all.

    The block must hold no collective call. Ranks on which nothing went wrong raise RuntimeError, with the message of
    one on which something did.
    """
    if group is None:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # anything: the other ranks wait for this one
        failure = error
    messages = all_gather_texts("" if failure is None else str(failure) or type(failure).__name__, group)
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message:
            raise RuntimeError(f"rank {rank} of {group.size()} failed: {message}")


def own_share(
    cells: Sequence[Cell],
    group: Group | None,
    *,
    done: Callable[[Cell], bool] = lambda cell: False,
    cost: Callable[[Cell], float] = lambda cell: 1.0,
) -> list[Cell]:
    """The cells of a piece of work that this rank does. Over all ranks, each cell that is not done is done once.

    Args:
        cells: the same on all ranks. Their `repr` must tell them apart.
        group: of the ranks; None for a process by itself.
        done: whether a cell's result is there already. What one rank sees counts for all. So a run that was ended goes
            on where it stood, also with another number of ranks.
        cost: how long a cell takes, in any unit. The longest go first, each to the rank with least to do.

    Raises:
        ValueError: the ranks' cells differ.
    """
    finished = np.array([done(cell) for cell in cells], np.int32)
    rank, size = 0, 1
    if group is not None:
        rank, size = group.rank(), group.size()
        _check_same(cells, group)
        if cells:
            finished = np.array(_evaluated(mx.distributed.all_max(mx.array(finished), group=group, stream=mx.cpu)))
    left = [cell for cell, over in zip(cells, finished, strict=True) if not over]
    return shared_out(left, size, cost)[rank]


def shared_out(cells: Sequence[Cell], n_ranks: int, cost: Callable[[Cell], float]) -> list[list[Cell]]:
    """The cells of each of `n_ranks`: the longest first, each to the rank with least to do, the lowest among equals."""
    loads, shares = [0.0] * n_ranks, [list[Cell]() for _ in range(n_ranks)]
    for cell in sorted(cells, key=cost, reverse=True):  # stable: equal costs stay in order
        least = loads.index(min(loads))
        loads[least] += cost(cell)
        shares[least].append(cell)
    return shares


def _check_same(cells: Sequence[Cell], group: Group) -> None:
    digests = all_gather_texts(hashlib.sha256(repr(list(cells)).encode()).hexdigest(), group)
    if len(set(digests)) > 1:
        raise ValueError(
            "the ranks were given different work, so it cannot be shared out; start all of them with the same "
            "arguments and the same version of velox-kv, and tell cells apart by a repr that has no addresses"
        )


def _evaluated(array: mx.array) -> mx.array:
    try:
        mx.eval(array)
    except RuntimeError as error:
        raise RuntimeError(
            f"another process of this run has ended or cannot be reached ({error}); see its own message, then start "
            "all of them again"
        ) from error
    return array
