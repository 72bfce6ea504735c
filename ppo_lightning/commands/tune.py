"""``ppo-lightning tune``: search hyperparameters on Optuna, with runs in processes that resume."""

import argparse
import contextlib
import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ppo_lightning.commands import study as studies
from ppo_lightning.commands.benchmark import add_runner_arguments, exit_on_signals
from ppo_lightning.commands.compare import compare
from ppo_lightning.commands.jobs import jobs_of
from ppo_lightning.commands.report import write_report
from ppo_lightning.commands.runner import Runner
from ppo_lightning.commands.search_space import Space, flags_of, read_space, values_of_flags, with_values
from ppo_lightning.commands.tuner import AGGREGATES, SHARES, Tuner
from ppo_lightning.errors import ConfigError, import_extra

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def check_flags(recipes: Sequence[Path], flags: tuple[str, ...], space: Space) -> None:
    """Parse the recipes with a value of each parameter, before trials fail one by one.

    Raises:
        SystemExit: With code 2, after a sentence about the wrong key or value.
    """
    from ppo_lightning.commands import cli

    values = {entry.name: entry.choices[0] if entry.choices else entry.low for entry in space.parameters}
    for recipe in recipes:
        args = ["fit", "--config", str(recipe), *flags, *flags_of(values), "--print_config"]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                cli.run([], args, save_config=False)
        except SystemExit as end:
            if end.code:
                raise


def write_best(
    study: Any, space: Space, recipes: Sequence[Path], flags: tuple[str, ...], folder: Path
) -> list[Path]:
    """Write the recipe of the best trial: ``best.yaml``, or ``best_NAME.yaml`` for each of several recipes.

    Returns:
        The files.
    """
    best = study.best_trial
    values = values_of_flags(flags) | best_values(best, space)
    paths = []
    for recipe in recipes:
        path = folder / ("best.yaml" if len(recipes) == 1 else f"best_{recipe.stem}.yaml")
        content = with_values(yaml.safe_load(recipe.read_text()), values)
        source = f"trial {best.number} of ppo-lightning tune, score {best.value:.4f}"
        head = f"# {recipe.name} with the values of {source}.\n"
        path.write_text(head + yaml.safe_dump(content, sort_keys=False))
        paths.append(path)
    return paths


def best_values(trial: Any, space: Space) -> dict[str, Any]:
    """Return the values of a finished trial by flag of ``fit``; none for the recipes as they are."""
    if "start" in trial.user_attrs:
        return {}
    optuna = import_extra("optuna", extra="tune")
    return space.suggest(optuna.trial.FixedTrial(trial.params))


def compare_with_start(
    recipes: Sequence[Path],
    flags: tuple[str, ...],
    best: dict[str, Any],
    seeds: Sequence[int],
    runner: Runner,
) -> str:
    """Train the recipes as they are and with the best values on fresh seeds, and compare them.

    Args:
        recipes: YAML files.
        flags: Flags of ``fit`` for all runs.
        best: Values of the best trial.
        seeds: Seeds that no trial has used.
        runner: Runner of the study.

    Returns:
        The table of ``ppo-lightning compare``.
    """
    folders = []
    for name, values in (("start", {}), ("best", best)):
        side = Runner(runner.folder / "comparison" / name, runner.workers, runner.threads)
        jobs = jobs_of(recipes, seeds, [], (*flags, *flags_of(values)))
        side.require_same_settings(jobs)
        runner.display.say(f"comparison on fresh seeds: {name}")
        side.run(jobs)
        words = ["ppo-lightning", "benchmark", "--recipes", *map(str, recipes), "--seeds", *map(str, seeds)]
        write_report(side, jobs, [*words, *flags, *flags_of(values)])
        folders.append(side.folder)
    return compare(folders[0], folders[1])[0]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        "ppo-lightning tune",
        description="Search hyperparameters with Optuna. Each trial trains all recipes, seed by seed, and is"
        " pruned early. The same command resumes the study, and on another machine joins it.",
        epilog="All other arguments are passed to fit: --data.total_timesteps 100000 ...",
        allow_abbrev=False,
    )
    parser.add_argument("--recipes", nargs="+", type=Path, required=True, help="YAML files")
    parser.add_argument("--space", type=Path, required=True, help="search space, a YAML file")
    parser.add_argument("--trials", type=int, default=100, help="trials of the study (default: 100)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each trial, from 1 (default: 3)")
    parser.add_argument("--fresh_seeds", type=int, default=5, help="seeds of the comparison (default: 5)")
    add_runner_arguments(parser, "runs/tune")
    parser.add_argument(
        "--storage", help="file, or URL of a database (default: study.journal in the folder of --output)"
    )
    parser.add_argument("--study", default="tune", help="name of the study in the storage (default: tune)")
    parser.add_argument("--pruner", choices=["median", "hyperband", "none"], default="median")
    parser.add_argument("--aggregate", choices=list(AGGREGATES), default="mean", help="of the scores")
    return parser


