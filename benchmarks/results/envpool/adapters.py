"""Print the steps per second of EnvPool's adapter, whose versions differ between Pythons, as a row of CSV.

`python adapters.py ENV_ID NUM_ENVS` with each Python in turn; adapters.csv has the rows. One thread, no
agent, random actions, four seconds.
"""

import sys
import time
import warnings
from importlib.metadata import version

import torch

from ppo_lightning import make_env

warnings.simplefilter("ignore")
torch.set_num_threads(1)
env_id, num_envs = sys.argv[1], int(sys.argv[2])
env = make_env(env_id, num_envs, "envpool", env_kwargs={"num_threads": 1})
actions = [env.rand_action(env.reset())["action"].numpy() for _ in range(20)]
steps, start = 0, time.perf_counter()
while time.perf_counter() - start < 4:
    for action in actions:
        over = env.step_arrays(action).over
        if over.any():
            env.reset_arrays(over)
    steps += len(actions) * num_envs
speed = steps / (time.perf_counter() - start)
print(version("envpool"), sys.version.split()[0], env_id, num_envs, round(speed), sep=",")
