"""``ppo-lightning export``: write a trained agent as ONNX or as a folder for the Hugging Face Hub."""

from collections.abc import Sequence
from pathlib import Path

from ppo_lightning.checkpoints.file import read_checkpoint, run_folder
from ppo_lightning.commands.checkpoint_settings import agent_of
from ppo_lightning.commands.options import add_agent_arguments, parser_of
from ppo_lightning.errors import ConfigError
from ppo_lightning.export.hub import write_folder
from ppo_lightning.export.onnx import Deployed, largest_difference, random_observations, to_onnx
from ppo_lightning.spaces.entries import describe
from ppo_lightning.spaces.specs import columns, spec_from_plain


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning export``."""
    parser = parser_of("export")
    parser.add_argument("--ckpt_path", required=True, help="checkpoint of the agent")
    parser.add_argument("--onnx", type=Path, help="file to write: observations in, actions and values out")
    parser.add_argument("--hub", type=Path, help="folder to write: checkpoint and model card")
    add_agent_arguments(parser)
    options = parser.parse_args(args)
    if options.onnx is None and options.hub is None:
        raise ConfigError("export needs something to write: give --onnx FILE or --hub FOLDER.")
    checkpoint = read_checkpoint(options.ckpt_path)
    agent = agent_of(checkpoint, ["export", *args], options)
    if options.onnx is not None:
        spec = spec_from_plain(checkpoint["agent"]["observation_spec"])
        path = to_onnx(agent, spec, options.onnx)
        print(f"onnx: {path.resolve()}")
        taken = Deployed(agent, spec).columns
        if taken is not None:
            sizes = {name: x.stop - x.start for name, _, x in columns(spec) if x in taken}
            print(f"input: {describe(sizes)}")
        observations = random_observations(spec, normalizer=agent.normalizer)
        difference = largest_difference(agent, path, observations, taken)
        print(f"largest difference to PyTorch, random observations: {difference:.2g}")
    if options.hub is not None:
        write_folder(checkpoint, options.hub, run_folder(options.ckpt_path), "OWNER/NAME")
        print(f"hub: {options.hub.resolve()}")
