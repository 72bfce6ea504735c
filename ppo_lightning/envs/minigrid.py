"""Observations of MiniGrid."""

import numpy as np
from gymnasium import spaces

from ppo_lightning.spaces.pictures import SMALLEST_PICTURE
from ppo_lightning.spaces.specs import MASK

CELL = (11, 6, 3)  # numbers of objects, colors and states (minigrid/core/constants.py)


def cells_as_choices(space: spaces.Space) -> spaces.Space:
    """Replace the byte image of a MiniGrid observation space by discrete cells, and drop the text.

    MiniGrid declares each cell as three bytes: object, color and state. A network would read these as
    quantities, for example a ball as more than a key.

    Args:
        space: Observation space of one environment.

    Returns:
        A space with a ``MultiDiscrete`` image. Any space of another kind is returned unchanged.
    """
    if not (isinstance(space, spaces.Dict) and set(space) - {MASK} == {"direction", "image", "mission"}):
        return space
    shape = space["image"].shape or ()
    if (
        shape[2:] != (3,) or shape[0] >= SMALLEST_PICTURE
    ):  # a wrapper has rendered pixels or encoded the cells
        return space
    parts = {name: part for name, part in space.items() if name != "mission"}
    return spaces.Dict({**parts, "image": spaces.MultiDiscrete(np.broadcast_to(CELL, shape))})
