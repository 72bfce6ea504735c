"""``ppo-lightning export``: a trained agent as ONNX, and as a folder for the Hugging Face Hub."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ppo_lightning.checkpoints.agent import trained_agent
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.commands.checkpoint_settings import environment_of
from ppo_lightning.commands.options import FLAGS, TRUST
from ppo_lightning.errors import ConfigError
from ppo_lightning.export.hub import push_to_hub, save_for_hub
from ppo_lightning.export.onnx import largest_difference, random_observations, recorded_observations, to_onnx
from ppo_lightning.spaces.specs import spec_from_plain


def main(args: Sequence[str]) -> None:
    """Runs ``ppo-lightning export``."""
    parser = argparse.ArgumentParser(
        "ppo-lightning export",
        description="Writes a trained agent as ONNX, or for the Hugging Face Hub.",
        allow_abbrev=False,
    )
    parser.add_argument("--ckpt_path", required=True, help="the checkpoint")
    parser.add_argument("--onnx", type=Path, help="a file to write: observations in, actions and values out")
    parser.add_argument(
        "--hub", type=Path, help="a folder to write: weights, configuration, model card, video"
    )
    parser.add_argument("--push", metavar="USER/NAME", help="upload that folder, too")
    parser.add_argument("--no_video", action="store_true", help="leave out the video")
    parser.add_argument(TRUST, action="store_true", help=FLAGS[TRUST])
    own = parser.parse_args(args)
    if own.onnx is None and own.hub is None:
        raise ConfigError("export needs something to write: give --onnx FILE or --hub FOLDER.")
    if own.push and own.hub is None:
        raise ConfigError("--push uploads the folder of --hub: give both.")
    checkpoint = read_checkpoint(own.ckpt_path)
    environment_of(checkpoint, args)
    if own.onnx is not None:
        agent, spec = trained_agent(checkpoint), spec_from_plain(checkpoint["agent"]["observation_spec"])
        path = to_onnx(agent, spec, own.onnx)
        print(f"onnx: {path.resolve()}")
        recorded = recorded_observations(
            agent, spec, checkpoint["datamodule_hyper_parameters"], checkpoint["seed"]
        )
        for kind, observation in (("random", random_observations(spec)), ("recorded", recorded)):
            print(
                f"largest difference to PyTorch, {kind} observations: {largest_difference(agent, path, observation):.2g}"
            )
    if own.hub is not None:
        folder = save_for_hub(checkpoint, own.hub, video=not own.no_video)
        print(f"hub: {folder.resolve()}" if not own.push else f"hub: {push_to_hub(folder, own.push)}")
