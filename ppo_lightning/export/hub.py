"""Folders of trained agents for the Hugging Face Hub: a checkpoint and its card."""

import contextlib
import csv
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from ppo_lightning.checkpoints.agent import is_ours
from ppo_lightning.checkpoints.file import acting_part, user_path
from ppo_lightning.checkpoints.io import write_atomically
from ppo_lightning.checkpoints.settings import module_settings
from ppo_lightning.errors import ConfigError, first_line, import_extra, nearest
from ppo_lightning.utils.bundled import MODEL, ZOO
from ppo_lightning.utils.output import accessory

VIDEO, CURVE, SETTINGS = "replay.mp4", "curve.png", "cli_config.yaml"
LIBRARY = "ppo_lightning"  # the `library_name` of our cards
RETURN = "charts/episodic_return"
PARTS = {  # of the card, for each of the files that the folder has
    VIDEO: f'<video controls autoplay loop src="{VIDEO}"></video>',
    CURVE: f"![Return over environment steps]({CURVE})",
    SETTINGS: f"Trained by `ppo-lightning fit --config {SETTINGS}`.",
}
CARD = """---
{{ card_data }}
---

# {{ algorithm }} on {{ env_id }}

{{ result }}
{% for part in parts %}
{{ part }}
{% endfor %}
```python
from {{ package }} import {{ algorithm }}

module = {{ algorithm }}.from_pretrained("{{ repo_id }}")
action = module.predict(observation)  # as the environment returned it; with a memory: action, memory
```

| hyperparameter | |
|---|---|
{% for key, value in settings.items() -%}
| {{ key }} | {{ value }} |
{% endfor %}"""


def find_model(source: str | Path) -> Path:
    """Return the checkpoint of a folder, a bundled agent or a repository, of which nothing else is loaded."""
    folder = next((path for path in (user_path(source), ZOO / source) if path.is_dir()), None)
    if folder is None:
        hub = import_extra("huggingface_hub", extra="export")
        try:
            folder = Path(hub.snapshot_download(str(source), allow_patterns=[MODEL]))
        except Exception as error:  # network, proxy and server errors have many types
            agents = [path.parent.relative_to(ZOO).as_posix() for path in sorted(ZOO.rglob(MODEL))]
            same = {name.rpartition("/")[2]: name for name in reversed(agents)}
            hint = nearest(str(source), {name: name for name in agents} | same) or " (ppo-lightning recipes)."
            failure = f"The download from the Hub failed: {first_line(error)}."
            raise ConfigError(f"{source} is neither a folder nor a bundled agent{hint} {failure}") from error
    if not (folder / MODEL).is_file():
        raise ConfigError(f"{source} has no file {MODEL}: give a folder that save_pretrained wrote.")
    return folder / MODEL


def write_folder(
    checkpoint: dict[str, Any], folder: Path, run: Path, repo_id: str, class_path: str = "ppo_lightning.PPO"
) -> None:
    """Write the checkpoint of an agent and its card, with video, curve and settings of the run's folder.

    ``class_path`` is that of a module of the main program, which its checkpoint does not name.
    """
    hub = import_extra("huggingface_hub", extra="export")
    folder = user_path(folder)
    card = folder / "README.md"
    is_own = card.is_file() and f"library_name: {LIBRARY}" in card.read_text(errors="replace")
    if card.exists() and not is_own:
        raise ConfigError(f"{card} is no model card of ppo_lightning: name another folder.")
    write_atomically(acting_part(checkpoint), folder / MODEL)
    if is_own and run.resolve() != folder.resolve():
        for name in (CURVE, SETTINGS):  # of another agent
            (folder / name).unlink(missing_ok=True)
    with accessory("A file of the model card"):
        videos = sorted(run.glob("videos/*.mp4"), key=os.path.getmtime)
        for source, name in ((run / SETTINGS, SETTINGS), *((video, VIDEO) for video in videos[-1:])):
            with contextlib.suppress(FileNotFoundError, shutil.SameFileError):
                shutil.copyfile(source, folder / name)
    if (run / "metrics.csv").is_file() and importlib.util.find_spec("matplotlib") is not None:
        with accessory("The curve of the model card"):
            _draw_curve(run / "metrics.csv", folder / CURVE)
    metric, results = "return of the last evaluation", checkpoint.get("evaluation")
    if not results:
        metric, returns = "return of the last training episodes", checkpoint["episode_returns"] or [np.nan]
        results = {
            "episodic_return": np.mean(returns),
            "episodic_return_std": np.std(returns, ddof=len(returns) > 1),
        }
    value = f"{results['episodic_return']:.2f} +/- {results['episodic_return_std']:.2f}"
    task, env_id = "reinforcement-learning", str(checkpoint["datamodule_hyper_parameters"]["env_id"])
    package, _, algorithm = checkpoint["hyper_parameters"].get("_class_path", class_path).rpartition(".")
    header = hub.ModelCardData(
        library_name=LIBRARY,
        tags=[env_id, algorithm.lower(), task, "pytorch-lightning", "torchrl"],
        model_name=algorithm,
        eval_results=[hub.EvalResult(task, env_id, env_id, "mean_reward", value, metric_name=metric)],
    )
    words = {
        "result": f"{metric.capitalize()}: {value}, after {checkpoint['env_steps']} environment steps.",
        "parts": [part for file, part in PARTS.items() if (folder / file).is_file()],
        "package": "ppo_lightning" if is_ours(package) else package,
        "settings": module_settings(checkpoint),
    } | {"algorithm": algorithm, "env_id": env_id, "repo_id": repo_id}
    hub.ModelCard.from_template(header, template_str=CARD, **words).save(card)


def _draw_curve(metrics: Path, path: Path) -> None:
    from matplotlib.figure import Figure

    with open(metrics) as file:
        points = [(int(row["step"]), float(row[RETURN])) for row in csv.DictReader(file) if row.get(RETURN)]
    figure = Figure((6, 3), layout="constrained")
    figure.subplots().plot(*zip(*points, strict=True))
    figure.savefig(path)
