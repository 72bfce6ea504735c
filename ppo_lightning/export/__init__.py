"""Export of trained agents: ONNX files and folders for the Hugging Face Hub."""

from ppo_lightning.export.hub import load_from_hub, push_to_hub, save_for_hub
from ppo_lightning.export.onnx import to_onnx

__all__ = ["load_from_hub", "push_to_hub", "save_for_hub", "to_onnx"]
