"""Read checkpoints and Hub folders: check the file, load plain types, check what they hold."""

import contextlib
import io
import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from packaging.version import Version
from torch import Tensor

from ppo_lightning.errors import ConfigError, import_extra
from ppo_lightning.utils.finite import first_nonfinite

WEIGHTS, CONFIG = "model.safetensors", "config.json"  # of a Hub folder
MOST_ENTRIES = 1_000_000
DEEPEST = 50  # levels of dictionaries and lists; ours have about ten

# What a checkpoint holds: the type of an entry (``dict``: with names as keys), of its entries, or of those of a list.
AGENT = {"class_path": str, "init_args": dict, "observation_spec": dict, "action_spec": dict}
CHECKPOINT = {
    "pytorch-lightning_version": str,
    "agent": AGENT,
    "state_dict": dict,
    "hyper_parameters": dict,
    "datamodule_hyper_parameters": {"env_id": (str, dict), "backend": str, "env_kwargs": (dict, type(None))},
    "details": dict,
    "seed": int,
    "env_steps": int,
    "frames_per_rollout": int,
    "episode_returns": [(float, int)],
    "shuffle": Tensor,
}
RESUME = {  # what ``fit`` needs, too
    "optimizer_states": [{"state": Mapping, "param_groups": [dict]}],
    "lr_schedulers": [dict],
    "loops": {"fit_loop": dict},
    "epoch": int,
    "global_step": int,
}


