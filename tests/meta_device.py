"""Train on PyTorch's device ``meta``, whose tensors have shapes, types and a device, and no values."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils._pytree import tree_leaves

from tests.fake_gpu import WholeSequences

META = torch.device("meta")
aten = torch.ops.aten
# A GPU also takes indices on the CPU.
BETWEEN_DEVICES = (aten._to_copy.default, aten.copy_.default, aten.index.Tensor, aten.index_put_.default)


class OneDevice(WholeSequences):
    """Mode that refuses what a GPU refuses, and answers operations that need the values of tensors.

    All tensors of an operation must be on one device, except for scalars on the CPU. PyTorch checks this on
    ``meta`` for some operations only. A generator must be on the device on which it draws.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        devices = {tensor.device.type for tensor in tensors if tensor.ndim or tensor.device == META}
        if len(devices) > 1 and func not in BETWEEN_DEVICES:
            raise RuntimeError(f"{func} has tensors on {sorted(devices)}")
        if devices != {"meta"}:
            return func(*args, **kwargs)
        if func in (aten.allclose.default, aten.equal.default):
            return True
        if func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        generator = kwargs.get("generator")
        if generator is not None and generator.device != META:
            raise RuntimeError(f"{func} draws on meta with a generator on {generator.device}")
        return super().__torch_dispatch__(func, types, args, kwargs)


class AnyDevice(CPUAccelerator):
    """Accelerator that accepts the device of its strategy."""

    def setup_device(self, device: torch.device) -> None:
        pass


class WithoutFusedAdam(L.Callback):
    """Callback that takes PyTorch's plain Adam: the fused one refuses the device."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        for group in (optimizer.defaults, *optimizer.param_groups):
            group["fused"] = False


@contextmanager
def on_meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Enter the mode, and yield the options of a Trainer that trains on ``meta``."""
    known = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device != "meta" and known(device))
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # which refuses the device
    strategy = SingleDeviceStrategy(META, accelerator=AnyDevice())
    # What the compiler would compile runs as it is.
    for module in ("algorithms.update", "rollouts.scan_collector"):
        monkeypatch.setattr(f"ppo_lightning.{module}.compile_scan", lambda method, cpp_loop: method)
    monkeypatch.setattr("ppo_lightning.algorithms.update.compile_per_instance", lambda method, *_: method)
    with OneDevice():
        yield {"strategy": strategy, "accelerator": "auto", "callbacks": [WithoutFusedAdam()]}
