"""``python -m ppo_lightning`` is ``ppo-lightning``."""

from ppo_lightning.cli import main

if __name__ == "__main__":
    main()
