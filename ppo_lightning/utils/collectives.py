"""What the ranks of a run tell each other. On a single rank every function returns what it was given."""

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist


def world_size() -> int:
    """Returns the number of ranks that run together; 1 outside of a data parallel run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather(tensor: Tensor) -> Tensor:
    """Returns the tensors of all ranks, [W, ...], in their order.

    Every rank calls it at the same time with a tensor of the same shape. It differs from Lightning's ``all_gather`` in
    taking tensors on the CPU where the ranks speak NCCL.
    """
    ranks = world_size()
    if ranks == 1:
        return tensor.unsqueeze(0)
    local = tensor.detach().cpu().contiguous()
    parts = [torch.empty_like(local) for _ in range(ranks)]
    dist.all_gather(parts, local, group=cpu_group())
    return torch.stack(parts).to(tensor.device)


def gather_array(array: np.ndarray) -> np.ndarray:
    """Does what :func:`gather` does, for an array."""
    return gather(torch.from_numpy(array)).numpy()


def concatenate(rows: Tensor) -> Tensor:
    """Returns the rows [K, ...] of all ranks one after the other, [sum of K, ...]; K may differ between ranks."""
    if world_size() == 1:
        return rows
    counts = gather(torch.tensor(len(rows))).tolist()
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    return torch.cat([its[:count] for its, count in zip(gather(padded), counts, strict=True)])


def chain(items: list[Any]) -> list[Any]:
    """Returns the lists of all ranks one after the other; of plain types and tensors on the CPU."""
    lists: list[Any] = [items] * world_size()
    if world_size() > 1:
        dist.all_gather_object(lists, items, group=cpu_group())
    return list(itertools.chain.from_iterable(lists))


def require_same(state: Mapping[str, Tensor], step: int) -> None:
    """Compares tensors with those of the other ranks, to the bit.

    Args:
        state: By name.
        step: For the message.

    Raises:
        RuntimeError: They are not the same; names the rank and the first tensor.
    """
    if world_size() == 1:
        return
    tensors = {name: tensor for name, tensor in state.items() if tensor.numel()}
    bits = [tensor.reshape(-1).view(torch.uint8).to(torch.int64) for tensor in tensors.values()]
    weights = [torch.arange(1, its.numel() + 1, device=its.device) for its in bits]
    sums = gather(torch.stack([(a * b).sum() for a, b in zip(bits, weights, strict=True)]).cpu())
    for name, of_ranks in zip(tensors, sums.T.tolist(), strict=True):
        for rank, its in enumerate(of_ranks):
            if its != of_ranks[0]:
                raise RuntimeError(f"{name} of rank {rank} is not the one of rank 0 after {step} steps.")


def cpu_group() -> Any:
    """Returns the process group that exchanges tensors on the CPU; None on a single rank."""
    return _cpu_group(dist.group.WORLD) if world_size() > 1 else None


@functools.lru_cache(maxsize=1)
def _cpu_group(world: Any) -> Any:
    """Create the group, by all ranks at once, at their first exchange; with the time-out of the default group."""
    if dist.get_backend(world) == "gloo":
        return world
    options = world._get_backend(world._device_types[0]).options
    return dist.new_group(backend="gloo", timeout=getattr(options, "_timeout", None))
