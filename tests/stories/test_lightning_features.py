"""Epochs, callbacks, loggers and Trainer options work as Lightning's users expect (docs/lightning.md)."""

import csv
import functools
import re
from datetime import timedelta

import lightning as L
import pytest
import torch
from gymnasium import spaces
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ppo_lightning import PPO, ConfigError, RolloutDataModule
from ppo_lightning.algorithms.checks import of_callbacks
from ppo_lightning.callbacks import guards
from tests.environments import Rising
from tests.helpers import SaveAfter, weights
from tests.spaces.test_spaces import Any

STEPS = 64  # environment steps per rollout
UPDATES = 4  # optimizer steps per rollout
EIGHT = {
    "num_envs": 2,
    "num_steps": 32,
    "total_timesteps": STEPS * 8,
    "rollouts_per_epoch": 3,
    "eval_episodes": 2,
}
MODEL = {"num_minibatches": 2, "update_epochs": 2}
VALIDATED = {"limit_val_batches": 1.0}
ALL = [STEPS * rollout for rollout in range(1, 9)]


class Watch(L.Callback):
    """Recorder of events as (name, rollouts done)."""

    def __init__(self):
        self.events = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.events.append(("epoch", pl_module.env_steps // STEPS))

    def on_validation_end(self, trainer, pl_module):
        self.events.append(("validation", pl_module.env_steps // STEPS))

    def rollouts(self, event):
        return [rollouts for name, rollouts in self.events if name == event]


def points(folder, metric):
    """Return (step, value) of a metric in the table of CSVLogger."""
    (path,) = folder.rglob("metrics.csv")
    return [(int(row["step"]), float(row[metric])) for row in csv.DictReader(path.open()) if row[metric]]


def steps_of(folder, metric):
    return [step for step, _ in points(folder, metric)]


def test_epochs_change_no_weight(fit):
    results = [weights(fit(EIGHT | {"rollouts_per_epoch": count}, MODEL)) for count in (1, 3, 100)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("options", "epochs", "validations"),
    [
        ({}, [3, 6, 8], [3, 6, 8]),
        ({"max_epochs": 2}, [3, 6], [3, 6]),
        ({"check_val_every_n_epoch": 2}, [3, 6, 8], [6]),
        ({"limit_train_batches": 2}, [2, 4, 6, 8], [2, 4, 6, 8]),
        ({"limit_train_batches": 0.67, "max_epochs": 2}, [2, 4], [2, 4]),
        ({"val_check_interval": 2}, [3, 6, 8], [2, 5, 8]),
        ({"val_check_interval": timedelta(days=1), "check_val_every_n_epoch": None}, [3, 6, 8], [8]),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, [3, 6, 8], [5, 8]),
        ({"reload_dataloaders_every_n_epochs": 1}, [3, 6, 8], [3, 6, 8]),
        ({"max_epochs": 99}, [3, 6, 8], [3, 6, 8]),
        ({"fast_dev_run": 2}, [2], [2]),
        ({"fast_dev_run": 4}, [4], [4]),
    ],
    ids=str,
)
def test_an_epoch_is_a_stretch_of_rollouts_for_all_options_of_the_trainer(
    fit, capsys, options, epochs, validations
):
    watch = Watch()
    module = fit(EIGHT, MODEL, callbacks=[watch], **VALIDATED | options)
    announced = re.findall(r"evaluation every (\d+) ", capsys.readouterr().out)
    changes = {"val_check_interval", "limit_train_batches", "fast_dev_run"} & {*options}
    assert announced == ([] if changes else [str(validations[0] * module.data.frames_per_rollout)])
    assert watch.rollouts("epoch") == epochs
    assert module.trainer.current_epoch == len(epochs)
    assert module.rollouts_done == epochs[-1]
    assert watch.rollouts("validation") == validations


def test_max_steps_counts_optimizer_steps_and_says_so(fit):
    with pytest.warns(match=r"trainer.max_steps \(5\) .* 128 of 512 environment steps"):
        fit(EIGHT, MODEL, max_steps=5)


def test_max_time_ends_a_run_that_is_validated_and_saved(fit, tmp_path):
    data = EIGHT | {"total_timesteps": 10**6, "rollouts_per_epoch": 10}
    watch, keep = Watch(), ModelCheckpoint(tmp_path)
    options = VALIDATED | {"max_time": {"seconds": 1}, "enable_checkpointing": True}
    module = fit(data, MODEL, callbacks=[watch, keep], **options)
    assert 0 < module.env_steps < 10**6
    assert watch.rollouts("validation")[-1] == module.rollouts_done
    assert PPO.load_from_checkpoint(keep.best_model_path).env_steps == module.env_steps


def test_a_resumed_run_without_time_says_so(fit, tmp_path, capsys):
    data = EIGHT | {"total_timesteps": 10**6, "rollouts_per_epoch": 10}
    options = {"max_time": {"seconds": 1}, "enable_checkpointing": True, "default_root_dir": tmp_path}
    first = fit(data, MODEL, callbacks=[keep := ModelCheckpoint(tmp_path)], **options)
    assert f"Timer ended the run: no time left after {first.env_steps} " in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"^trainer.max_time, of all attempts .* steps left: raise it"):
        fit(data, MODEL, callbacks=[ModelCheckpoint(tmp_path)], ckpt_path=keep.best_model_path, **options)
    assert first.env_steps > 0
    assert "data.total_timesteps" not in capsys.readouterr().out


@pytest.mark.parametrize("limit", [{"max_epochs": 1}, {"max_steps": 3 * UPDATES}], ids=str)
def test_a_resumed_run_at_a_limit_names_it(fit, tmp_path, limit):
    path, (name,) = tmp_path / "end.ckpt", limit
    fit(EIGHT, MODEL, **limit).trainer.save_checkpoint(path)
    with pytest.raises(ConfigError, match=rf"^trainer.{name} ended the run with 320 steps left: raise it"):
        fit(EIGHT, MODEL, ckpt_path=path, max_time={"days": 1}, **limit)


# Callbacks


def test_early_stopping_acts_on_training_returns_by_default(fit, capsys):
    stop = EarlyStopping("charts/episodic_return", mode="max", stopping_threshold=1.0)
    module = fit(EIGHT, MODEL, callbacks=[stop])
    assert module.rollouts_done == 3
    assert stop.stopped_epoch == 0
    assert "EarlyStopping ended the run: " in capsys.readouterr().out


def test_a_resumed_run_monitors_the_last_value_until_there_is_another(fit, tmp_path):
    """Episodes end in the rollouts 4 and 8, and the epoch after the sixth."""
    data = EIGHT | {"env_id": "Pendulum-v1", "num_steps": 50, "total_timesteps": 800, "rollouts_per_epoch": 6}
    path, stop = tmp_path / "5.ckpt", functools.partial(EarlyStopping, "charts/episodic_return", mode="max")
    whole = fit(data, MODEL, callbacks=[stop(), SaveAfter(path, 5)])
    resumed = fit(data, MODEL, callbacks=[stop()], ckpt_path=path)
    assert torch.equal(weights(whole), weights(resumed))


def test_a_monitor_of_returns_waits_for_the_first_episode(fit, tmp_path):
    """It ends in the second of four epochs, after the first evaluation."""
    data = EIGHT | {"env_id": "Pendulum-v1", "num_steps": 50, "total_timesteps": 800, "rollouts_per_epoch": 2}
    monitor = "charts/avg_episodic_return"
    keep = ModelCheckpoint(tmp_path, monitor=monitor, mode="max", save_top_k=-1)
    stop = EarlyStopping(monitor, mode="max", patience=9)
    rate = EarlyStopping("charts/success_rate", mode="max")
    options = {"callbacks": [keep, stop, rate], "enable_checkpointing": True, "limit_val_batches": 1}
    with pytest.warns(UserWarning, match="monitors charts/success_rate, which this run never had"):
        module = fit(data, MODEL, **options)
    saved = sorted(PPO.load_from_checkpoint(path).env_steps for path in tmp_path.glob("*.ckpt"))
    assert saved == [400, 600, 800] and module.rollouts_done == 8
    with pytest.raises(RuntimeError, match="charts/episodic_retrun"):
        fit(data, MODEL, callbacks=[EarlyStopping("charts/episodic_retrun", mode="max")])


def test_early_stopping_acts_on_evaluations(fit):
    stop = EarlyStopping("eval/episodic_return", mode="max", patience=1, min_delta=1e9)
    assert fit(EIGHT, MODEL, callbacks=[stop], **VALIDATED).rollouts_done == 6


def test_the_best_checkpoints_are_kept(fit, tmp_path):
    data = EIGHT | {"total_timesteps": STEPS * 15}
    keep = ModelCheckpoint(tmp_path, monitor="eval/episodic_return", mode="max", save_top_k=3)
    module = fit(data, MODEL, callbacks=[keep], enable_checkpointing=True, **VALIDATED)
    saved = sorted(PPO.load_from_checkpoint(path).env_steps for path in tmp_path.glob("*.ckpt"))
    assert len(saved) == 3
    assert set(saved) <= {STEPS * 3 * epoch for epoch in range(1, 6)}
    assert module.trainer.checkpoint_callback.best_model_score == max(keep.best_k_models.values())


@pytest.mark.parametrize(
    ("kept", "options", "rollouts"),
    [
        ({"save_top_k": -1}, VALIDATED, [3, 6, 8]),
        ({"save_top_k": -1}, {}, [3, 6, 8]),
        ({}, VALIDATED | {"check_val_every_n_epoch": 2}, [8]),  # which is not evaluated
        ({"save_top_k": -1, "every_n_train_steps": 2 * UPDATES}, {}, [2, 4, 6, 8]),
    ],
)
def test_checkpoints_are_named_by_environment_steps(fit, tmp_path, kept, options, rollouts):
    keep = ModelCheckpoint(tmp_path, **kept)
    fit(EIGHT, MODEL, callbacks=[keep], enable_checkpointing=True, **options)
    names = {path.stem for path in tmp_path.glob("*.ckpt")}
    assert names == {f"epoch={(done - 1) // 3}-step={done * STEPS}" for done in rollouts}


def test_a_resumed_run_with_a_limit_of_steps_goes_to_its_end(fit, tmp_path):
    keep = ModelCheckpoint(tmp_path, save_top_k=-1)
    fit(EIGHT, MODEL, callbacks=[keep], enable_checkpointing=True)
    for path in [tmp_path / "epoch=0-step=192.ckpt", tmp_path / "epoch=1-step=384.ckpt"]:
        assert fit(EIGHT, MODEL, ckpt_path=path, max_epochs=-1, max_steps=1000).env_steps == 512


def test_a_point_of_several_rollouts_has_all_their_episodes(fit, tmp_path):
    data = {"env_id": Rising, "num_envs": 1, "num_steps": 10, "total_timesteps": 70}
    fit(data, {"num_minibatches": 2}, logger=CSVLogger(tmp_path), log_every_n_steps=3)
    assert points(tmp_path, "charts/episodic_return") == [(30, 3.5), (60, 9.5), (70, 13.5)]


@pytest.mark.parametrize(
    ("callback", "model", "words"),
    [
        (ModelCheckpoint(every_n_train_steps=6), {}, r"every_n_train_steps \(6\) .* the 4 of one rollout"),
        (
            ModelCheckpoint(every_n_train_steps=8),
            {"target_kl": 0.01},
            r"\(8\) .*model.target_kl",
        ),
        (ModelCheckpoint(train_time_interval=timedelta(1)), {}, "train_time_interval .* set every_n_epochs"),
        (StochasticWeightAveraging(1e-3), {}, "use EMAWeightAveraging"),
        (GradientAccumulationScheduler({1: 2}), {}, "no effect: lower model.num_minibatches"),
        (EMAWeightAveraging(update_every_n_steps=2), {}, "EMAWeightAveraging looks at .* set it to 1"),
        (ModelCheckpoint(monitor="eval/episodic_return"), {}, "ModelCheckpoint would .* set mode='max'"),
        (EarlyStopping("charts/success_rate"), {}, "EarlyStopping would .* set mode='max'"),
        (
            ModelCheckpoint(monitor="eval/episodic_return", mode="max", every_n_train_steps=4),
            {},
            r"every_n_train_steps \(4\) saves before an evaluation",
        ),
    ],
)
def test_callbacks_that_would_do_nothing_are_refused(fit, callback, model, words):
    with pytest.raises(ConfigError, match=words):
        fit(EIGHT, MODEL | model, callbacks=[callback], enable_checkpointing=True)


@pytest.mark.parametrize("callback", [OnExceptionCheckpoint, ModelCheckpoint])
def test_no_rank_saves_alone_after_an_exception(make_trainer, tmp_path, callback):
    """A save is a collective, and an exception of one rank is not."""
    options = {"save_on_exception": True} if callback is ModelCheckpoint else {}
    one, two = ({"callbacks": [callback(tmp_path, **options)], "devices": n} for n in (1, 2))
    assert not list(of_callbacks(make_trainer(**one, enable_checkpointing=True), 1))
    (sentence,) = of_callbacks(make_trainer(**two, enable_checkpointing=True, strategy="ddp"), 1)
    assert sentence.startswith(f"{callback.__name__} saves after an exception")


def test_weights_are_averaged(fit, tmp_path):
    callbacks = [EMAWeightAveraging(decay=0.5), ModelCheckpoint(tmp_path)]
    plain = fit(EIGHT, MODEL)
    averaged = fit(EIGHT, MODEL, callbacks=callbacks, enable_checkpointing=True)
    assert not torch.equal(weights(plain), weights(averaged))
    (path,) = tmp_path.glob("*.ckpt")
    torch.testing.assert_close(weights(PPO.load_from_checkpoint(path)), weights(averaged))


def test_an_average_leaves_indices_and_choices_as_they_are(fit):
    """Averages of integers are cut off, and a choice is found by its exact number."""
    data = EIGHT | {"env_id": functools.partial(Any, spaces.Discrete(9), spaces.MultiDiscrete([3, 3]))}
    module, plain = (fit(data, MODEL, callbacks=[*added]) for added in ([EMAWeightAveraging(decay=0.9)], []))
    assert all(torch.equal(x, module.agent.get_buffer(name)) for name, x in plain.agent.named_buffers())


def test_a_compiled_module_is_refused(make_trainer):
    with pytest.raises(ConfigError, match=r"pass compile=True instead"):
        make_trainer().fit(torch.compile(PPO(**MODEL)), RolloutDataModule(**EIGHT))


@pytest.mark.parametrize(
    "options",
    [{"detect_anomaly": True}, {"deterministic": True}, {"profiler": "simple"}, {"barebones": True}],
    ids=str,
)
def test_trainer_options_that_change_nothing(fit, options):
    assert torch.equal(weights(fit(EIGHT, MODEL, **options)), weights(fit(EIGHT, MODEL)))


# The x axis


class Logs(PPO):
    def training_step(self, rollout, batch_idx):
        super().training_step(rollout, batch_idx)
        self.log("mine", float(self.env_steps))


def test_all_metrics_share_the_x_axis(fit, tmp_path):
    callbacks = [LearningRateMonitor(), DeviceStatsMonitor()]
    options = VALIDATED | {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "callbacks": callbacks}
    module = fit(EIGHT, MODEL, ppo=Logs, **options)
    assert points(tmp_path, "mine") == [(step, step) for step in ALL]
    assert steps_of(tmp_path, "charts/SPS") == steps_of(tmp_path, "lr-Adam") == ALL
    assert steps_of(tmp_path, "eval/episodic_return") == [ALL[2], ALL[5], ALL[7]]
    (path,) = tmp_path.rglob("metrics.csv")
    names = [name for name in path.read_text().splitlines()[0].split(",") if "on_train_batch_end" in name]
    assert steps_of(tmp_path, names[0]) == ALL
    module.trainer.test(module, RolloutDataModule(**EIGHT))
    assert steps_of(tmp_path, "test/episodic_return") == [ALL[-1]]


# Resuming


def test_a_run_resumes_at_every_rollout_of_an_epoch(fit, tmp_path):
    """Checkpoints within an epoch, at its last rollout, and at its end, by Lightning itself."""
    data = EIGHT | {"env_id": "Acrobot-v1", "total_timesteps": STEPS * 7}
    model = MODEL | {"norm_reward": True, "desired_kl": 0.01, "anneal_lr": False}
    keep = ModelCheckpoint(tmp_path, filename="end{epoch}", save_top_k=-1, auto_insert_metric_name=False)
    saves = [SaveAfter(tmp_path / f"{rollouts}.ckpt", rollouts) for rollouts in range(1, 8)]
    whole = fit(data, model, callbacks=[*saves, keep], enable_checkpointing=True, **VALIDATED)
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) == 7 + 3
    for path in paths:
        done = torch.load(path, weights_only=True)["env_steps"] // STEPS
        watch = Watch()
        resumed = fit(data, model, ckpt_path=path, callbacks=[watch], **VALIDATED)
        assert resumed.rollouts_done == 7
        assert torch.equal(weights(resumed), weights(whole)), path.name
        ends = [end for end in (3, 6, 7) if end > done]
        assert [rollouts for rollouts in watch.rollouts("epoch") if rollouts > done] == ends, path.name


# Loggers that fail


class Breaks(CSVLogger):
    """Logger that raises the error of a full disk while ``broken`` is set."""

    broken = False

    def save(self):
        if self.broken:
            raise OSError(28, "No space left on device")
        super().save()


def test_a_logger_that_fails_does_not_end_the_run(fit, tmp_path, capsys):
    class Toggle(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            Breaks.broken = 3 <= pl_module.rollouts_done < 7

    options = VALIDATED | {"logger": [Breaks(tmp_path), TensorBoardLogger(tmp_path)], "log_every_n_steps": 1}
    module = fit(EIGHT, MODEL, ppo=Logs, callbacks=[Toggle()], **options)
    errors = capsys.readouterr().err
    assert module.rollouts_done == 8
    assert errors.count("METRICS cannot be written by Breaks: [Errno 28] No space left on device.") == 1
    assert steps_of(tmp_path, "charts/SPS") == ALL


def test_nothing_is_written_to_a_disk_that_is_nearly_full(fit, tmp_path, capsys, monkeypatch):
    class Fill(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            full = 3 <= pl_module.rollouts_done < 7
            monkeypatch.setattr(guards, "FREE_BYTES", 2**60 if full else 2**20)

    pair = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path)]
    fit(EIGHT, MODEL, callbacks=[Fill()], logger=pair, log_every_n_steps=1, **VALIDATED)
    errors = capsys.readouterr().err
    for name in ("CSVLogger", "TensorBoardLogger"):
        assert errors.count(f"METRICS cannot be written by {name}: the disk of") >= 1
    assert steps_of(tmp_path, "charts/SPS") == ALL
    curve = EventAccumulator(str(pair[1].log_dir)).Reload().Scalars("charts/SPS")
    assert [event.step for event in curve] == [STEPS * rollout for rollout in (1, 2, 7, 8)]