def main(args: Sequence[str]) -> None:
    """Run ``ppo-lightning tune``.

    Args:
        args: Arguments of the command. Unknown ones are passed to ``fit``.

    Raises:
        ConfigError: A setting is invalid.
    """
    options, unknown = parser().parse_known_args(args)
    flags = tuple(unknown)
    values_of_flags(flags)
    for name in ("trials", "seeds", "workers", "threads"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} ({getattr(options, name)}) must be at least 1.")
    space = read_space(options.space)
    jobs = jobs_of(options.recipes, [1], [], flags)
    env_ids = [str(job.settings["env_id"]) for job in jobs]
    if len(set(env_ids)) > 1 and (missing := [env_id for env_id in env_ids if env_id not in space.targets]):
        raise ConfigError(f"--space {options.space}: several environments need targets; add {missing[0]}.")
    optuna = import_extra("optuna", extra="tune")
    check_flags(options.recipes, flags, space)
    pruners = {
        "median": optuna.pruners.MedianPruner,
        "hyperband": lambda: optuna.pruners.HyperbandPruner(max_resource=SHARES * options.seeds),
        "none": optuna.pruners.NopPruner,
    }
    shared = {
        "recipes": {recipe.stem: yaml.safe_load(recipe.read_text()) for recipe in options.recipes},
        "space": yaml.safe_load(options.space.read_text()),
        **{name: getattr(options, name) for name in ("seeds", "threads", "pruner", "aggregate")},
        "flags": shlex.join(flags),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    storage = options.storage or str(options.output / "study.journal")
    study = studies.open_study(storage, options.study, pruners[options.pruner](), shared)
    runner = Runner(options.output, options.workers, options.threads)
    tuner = Tuner(
        study, runner, space, options.recipes, flags, options.seeds, options.trials, options.aggregate
    )
    exit_on_signals()
    was_finished = len(tuner.finished()) >= options.trials
    tuner.enqueue_start()
    try:
        tuner.run()
    except SystemExit:
        print(f"Interrupted after {len(tuner.finished())} trials: the same command resumes the study.")
        raise
    last = max(tuner.finished(), key=lambda trial: (trial.datetime_complete, trial.number))
    with (options.output / "results.lock").open("w") as lock:
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            was_finished = False
        if was_finished or last.user_attrs["owner"] == tuner.owner:
            write_results(tuner, options, flags)
        else:
            print("The study is complete. The process that finished its last trial writes the results.")


def write_results(tuner: Tuner, options: argparse.Namespace, flags: tuple[str, ...]) -> None:
    """Write the recipe of the best trial, plots and the comparison with the start."""
    study, space, folder = tuner.study, tuner.space, options.output
    paths = write_best(study, space, options.recipes, flags, folder)
    drawn = [f"{name}.{suffix}" for name in studies.draw(study, folder) for suffix in ("png", "html")]
    start = next(trial for trial in tuner.finished() if "start" in trial.user_attrs)
    best = study.best_trial
    print(f"Best trial: {best.number}, score {best.value:.4f}; the recipes as they are: {start.value:.4f}.")
    print(f"{folder}: {', '.join([*(path.name for path in paths), *drawn])}")
    if best.number == start.number:
        print("No trial is better than the recipes as they are.")
    elif options.fresh_seeds > 0:
        seeds = range(options.seeds + 1, options.seeds + 1 + options.fresh_seeds)
        text = compare_with_start(options.recipes, flags, best_values(best, space), seeds, tuner.runner)
        (folder / "comparison.md").write_text(text + "\n")
        print(f"\nRecipes as they are (before) and best trial (after), {len(seeds)} fresh seeds:\n\n{text}")
