"""Files that come with the package: recipes, the runs that they name, and trained agents."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
# A wheel has them inside the package, a checkout next to it.
DATA = PACKAGE if (PACKAGE / "configs").is_dir() else PACKAGE.parent
ZOO = DATA / "zoo"  # folders of `save_pretrained`, by the names of their recipes
MODEL = "model.ckpt"  # the checkpoint in such a folder
