"""Callbacks that show a run during training, and the loggers."""

import contextlib
import random
from pathlib import Path
from typing import Any

import gymnasium
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ppo_lightning import ConfigError
from ppo_lightning.callbacks import CaptureVideo, Doctor, LivePlot
from ppo_lightning.callbacks.live import SHOWN
from ppo_lightning.experiments.report import read_csv
from tests.helpers import weights

SMALL = {"num_envs": 2, "num_steps": 32, "total_timesteps": 64 * 6, "eval_episodes": 1}


# Videos


def test_videos_are_recorded_at_their_steps(fit, tmp_path):
    logger = CSVLogger(tmp_path)
    fit(SMALL, callbacks=[CaptureVideo(every=3, max_frames=7)], logger=logger)
    videos = sorted(Path(logger.log_dir, "videos").iterdir())
    assert [path.name for path in videos] == ["step=192.mp4", "step=384.mp4"]
    frames = imageio.mimread(videos[0], memtest=False)
    assert len(frames) == 8 and frames[0].shape == (400, 820, 3), "with the panel beside it, and bounded"


class Careless(CartPoleEnv):
    """An environment that seeds the global generators, and draws its rewards from them."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode=render_mode)
        torch.manual_seed(7)

    def reset(self, *, seed=None, options=None):
        for seeds in (torch.manual_seed, np.random.seed, random.seed) if seed is not None else ():
            seeds(seed % 2**32)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        observation, _, *rest = super().step(action)
        reward = float(torch.rand(()) + np.random.random() + random.random())  # noqa: NPY002
        return observation, reward, *rest


@pytest.mark.parametrize("env_id", ["CartPole-v1", Careless])
def test_videos_and_evaluations_change_nothing(fit, tmp_path, env_id):
    data = SMALL | {"env_id": env_id, "rollouts_per_epoch": 2}
    without, *others = (
        fit(data, callbacks=callbacks, limit_val_batches=batches, logger=CSVLogger(tmp_path, name=name))
        for name, callbacks, batches in (
            ("without", [], 0),
            ("video", [CaptureVideo(every=2, max_frames=5)], 0),
            ("evaluation", [], 1),
        )
    )
    for module in others:
        assert torch.equal(weights(module), weights(without))


def test_what_cannot_be_recorded_is_refused(fit):
    from torchrl.envs import StepCounter

    with pytest.raises(ConfigError, match=r"render\(\) returns None"):
        fit(SMALL | {"env_id": lambda: gymnasium.make("CartPole-v1")}, callbacks=[CaptureVideo(every=99)])
    with pytest.raises(ConfigError, match=r"can be recorded, without data\.transforms"):
        fit(SMALL | {"transforms": [StepCounter(step_count_key="steps")]}, callbacks=[CaptureVideo(every=1)])
    with pytest.raises(ConfigError, match="must be at least 1"):
        CaptureVideo(every=0)
    with pytest.raises(ConfigError, match="must be at least 1"):
        Doctor(every=0)


class Drawn(CartPoleEnv):
    """Its pictures become what ``later`` says after a few steps."""

    later: Any = None

    def __init__(self, render_mode="rgb_array"):
        super().__init__(render_mode=render_mode)
        self.drawn = 0

    def render(self):
        self.drawn += 1
        if self.drawn < 4:
            return np.zeros((60, 80, 3), np.uint8)
        if isinstance(self.later, BaseException):
            raise self.later
        return self.later


def fails(*args, **kwargs):
    raise OSError("the disk is full")


@pytest.mark.parametrize(
    ("callback", "later", "target", "failure"),
    [
        (CaptureVideo(every=1), np.zeros((70, 31), np.uint8), None, None),
        (CaptureVideo(every=1), np.zeros((33, 85, 4), np.uint8), None, None),
        (CaptureVideo(every=1), RuntimeError("closed"), None, "A video failed .ConfigError: .*closed"),
        (CaptureVideo(every=1), SystemExit(1), None, "A video failed .SystemExit: 1"),
        (CaptureVideo(every=1), np.zeros((60, 80, 3)), None, "A video failed .ConfigError: .*float64"),
        (CaptureVideo(every=1), None, None, "A video failed .ConfigError: .*returns None"),
        (CaptureVideo(every=1), None, "videos", "A video failed .FileExistsError"),
        (LivePlot(every=0.0), None, "matplotlib.pyplot.subplots", "The live plot failed .OSError: .*full"),
        (Doctor(every=1), None, "ppo_lightning.callbacks.doctor.sample_observations", "check for dead"),
    ],
)
def test_what_shows_a_run_does_not_end_it(fit, tmp_path, monkeypatch, callback, later, target, failure):
    monkeypatch.setattr(Drawn, "later", later)
    if target == "videos":
        (tmp_path / target).write_text("")
    elif target:
        monkeypatch.setattr(target, fails)
    warned = pytest.warns(UserWarning, match=failure) if failure else contextlib.nullcontext()
    with warned:
        assert fit(SMALL | {"env_id": Drawn}, callbacks=[callback]).env_steps == 64 * 6
    if failure is None:
        assert len(list(tmp_path.rglob("*.mp4"))) == 6


# Live


def test_a_notebook_shows_one_picture_at_a_time(fit, monkeypatch):
    import IPython.display

    shown = []

    class Handle:
        def update(self, figure):
            shown[:] = [figure]

    def display(figure, display_id):
        assert display_id and not shown, "one output of the cell"
        shown.append(figure)
        return Handle()

    monkeypatch.setattr(IPython.display, "display", display)
    plot = LivePlot(every=0.0)
    module = fit(SMALL, callbacks=[plot])
    (figure,) = shown
    assert [axis.get_title() for axis in figure.axes] == list(SHOWN.values())
    for axis, points in zip(figure.axes, plot.points.values(), strict=True):
        (line,) = axis.lines
        assert line.get_xydata().tolist() == [list(point) for point in points]
    last = module.trainer.callback_metrics["losses/entropy"].item()
    assert plot.points["losses/entropy"][-1] == (384, last)


# Loggers


class Offline(WandbLogger):
    """Logger of Weights & Biases that keeps what it would send."""

    def __init__(self):
        super().__init__(offline=True)
        self.points, self.config = {}, {}

    def log_metrics(self, metrics, step=None):
        for name, value in metrics.items():
            self.points.setdefault(name, {})[step] = value

    def log_hyperparams(self, params):
        self.config |= params


def test_all_loggers_have_the_same_metrics_at_the_same_steps(fit, tmp_path):
    csv_logger, wandb = CSVLogger(tmp_path, name="csv"), Offline()
    tensorboard = TensorBoardLogger(tmp_path, name="tensorboard", default_hp_metric=False)
    options = {"logger": [csv_logger, tensorboard, wandb], "callbacks": [CaptureVideo(3, max_frames=5)]}
    fit(SMALL | {"rollouts_per_epoch": 3}, limit_val_batches=1, **options)
    in_csv = {}
    for row in read_csv(Path(csv_logger.log_dir, "metrics.csv")):
        for key, value in row.items():
            if value and key not in ("step", "epoch"):
                in_csv.setdefault(key, {})[int(row["step"])] = float(value)
    events = EventAccumulator(tensorboard.log_dir, size_guidance={"scalars": 0})
    events.Reload()
    assert {"charts/SPS", "losses/approx_kl", "eval/episodic_return"} <= in_csv.keys()
    assert {*in_csv, "epoch"} == set(events.Tags()["scalars"]) == wandb.points.keys() - {"videos/episode"}
    for key, points in in_csv.items():
        assert points == pytest.approx({event.step: event.value for event in events.Scalars(key)}, rel=1e-5)
        assert points == pytest.approx(wandb.points[key], rel=1e-5), key
    assert list(in_csv["losses/entropy"]) == [64, 128, 192, 256, 320, 384]
    assert list(in_csv["eval/episodic_return"]) == list(wandb.points["videos/episode"]) == [192, 384]
    assert wandb.config["learning_rate"] == 2.5e-4 and wandb.config["num_envs"] == 2
