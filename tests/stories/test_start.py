"""A run imports what it uses, and no more."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

STOP = """
import gc, json, sys
from pathlib import Path
import lightning

class Stop(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):  # the first rollout is there
        assert gc.isenabled() and gc.get_freeze_count()
        Path(f"rank{trainer.global_rank}.json").write_text(json.dumps(list(sys.modules)))
        trainer.should_stop = True
"""
HEAVY = {
    *("IPython", "ale_py", "cv2", "dm_control", "envpool", "huggingface_hub", "imageio", "jax", "matplotlib"),
    *("mpe2", "mujoco", "onnx", "onnxruntime", "onnxscript", "optuna", "pandas", "pettingzoo", "plotly"),
    *("procgen", "pygame", "safetensors", "scipy", "sklearn", "stable_baselines3", "wandb"),
}
COMMANDS = {"arguments", "checkpoint_settings", "cli", "options", "recipes"}
UNUSED = {
    *("algorithms.ppg", "algorithms.recurrent", "algorithms.rnd", "algorithms.rpo", "games.selfplay"),
    *("callbacks.doctor", "callbacks.live", "callbacks.video", "games.make", "envs.workers"),
    *("envs.conformance", "envs.transforms"),
    *("games.players", "games.tournament"),
}


def python(folder, *args):
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    done = subprocess.run([sys.executable, *args], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Return the modules that Lightning and TorchRL import."""
    code = "import json, sys, lightning, torchrl.envs; print(json.dumps(list(sys.modules)))"
    return set(json.loads(python(tmp_path_factory.getbasetemp(), "-c", code)))


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_imports_only_what_it_uses(tmp_path, given, ranks):
    """Trials of ``benchmark`` and ``tune`` and the ranks of a run are such processes, too."""
    (tmp_path / "stop.py").write_text(STOP)
    several = ["--trainer.devices", "2", "--trainer.strategy", "ddp"] if ranks == 2 else []
    flags = ["--trainer.callbacks+=stop.Stop", "--trainer.limit_val_batches", "0", *several]
    python(tmp_path, "-m", "ppo_lightning", "fit", "--config", "classic/cartpole", *flags)
    for rank in range(ranks):
        more = set(json.loads((tmp_path / f"rank{rank}.json").read_text())) - given
        assert not {name for name in more if name.partition(".")[0] in HEAVY}
        ours = {name.removeprefix("ppo_lightning.") for name in more if name.startswith("ppo_lightning.")}
        assert not ours & UNUSED, ours & UNUSED
        exports = {"export", "export.pretrained"}  # methods of the module, which import the rest when called
        assert not {name for name in ours - exports if name.startswith(("export", "video"))}
        assert {name.partition(".")[2] for name in ours if name.startswith("commands.")} <= COMMANDS
        assert len(ours) <= 103


@pytest.mark.parametrize("room", ["", ".callbacks", ".envs", ".models", ".offpolicy"])
def test_every_exported_name_can_be_imported(room):
    package = importlib.import_module(f"ppo_lightning{room}")
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'quux'"):
        _ = package.quux


@pytest.mark.integration
@pytest.mark.parametrize(("target", "coding"), [("/dev/full", "utf-8"), ("out", "ascii")])
def test_a_full_or_ascii_standard_output_ends_no_run(tmp_path, target, coding):
    flags = ["--data.total_timesteps", "128", "--data.num_envs", "2", "--data.num_steps", "32"]
    command = [sys.executable, "-m", "ppo_lightning", "fit", *flags, "--trainer.accelerator", "cpu"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": coding}
    with open(Path(tmp_path, target), "w") as output:
        result = subprocess.run(
            command, cwd=tmp_path, env=env, stdout=output, stderr=subprocess.PIPE, text=True, timeout=200
        )
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.rglob("*.ckpt"))