def read_checkpoint(source: str | Path | IO[bytes], map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint of this package without executing anything in it.

    The checksums of the whole file are verified, which PyTorch does not do. This takes about as long as loading:
    0.35 s beside 0.45 s for 512 MiB, 4 ms for a CartPole agent.

    Args:
        source: A path, an address that fsspec opens (``s3://...``), or an open file.
        map_location: Device of the tensors, as for ``torch.load``.

    Raises:
        ConfigError: The file is missing, damaged or of another kind, or its tensors are not finite.
    """
    if isinstance(source, str | Path) and "://" not in str(source) and not Path(source).is_file():
        raise ConfigError(f"ckpt_path {str(source)!r} is not a file: give the path of a checkpoint.")
    with _one_sentence(f"ckpt_path {str(source)!r} cannot be read as a checkpoint"), _opened(source) as file:
        size = file.seek(0, io.SEEK_END)
        _require_intact(file, size)
        file.seek(0)
        checkpoint = torch.load(file, map_location, weights_only=True)
        _require_bounded(checkpoint, size)
        _require(checkpoint, CHECKPOINT | {key: RESUME[key] for key in RESUME if key in checkpoint})
        if Version(checkpoint["pytorch-lightning_version"]) < Version("2"):
            raise _DefectError("Lightning 2 or newer did not write it")
        state = checkpoint["state_dict"]
        if not all(isinstance(state[key], Tensor) for key in state if not key.endswith("_extra_state")):
            raise _DefectError("state_dict holds more than tensors")
        torch.Generator().set_state(checkpoint["shuffle"].cpu())
        if name := first_nonfinite(checkpoint):
            raise _DefectError(f"{name} is NaN or infinite")
    return checkpoint


def require_resumable(checkpoint: dict[str, Any]) -> None:
    """Refuse to resume a run from a checkpoint that :func:`read_checkpoint` read and that holds weights only.

    Raises:
        ConfigError: The optimizer's state, or another part of the run's state, is missing.
    """
    missing = [key for key in RESUME if checkpoint.get(key) in (None, [], {})]
    if missing:
        raise ConfigError(
            f"The checkpoint (ckpt_path) cannot resume a run, because it has no {', '.join(missing)}: give a checkpoint that"
            " was saved without save_weights_only."
        )


def read_hub_folder(folder: Path) -> dict[str, Any]:
    """Read a folder of ``ppo-lightning export --hub``: its ``config.json``, and the weights as ``state_dict``.

    Raises:
        ConfigError: A file is missing, damaged or of another kind, or the weights are not finite.
    """
    safetensors = import_extra("safetensors.torch", extra="export")
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}: give a folder that ppo-lightning export --hub wrote.")
    with _one_sentence(f"{folder} cannot be read as a Hub folder"):
        config = json.loads((folder / CONFIG).read_text())
        _require(config, {"agent": AGENT})
        weights = safetensors.load_file(folder / WEIGHTS)
        config["state_dict"] = {f"agent.{name}": tensor for name, tensor in weights.items()}
        if defect := first_nonfinite(config):
            raise _DefectError(f"{defect} is NaN or infinite")
    return config


class _DefectError(Exception):
    """What is wrong with a file."""


@contextlib.contextmanager
def _one_sentence(what: str) -> Iterator[None]:
    """Turn whatever readers of files raise into one sentence that begins with ``what``."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror or error}.") from error
    except pickle.UnpicklingError as error:  # PyTorch's own text tells how to execute the file
        raise ConfigError(
            f"{what}: it holds more than tensors and plain types, and would execute code."
        ) from error
    except Exception as error:
        unknown = f"it is damaged, or not a checkpoint of ppo_lightning ({type(error).__name__})"
        raise ConfigError(f"{what}: {error if isinstance(error, _DefectError) else unknown}.") from error


@contextlib.contextmanager
def _opened(source: str | Path | IO[bytes]) -> Iterator[IO[bytes]]:
    """Open a path or an address; leave an open file open. One handle serves all reads: the name may change its file."""
    if not isinstance(source, str | Path):
        yield source
    elif "://" in str(source):
        with get_filesystem(str(source)).open(str(source), "rb") as file:
            yield file
    else:
        with open(source, "rb") as file:
            yield file


def _require_intact(file: IO[bytes], size: int) -> None:
    with zipfile.ZipFile(file) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > size:
            raise _DefectError("it is larger unpacked than packed")
        if (damaged := archive.testzip()) is not None:
            raise _DefectError(f"it is damaged: the checksum of {damaged} is another")


def _require_bounded(tree: Any, size: int) -> None:
    """Refuse what takes more memory or time than a file of ``size`` bytes honestly needs."""
    level, tensors = [tree], []
    for _ in range(DEEPEST):
        if sum(map(len, level)) > min(size, MOST_ENTRIES):  # a list may hold one list a million times
            raise _DefectError("it has more entries than the file has bytes, or than a million")
        entries = [entry for node in level for entry in (node.values() if isinstance(node, dict) else node)]
        tensors += [entry for entry in entries if isinstance(entry, Tensor)]
        level = [entry for entry in entries if isinstance(entry, dict | list | tuple)]
        if not level:
            break
    else:
        raise _DefectError(f"it is nested deeper than {DEEPEST} levels")
    if any(tensor.nbytes > size for tensor in tensors):  # one number may be seen as a million
        raise _DefectError("a tensor is larger than the file")


def _require(value: Any, expected: Any, name: str = "") -> None:
    """Demand the entries and types that a table such as ``CHECKPOINT`` lists."""
    kind: Any = type(expected) if isinstance(expected, dict | list) else expected
    fits = isinstance(value, kind) and not (kind is int and value < 0)
    if fits and isinstance(value, dict) and kind is not Mapping:
        fits = all(isinstance(key, str) for key in value)
    if not fits:
        raise _DefectError(f"{name or 'its content'} is not what ppo_lightning writes there")
    entries = expected if isinstance(expected, dict) else {}
    if missing := [key for key in entries if key not in value]:
        raise _DefectError(f"ppo_lightning did not write it (no {', '.join(missing)})")
    for key, entry in entries.items():
        _require(value[key], entry, f"{name}.{key}" if name else key)
    if isinstance(expected, list):
        for entry in value:
            _require(entry, expected[0], name)
