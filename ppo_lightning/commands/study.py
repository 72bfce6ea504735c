"""Study of ``tune`` on Optuna: shared storage, trials that can be taken up again, plots."""

import contextlib
import json
import os
import platform
import time
import uuid
import warnings
from pathlib import Path
from typing import Any

from ppo_lightning.errors import ConfigError, import_extra

DEAD = 10.0  # seconds after which the trial of a process that has ended is taken up: its runs save first
SILENT = 120.0  # seconds without a heartbeat after which a process on another machine is given up
BEAT = 20.0  # seconds between heartbeats
KEPT = ("start", "runs")  # attributes of a trial that is taken up again


def open_study(storage: str, name: str, pruner: Any, settings: dict[str, Any]) -> Any:
    """Create a study of Optuna, or join it.

    Args:
        storage: File (Optuna's journal) or URL of a database.
        name: Name of the study in the storage.
        pruner: Pruner of Optuna.
        settings: Settings that all processes of the study share.

    Raises:
        ConfigError: The study exists and has other settings, or the storage cannot be opened.
    """
    optuna = import_extra("optuna", extra="tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    try:
        backend: Any = storage
        if "://" not in storage:
            Path(storage).parent.mkdir(parents=True, exist_ok=True)
            journal = optuna.storages.journal
            lock = journal.JournalFileOpenLock(storage)  # on Windows, too, unlike the default
            backend = optuna.storages.JournalStorage(journal.JournalFileBackend(storage, lock_obj=lock))
        study = optuna.create_study(
            storage=backend,
            study_name=name,
            sampler=optuna.samplers.TPESampler(group=True),  # for parameters with conditions
            pruner=pruner,
            direction="maximize",
            load_if_exists=True,
        )
    except (
        OSError,
        ValueError,
        ImportError,
        import_extra("sqlalchemy.exc", extra="tune").SQLAlchemyError,
    ) as error:
        raise ConfigError(f"--storage {storage} cannot be opened: {error}") from error
    settings = json.loads(json.dumps(settings, default=str))
    old = study.user_attrs.get("settings")
    if old is None:
        study.set_user_attr("settings", settings)
    elif changed := [key for key in settings if settings[key] != old.get(key)]:
        raise ConfigError(
            f"The study {name!r} in {storage} has other settings ({', '.join(changed)}): keep them, or choose"
            " another --storage and --output."
        )
    return study


def owner() -> dict[str, Any]:
    """Return a description of this process: machine, process id and a random token."""
    machine = platform.node()
    with contextlib.suppress(OSError):  # containers may share a host name
        machine += " " + os.readlink("/proc/self/ns/pid")
    return {"machine": machine, "pid": os.getpid(), "token": uuid.uuid4().hex[:8]}


def has_ended(process: dict[str, Any] | None) -> bool:
    """Return whether a process is known to have ended; False for a process on another machine."""
    if process is None or process["machine"] != owner()["machine"]:
        return False
    try:
        os.kill(process["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def requeue(study: Any, trial: Any) -> None:
    """Let a running trial fail and queue its parameters again. Exactly one process succeeds in this.

    The new trial continues the runs of the old one.

    Args:
        study: The study.
        trial: A trial of this or another process.
    """
    optuna = import_extra("optuna", extra="tune")
    try:
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
        return  # another process was faster
    attributes = {"runs": trial.number} | {
        key: value for key, value in trial.user_attrs.items() if key in KEPT
    }
    parameters = trial.system_attrs.get("fixed_params", {}) | trial.params
    study.enqueue_trial(parameters, user_attrs=attributes)


class StaleTrials:
    """Finds running trials whose process has ended.

    A journal has no heartbeat, so each process changes an attribute of its trials every 20 seconds.
    A change is timed with the clock of the observer, because clocks of machines differ.

    Args:
        study: The study.
    """

    def __init__(self, study: Any) -> None:
        self._study = study
        self._last: dict[int, tuple[Any, float]] = {}

    def find(self, mine: set[int]) -> list[Any]:
        """Return the stale trials.

        Args:
            mine: Numbers of the trials of this process.
        """
        running = import_extra("optuna", extra="tune").trial.TrialState.RUNNING
        now = time.monotonic()
        stale = []
        for trial in self._study.get_trials(states=(running,)):
            if trial.number in mine:
                continue
            process = trial.user_attrs.get("owner")
            sign = process, trial.user_attrs.get("beat"), has_ended(process)
            if self._last.get(trial.number, (None, now))[0] != sign:
                self._last[trial.number] = sign, now
            if now - self._last[trial.number][1] > (DEAD if sign[-1] else SILENT):
                stale.append(trial)
        return stale


def draw(study: Any, folder: Path) -> list[str]:
    """Draw Optuna's plots as PNG and as HTML.

    Args:
        study: The study.
        folder: Folder for the files.

    Returns:
        Names of the plots that could be drawn. The importance needs two trials with different scores.
    """
    import_extra("matplotlib", extra="tune").use("Agg")
    import_extra("plotly", extra="tune")
    import matplotlib.pyplot as plt

    visualization = import_extra("optuna.visualization", extra="tune")
    matplotlib = import_extra("optuna.visualization.matplotlib", extra="tune")
    drawn = []
    for name in ("optimization_history", "param_importances", "parallel_coordinate"):
        try:
            html = getattr(visualization, f"plot_{name}")(study)
            axes = getattr(matplotlib, f"plot_{name}")(study)
        except (ValueError, RuntimeError):
            continue
        html.write_html(folder / f"{name}.html", include_plotlyjs="directory")
        axes.figure.set_size_inches(10, 5)
        axes.figure.savefig(folder / f"{name}.png", dpi=130, bbox_inches="tight")
        plt.close(axes.figure)
        drawn.append(name)
    return drawn
