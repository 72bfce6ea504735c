"""``python -m ppo_lightning`` and ``ppo-lightning``."""

import sys

from ppo_lightning.watch import end_with_the_launcher

HELP = """usage: ppo-lightning COMMAND [--config RECIPE.yaml] [--OPTION VALUE ...]

PPO with TorchRL rollouts and PyTorch Lightning. The commands, each with its own --help:

  fit       train; with --ckpt_path, go on with a run
  validate  play whole episodes with a trained agent (--ckpt_path)
  test      the same, under other names
  predict   the actions of a trained agent for stored observations
  play      a video of a trained agent
  export    a trained agent as ONNX, or for the Hugging Face Hub
  profile   where the time of a recipe goes on this machine, and what would make it faster
  details   the implementation details as a recipe or a checkpoint has them; where two checkpoints differ
  benchmark recipes by seeds: a table beside published results, learning curves
  compare   whether the runs of one benchmark are worse than those of another
  ablate    a recipe without some of the implementation details, beside the recipe

The first: ppo-lightning fit --config configs/classic/cartpole.yaml
"""


def main() -> None:
    """Runs the command line; the list of commands is there before anything large is imported."""
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(HELP, end="")
        return
    end_with_the_launcher()
    from ppo_lightning import cli

    cli.main()


if __name__ == "__main__":
    main()
