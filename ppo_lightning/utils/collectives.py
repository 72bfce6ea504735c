"""Collectives between ranks; no-ops on a single rank."""

import functools
import io
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ppo_lightning.private import timeout_of

_of_thread = threading.local()  # has a `group` in threads that called `use_group`


def world_size() -> int:
    """Return the number of ranks, 1 outside of a data parallel run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather(tensor: Tensor) -> Tensor:
    """Return tensors of the same shape of all ranks, stacked in the order of ranks, on their device.

    This is a collective: every rank must call it. Unlike Lightning's ``all_gather``, it accepts tensors
    on the CPU if the backend of the process group is NCCL.
    """
    ranks = world_size()
    if ranks == 1:
        return tensor.unsqueeze(0)
    group, device = cpu_group(), torch.device("cpu")
    if tensor.device != device and group is not dist.group.WORLD and not hasattr(_of_thread, "group"):
        group, device = dist.group.WORLD, tensor.device  # NCCL, without a copy
    local = tensor.detach().to(device).contiguous()
    parts = torch.empty(ranks, *local.shape, dtype=local.dtype, device=device)
    # As bytes: Gloo does not exchange all dtypes, such as uint16.
    rows = [part.reshape(-1).view(torch.uint8) for part in parts]
    dist.all_gather(rows, local.reshape(-1).view(torch.uint8), group=group)
    return parts.to(tensor.device)


def averaged(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """Return tensors of one dtype averaged over all ranks, which exchange one vector. A collective."""
    vector = torch.cat([tensor.flatten() for tensor in tensors]).div_(world_size())
    dist.all_reduce(vector, group=group)
    parts = vector.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def largest(number: int) -> int:
    """Return the largest of the numbers of all ranks. This is a collective."""
    return number if world_size() == 1 else int(gather(torch.tensor(number)).max())


def concatenate(rows: Tensor) -> Tensor:
    """Concatenate the rows of all ranks in the order of ranks. Their number may differ between ranks."""
    if world_size() == 1:
        return rows
    if not max(counts := gather(torch.tensor(len(rows))).tolist()):
        return rows
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    return torch.cat([part[:count] for part, count in zip(gather(padded), counts, strict=True)])


def chain(items: list[Any]) -> list[Any]:
    """Concatenate the lists of all ranks, of plain types and tensors on the CPU."""
    if world_size() == 1:
        return items
    buffer = io.BytesIO()
    torch.save(items, buffer)  # a plain pickle fails for some dtypes (uint64 of MuJoCo)
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, buffer.getvalue(), group=cpu_group())
    loaded = (torch.load(io.BytesIO(part), weights_only=False) for part in parts)
    return list(itertools.chain.from_iterable(loaded))


def cpu_group() -> Any:
    """Return the process group for tensors on the CPU, None on a single rank."""
    if world_size() == 1:
        return None
    return getattr(_of_thread, "group", None) or _gloo_group(dist.group.WORLD, second=False)


def new_group() -> Any:
    """Return the CPU group for a second thread, None on a single rank. This is a collective.

    Two threads must not share a group, because all ranks must call the collectives of a group in one order.
    """
    return _gloo_group(dist.group.WORLD, second=True) if world_size() > 1 else None


def use_group(group: Any) -> None:
    """Let the collectives of this thread use a group from :func:`new_group`."""
    _of_thread.group = group


@functools.lru_cache(maxsize=2)
def _gloo_group(world: Any, second: bool) -> Any:
    """Create a CPU group at its first use, with the timeout of the default group."""
    if dist.get_backend(world) == "gloo" and not second:
        return world
    return dist.new_group(backend="gloo", timeout=timeout_of(world))
