"""Random recipes with adversarial values; used by `attack.py`."""

from pathlib import Path

CONFIGS = Path(__file__).parent.parent / "configs"
NAMES = ["classic", "pendulum", "cartpole_masked_velocity", "minigrid", "mujoco", "halfcheetah_fast", "locks"]
RECIPES = [CONFIGS / f"ppo/{name}.yaml" for name in NAMES]
RECIPES += [CONFIGS / f"recurrent_ppo/{name}.yaml" for name in NAMES[2:4]]
