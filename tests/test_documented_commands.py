"""All commands, snippets and settings in README.md and docs/ work as written, with a small budget."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.distributed import run as torchrun

from ppo_lightning import PPO, __main__
from ppo_lightning.commands.recipes import bundled_name, bundled_tasks, find_recipe
from ppo_lightning.experiments import benchmark
from ppo_lightning.experiments.tune import read_space
from tests.documented import DOCUMENTS, LIGHTNING, ROOT, all_commands, blocks, commands, flags_of, words
from tests.helpers import RECIPE, Forked, command_line, short

RECIPES = sorted((ROOT / "configs").rglob("*.yaml"))
# Part of a command -> why it is not run. The last test parses these commands or looks them up.
NOT_RUN = {
    "make train": "minutes; tests/stories/test_learning.py trains the recipe",
    "make quick": "the tests themselves",
    "make test": "the tests themselves",
    "make lint": "a command of CI",
    "make format": "changes files",
    "make docs": "tests/test_docs.py builds the site",
    "make attack": "tests/test_attack.py has a small one",
    "pip install": "the network",
    "pip wheel": "tests/test_wheel.py builds the wheel",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun ": "several machines; tests/stories/test_machines.py",
    "sbatch ": "a cluster; tests/stories/test_machines.py",
    "kubectl ": "a cluster; tests/stories/test_machines.py",
    "--data.worker_backend ray": "a cluster; tests/envs/workers/test_ray.py",
    "docker ": "a Docker daemon; tests/test_containers.py runs the steps of the Dockerfile",
    "pytest ": "the tests themselves",
    "python benchmarks/": "minutes; some need Stable-Baselines3 or a GPU",
    "--trainer.accelerator gpu": "a GPU",
    "configs/ppo/brax_pendulum": "Brax; tests/envs/test_jax_env.py",
    "configs/ppo/playground_": "MuJoCo Playground; tests/envs/test_jax_env.py",
}
SHORT_EPISODES = "--data.env_kwargs.max_episode_steps 50"
BUDGETS = {
    "validate": "--data.eval_episodes 1",
    "test": "--data.eval_episodes 1",
    "profile": "--seconds 0.2",
    "check-env": "--seconds 1",
    "play": "--episodes 1",
    "tune": f"--trials 1 --seeds 1 --data.eval_episodes 1 --data.total_timesteps 1024 {SHORT_EPISODES}",
    "benchmark": "--seeds 1 --model.compile false --data.eval_episodes 1 --data.total_timesteps 4096",
}
LANGUAGES = {"bash", "inline", "python", "yaml", ""}


def is_run(command):
    return not any(part in command for part in NOT_RUN)


def test_every_command_is_run_or_listed():
    """The list names no command that is no longer documented."""
    found = all_commands()
    assert len(found) > 60
    unknown = [command for command in found if is_run(command) and not command.startswith("ppo-lightning ")]
    assert not unknown, "neither a command of ppo-lightning nor in NOT_RUN"
    assert [part for part in NOT_RUN if not any(part in command for command in found)] == []
    for document in DOCUMENTS:
        for block in blocks(document):
            assert block.language in LANGUAGES, (document, "a language that no test reads")
            command = re.search(r"^ *(\$ |ppo-lightning|python|pip) ", block.text, re.MULTILINE)
            assert block.language or not command


def value(args, flag, default=None):
    return args[args.index(flag) + 1] if flag in args else default


class Reader:
    """Reader who types the commands of a document in a new folder with the recipes."""

    def __init__(self, folder, monkeypatch, capfd):
        self.folder, self.monkeypatch, self.capfd = folder, monkeypatch, capfd
        monkeypatch.chdir(folder)
        monkeypatch.setenv("TORCHINDUCTOR_DEBUG_COMPILE", "0")  # as a reader compiles
        shutil.copytree(ROOT / "configs", "configs")
        shutil.copy(RECIPE, "RECIPE.yaml")
        Path("cartpole_space.yaml").write_text("parameters: {model.gamma: {low: 0.9, high: 0.999}}")
        os.makedirs("benchmarks/results/tune")
        shutil.copy(ROOT / "benchmarks/results/tune/space.yaml", "benchmarks/results/tune")
        for name in ("runs/before", "runs/after"):
            os.makedirs(name)
            # Ten runs are enough for a test.
            shutil.copy(ROOT / "benchmarks/results/compare/before/runs.csv", name)
        self.first = None
        self.absent = set()  # packages that an example needs and this Python does not have

    def checkpoint(self, recipe=None):
        """Return the checkpoint of the first run of a recipe; None: of the first run of all recipes."""
        found = sorted(self.folder.glob(f"runs/{recipe}/version_0/checkpoints/*.ckpt"))
        if found:
            return str(found[0])
        if self.first is None:
            self.run(["fit", "--config", RECIPE, *short(RECIPE)])
        return self.first

    def substituted(self, command):
        """Replace the placeholders of a command by real files."""

        def folder(recipe=None):
            return self.checkpoint(recipe).rsplit("/", 2)[0]

        for placeholder, real in (
            (r"runs/(\w+)/version_0/checkpoints/\.\.\.\.ckpt", lambda match: self.checkpoint(match[1])),
            (r"runs/\.\.\./\S+\.ckpt", lambda match: self.checkpoint()),
            (r"runs/(\w+)/version_0(?=/cli_config\.yaml)", lambda match: folder(match[1])),
            (r"(--ckpt_path) \.\.\.(?= |$)", lambda match: f"{match[1]} {self.checkpoint()}"),
            (r"\.\.\.(?=/cli_config\.yaml)", lambda match: folder()),
            (r"--output \.\.\.", "--output output"),
            (r" \.\.\. ", " "),
        ):
            command = re.sub(placeholder, real, command)
        for name in re.findall(r"\b[ab]\.ckpt", command):
            shutil.copy(self.checkpoint(), name)
        assert "..." not in command, f"a placeholder that this test does not know: {command}"
        return command

    def budget(self, args):
        """Return flags that shorten a command."""
        if args[0] == "fit":
            return self.budget_of_fit(args)
        flags = BUDGETS.get(args[0], "")
        if args[0] == "benchmark":
            flags += "" if "cartpole" in " ".join(args) else f" {SHORT_EPISODES}"
            flags += " --model.learning_starts 1000" if "configs/dqn" in " ".join(args) else ""
            flags += " --recipes " + " ".join([arg for arg in args if arg.endswith(".yaml")][:2])
        if args[0] == "play" and "--opponent" not in args:
            flags += " --max_frames 50"  # MuJoCo renders few pictures a second without a GPU
        if "--model.rating_games" in args:
            flags += " --model.rating_games 2"
        return flags.split()

    def budget_of_fit(self, args):
        path = value(args, "--ckpt_path")
        if path not in (None, "last"):
            checkpoint = torch.load(path, weights_only=True)
            total = checkpoint["env_steps"] + 2 * checkpoint["frames_per_rollout"]
            return ["--data.eval_episodes", "1", "--data.total_timesteps", str(total)]
        names = [name for name in ("num_envs", "num_steps") if f"--data.{name}" in args]
        sizes = {name: int(value(args, f"--data.{name}")) for name in names}
        rollouts = 2 + 4 * ("--auto_resume" in args) + 6 * (path == "last")
        recipe = value(args, "--config")
        return short(recipe and find_recipe(recipe)[0], rollouts, **sizes)

    def run(self, args):
        """Run a command: in this process, or in a new one if the command starts others."""
        if "--trainer.devices" in args or args[0] in ("benchmark", "tune"):
            process = Forked(self.folder, command_line, *args)
            out, errors = process.communicate(timeout=400)
            code = process.returncode
        else:
            self.monkeypatch.setattr(sys, "argv", ["ppo-lightning", *args])
            try:
                code = __main__.main() or 0
            except SystemExit as end:
                code = end.code or 0
            out, errors = self.capfd.readouterr()
        assert code == 0, (args, errors[-2000:])
        if self.first is None and (saved := re.search(r"^checkpoint: (.+)$", out, re.MULTILINE)):
            self.first = saved[1]
        return out

    def type(self, command):
        """Run a documented command."""
        absent = {name for name in ("dm_control", "procgen") if name in command and not find_spec(name)}
        self.absent |= absent
        if absent or (self.absent and "--ckpt_path" in command):  # of a run that was left out
            return
        program, *args = words(self.substituted(command), self.folder)
        assert program == "ppo-lightning"
        if args[0] == "benchmark" and all_commands()[command].parent.name == "benchmarks":
            self.train_here(args)
            return
        out = self.run([*args, *self.budget(args)])
        if args[0] == "fit":
            assert "wall time:" in out, out

    def train_here(self, args):
        """Train up to two jobs of a benchmark in this process, instead of a process each and a report."""
        with self.monkeypatch.context() as patch:
            jobs = []
            patch.setattr(benchmark, "run", lambda options, found, command: jobs.extend(found))
            benchmark.main(args[1:])
        for job in [job for job in jobs if job.seed == jobs[0].seed][:2]:
            fit = ["fit", "--config", str(job.recipe), *job.flags, "--model.compile", "false"]
            self.run([*fit, *self.budget(fit)])

    def paste(self, code):
        """Run a snippet with an agent and an observation."""
        checkpoint = torch.load(self.checkpoint(), weights_only=True)
        shutil.copy(self.checkpoint(), "agent.ckpt")
        names = {"agent": PPO.load_from_checkpoint(self.checkpoint()).agent}
        names["observation"] = torch.zeros(1, *checkpoint["agent"]["observation_spec"]["shape"])
        exec(re.sub(r"(total_timesteps|total_frames)=[\d_]+", r"\1=2048", code), names)
        self.capfd.readouterr()

    def read_settings(self, text):
        """Parse settings or a search space in YAML."""
        if "\nparameters:" in text:
            (self.folder / "space.yaml").write_text(text)
            read_space(self.folder / "space.yaml")
            return
        (self.folder / "settings.yaml").write_text(text)
        assert "class_path: ppo_lightning" in self.run(["fit", "--config", "settings.yaml", "--print_config"])


@pytest.fixture
def reader(tmp_path, monkeypatch, capfd):
    return Reader(tmp_path, monkeypatch, capfd)


def has_examples(document):
    first = {command for command, source in all_commands().items() if source == document and is_run(command)}
    return first or any(block.language in ("python", "yaml") for block in blocks(document))


@pytest.mark.integration
@pytest.mark.parametrize(
    "document", [*filter(has_examples, DOCUMENTS)], ids=lambda path: str(path.relative_to(ROOT))
)
def test_the_examples_of_a_document_work(document, reader):
    """In their order; a command that an earlier document contains is run there only."""
    first = all_commands()
    for block in blocks(document):
        for command in commands(block):
            if is_run(command) and first[command] == document:
                reader.type(command)
        # Isaac Lab: tests/envs/test_isaac_lab.py.
        if block.language == "python" and "AppLauncher" not in block.text:
            reader.paste(block.text)
        if block.language == "yaml":
            reader.read_settings(block.text)
    if reader.absent:
        pytest.skip(f"the other examples work; {reader.absent} cannot be installed with this Python")


@pytest.mark.integration
def test_the_flags_that_recipes_name_are_there(reader):
    named = {recipe: flags_of(recipe) for recipe in RECIPES if flags_of(recipe)}
    assert len(named) > 3
    for recipe, flags in named.items():
        reader.run(["fit", "--config", str(recipe), *flags, "--print_config"])


HELPS = """
import contextlib, io, json, os, runpy, sys
helps = {}
for script in sys.argv[1:]:
    sys.path[0] = os.path.dirname(script)
    sys.argv = [script, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
    helps[script] = shown.getvalue()
print(json.dumps(helps))
"""


def helps_of(scripts):
    """Return the help of each script, from one process that imports PyTorch once."""
    command = [sys.executable, "-c", HELPS, *sorted(scripts)]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return json.loads(shown.splitlines()[-1])


@pytest.mark.integration
def test_what_is_not_run_is_parsed_or_looked_up(reader):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    parts = {
        command: words(re.sub(r"runs/\S+\.ckpt", "last", command), ROOT)
        for command in all_commands()
        if not is_run(command)
    }
    helps = helps_of({script for program, script, *_ in parts.values() if program == "python"})
    for command, (program, *args) in parts.items():
        if program == "ppo-lightning":
            assert args[0] in LIGHTNING
            reader.run([*args, "--print_config"])
        elif program == "make":
            subprocess.run(["make", "-n", *args], cwd=ROOT, check=True, capture_output=True)
        elif program == "python":
            script, *flags = args
            assert "usage:" in helps[script], script
            for flag in flags:
                assert not flag.startswith("--") or flag in helps[script], command
        elif program == "pip":
            for extra in re.findall(r"\[(.*)\]", command):
                assert set(extra.split(",")) <= set(extras), command
            for file in re.findall(r"-[cr] (\S+)", command):
                assert (ROOT / file).is_file(), command
        elif args[0] == "torchrun":
            options = torchrun.parse_args(args[1:])
            assert options.module and options.training_script == "ppo_lightning"
            reader.run([*options.training_script_args, "--print_config"])
        elif program in ("sbatch", "kubectl"):
            assert all(
                (ROOT / arg).exists() or bundled_name(arg) in bundled_tasks() for arg in args if "/" in arg
            ), command
        elif program == "docker":
            assert args[0] in ("build", "run")
        else:
            assert program == "pytest" and all((ROOT / arg).exists() for arg in args if "/" in arg), command
