"""Export of trained agents: ONNX files and folders for the Hugging Face Hub."""

from typing import TYPE_CHECKING

from ppo_lightning.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from ppo_lightning.export.onnx import to_onnx

__all__ = ["to_onnx"]
__getattr__ = lazy_exports(__name__, __file__)
