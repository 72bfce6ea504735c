"""Four statements of Python (seed, data, Trainer, fit) do what the command line does."""

import functools
import json
import logging
import os
import re
import signal
import threading
import time
from pathlib import Path

import lightning as L
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from tqdm import tqdm

import ppo_lightning
from ppo_lightning import PPG, PPO, RolloutCollector, RolloutDataModule
from ppo_lightning.callbacks import Doctor, Preemption, RunSummary, Threads
from ppo_lightning.callbacks.bars import OneLineBar
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.checkpoints.io import CheckedCheckpointIO, RunCheckpointIO
from ppo_lightning.experiments.report import read_csv
from tests.helpers import ROOT, Forked, SaveAfter, require_same, script

SMALL = {"num_envs": 2, "num_steps": 16, "total_timesteps": 32 * 12}
MODEL = {"num_minibatches": 2, "update_epochs": 1}


STATEMENTS = """L.seed_everything(1)
data = RolloutDataModule("CartPole-v1", total_timesteps=100_000)
trainer = L.Trainer(accelerator="cpu")
trainer.fit(PPO(), data)"""


def test_one_program_stands_in_readme_docs_notebook_and_docstring():
    cells = json.loads((ROOT / "notebooks/1_cartpole.ipynb").read_text())["cells"]
    assert STATEMENTS in ["".join(cell["source"]) for cell in cells]
    for document in ("README.md", "docs/getting_started.md"):
        assert STATEMENTS in (ROOT / document).read_text()
    assert STATEMENTS in re.sub(r"^ +>>> ", "", PPO.__doc__, flags=re.MULTILINE)


def kinds(trainer):
    return [type(callback) for callback in trainer.callbacks]


def test_a_plain_trainer_gets_the_callbacks_and_the_plugin_of_the_command_line(
    tmp_path, monkeypatch, caplog, capsys
):
    monkeypatch.chdir(tmp_path)
    plain = L.Trainer(accelerator="cpu", enable_model_summary=False, callbacks=[Threads(2)])
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            plain.fit(PPO(**MODEL), RolloutDataModule(**SMALL))
            plain.validate(PPO(**MODEL), RolloutDataModule(**SMALL))
    for kind in (Threads, Preemption, RunSummary):
        assert kinds(plain).count(kind) == 1
    assert plain.callbacks[kinds(plain).index(Threads)].num_threads == 2
    assert isinstance(plain.strategy.checkpoint_io, RunCheckpointIO)
    assert isinstance(plain.strategy.checkpoint_io.plugin, CheckedCheckpointIO)
    assert "override" not in caplog.text
    assert "Tip:" not in caplog.text
    assert "ppo_lightning.last_checkpoint('lightning_logs')" in capsys.readouterr().out


def test_validation_alone_handles_no_signals(make_trainer, fit):
    module = fit(SMALL, MODEL)
    trainer = make_trainer(limit_val_batches=1)
    trainer.validate(module, RolloutDataModule(**SMALL))
    assert not {Threads, Preemption, RunSummary} & set(kinds(trainer))


@pytest.mark.parametrize(("option", "rows"), [({}, 12), ({"log_every_n_steps": 5}, 3)])
def test_every_rollout_is_logged_by_default_and_the_last_one_always(fit, tmp_path, option, rows):
    fit(SMALL, MODEL, logger=CSVLogger(tmp_path), **option)
    (table,) = tmp_path.rglob("metrics.csv")
    assert len(table.read_text().splitlines()) == 1 + rows


def test_the_summary_names_a_last_checkpoint_without_a_best_one(fit, tmp_path, capsys):
    saved = ModelCheckpoint(tmp_path, save_top_k=0, save_last=True)
    fit(SMALL, callbacks=[saved], enable_checkpointing=True)
    assert f"checkpoint: {tmp_path}/last.ckpt" in capsys.readouterr().out


def test_metrics_of_the_user_after_a_fit_keep_their_step(fit, tmp_path):
    logger = CSVLogger(tmp_path)
    fit(SMALL, MODEL, logger=logger)
    logger.log_metrics({"mine": 1.0}, step=7)
    logger.save()
    (table,) = tmp_path.rglob("metrics.csv")
    assert [row["step"] for row in read_csv(table) if row["mine"]] == ["7"]


def test_no_limit_is_named_as_the_end_of_a_complete_run(fit, monkeypatch):
    said = []
    monkeypatch.setattr("lightning.pytorch.loops.fit_loop.rank_zero_info", said.append)
    assert fit(SMALL, MODEL).trainer.max_epochs == -1
    assert not said


@pytest.mark.parametrize("every", [1, 2])
def test_the_summary_shows_no_evaluation_of_other_weights(fit, capsys, every):
    data = SMALL | {"rollouts_per_epoch": 4, "eval_episodes": 1}
    fit(data, MODEL, limit_val_batches=1, check_val_every_n_epoch=every)
    assert ("evaluation, deterministic" in capsys.readouterr().out) == (every == 1)


def test_every_progress_bar_shows_return_throughput_and_steps(fit):
    shown = fit({"total_timesteps": 2048}, MODEL).trainer.progress_bar_metrics
    assert float(shown["return"]) > 5
    assert int(shown["SPS"]) > 1
    assert shown["steps"] == "2048"
    assert shown["left"] == "0.0 min"


@pytest.mark.parametrize(
    ("bar", "kind"),
    [
        ([], OneLineBar),
        ([TQDMProgressBar()], OneLineBar),
        ([RichProgressBar()], OneLineBar),
        ([TQDMProgressBar(refresh_rate=2)], TQDMProgressBar),
        ([RichProgressBar(leave=True)], RichProgressBar),
    ],
)
def test_the_default_bar_is_one_line_in_80_columns(fit, capsys, monkeypatch, bar, kind):
    monkeypatch.setattr("ppo_lightning.callbacks.bars.tqdm", functools.partial(tqdm, ncols=80))
    data = SMALL | {"total_timesteps": 32 * 25, "rollouts_per_epoch": 10}
    doctor = Doctor(every=1)
    module = fit(data, MODEL | {"learning_rate": 0.5}, callbacks=[*bar, doctor], enable_progress_bar=True)
    used = module.trainer.progress_bar_callback
    assert type(used) is kind
    if kind is TQDMProgressBar:
        assert used.refresh_rate == 2, "the user's"
    if kind is OneLineBar:
        assert used.refresh_rate > 2, "twice a second"
        output = capsys.readouterr().out
        bars = [line for line in re.split("[\r\n]+", output) if line.startswith("Epoch")]
        assert max(map(len, bars)) <= 80
        assert "Epoch 2/2" in bars[-1] and ", return=" in bars[-1] and "steps=800" in bars[-1]
        assert doctor.findings and all(
            f"steps: {name}: {text}\n" in output for name, text in doctor.findings.items()
        )
        assert "Validation" not in output and "v_num" not in output


class Described(L.Callback):
    """Records what the bar says before the first return."""

    def __init__(self):
        self.seen = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.seen.append(trainer.progress_bar_callback.train_progress_bar.desc)


@pytest.mark.parametrize(
    ("limits", "fits", "total"), [({}, 2, 3), ({"limit_train_batches": 2}, 2, 6), ({"max_epochs": 2}, 1, 2)]
)
def test_the_bar_knows_the_number_of_epochs_and_a_second_fit_begins_anew(make_trainer, limits, fits, total):
    described = Described()
    trainer = make_trainer(callbacks=[OneLineBar(), described], enable_progress_bar=True, **limits)
    for _ in range(fits):
        trainer.fit(PPO(**MODEL), RolloutDataModule(**SMALL | {"rollouts_per_epoch": 5}))
    expected = [f"Epoch {epoch}/{total * (1 + epoch // total) - 1}" for epoch in range(fits * total)]
    assert [text.rstrip(": ") for text in described.seen] == expected


@pytest.mark.parametrize("make", [PPO, functools.partial(PPG, n_iteration=4, num_aux_rollouts=2)])
def test_a_fit_after_a_validation_of_a_checkpoint_trains_a_whole_run(make_trainer, tmp_path, make):
    module, data = make(**MODEL), RolloutDataModule(**SMALL)
    save = SaveAfter(tmp_path / "middle.ckpt", 6)
    trainer = make_trainer(callbacks=[save])
    trainer.fit(module, data)
    steps = trainer.global_step
    trainer.validate(module, data, ckpt_path=save.path, verbose=False)
    assert module.rollouts_done == 6
    assert list(module.episode_returns) == read_checkpoint(save.path)["episode_returns"]
    trainer.fit(module, data)
    assert module.rollouts_done == 12
    assert trainer.global_step == 2 * steps
    assert not getattr(module, "rollouts", []), "those of the validated checkpoint are forgotten"


def test_more_than_a_thousand_epochs_are_trained(fit):
    data = {"num_envs": 1, "num_steps": 2, "total_timesteps": 2 * 1005, "rollouts_per_epoch": 1}
    assert fit(data, {"num_minibatches": 1, "update_epochs": 1}).env_steps == 2 * 1005


TEN_STEPS = {"env_kwargs": {"max_episode_steps": 10}}


@pytest.mark.parametrize(
    ("data", "epochs", "episodes"),
    [
        (TEN_STEPS, 13, 2),
        ({**TEN_STEPS, "num_envs": 64, "total_timesteps": 409_600, "backend": "torch"}, 17, 10),
        ({}, 1, 3),
        ({"env_id": "Pendulum-v1"}, 6, 2),  # five at least, in a fifth of the steps
        ({"num_workers": 2}, 1, 3),
        ({"backend": "envpool"}, 1, 3),
    ],
)
def test_a_default_validation_takes_a_small_share_of_the_steps(
    fit, capsys, monkeypatch, data, epochs, episodes
):
    """For the time limit of the environments of each backend; test_progress.py has the plans."""
    steps = {False: 0, True: 0}  # of training and evaluation
    walk = RolloutCollector._walk

    def count(collector):
        steps[collector.deterministic] += collector.env.num_envs * collector.num_steps
        return walk(collector)

    monkeypatch.setattr(RolloutCollector, "_walk", count)
    module = fit({"total_timesteps": 20_000} | data, MODEL, limit_val_batches=1)
    interval = module.data.plan.rollouts_per_epoch * module.data.frames_per_rollout
    assert f"evaluation every {interval} environment steps, episodes: {episodes}" in capsys.readouterr().out
    assert module.trainer.current_epoch == epochs
    assert steps[True] <= steps[False] / (10 if epochs != 6 else 5)


def test_a_resumed_run_keeps_the_length_of_epochs(fit, tmp_path):
    def run(total, **options):
        data = SMALL | {"total_timesteps": total, "eval_episodes": 3}
        keep = ModelCheckpoint(tmp_path, save_top_k=-1)
        module = fit(data, MODEL, callbacks=[keep], enable_checkpointing=True, **options)
        return module.data.plan.rollouts_per_epoch, module.trainer.current_epoch

    assert run(32 * 40) == (2, 20)
    last = ppo_lightning.last_checkpoint(tmp_path)
    assert run(32 * 80, ckpt_path=last) == (2, 40)
    assert run(32 * 80) == (4, 20)


def test_two_callbacks_keep_the_best_and_the_newest_where_all_are_equally_good(fit, tmp_path):
    """docs/long_runs.md gives them."""
    both = [ModelCheckpoint(monitor="eval/episodic_return", mode="max"), ModelCheckpoint()]
    data = SMALL | {"env_kwargs": {"max_episode_steps": 5}, "rollouts_per_epoch": 3, "eval_episodes": 1}
    options = {"limit_val_batches": 1.0, "enable_checkpointing": True, "logger": CSVLogger(tmp_path, "runs")}
    module = fit(data, MODEL, callbacks=both, **options)
    best, newest = (read_checkpoint(callback.best_model_path)["env_steps"] for callback in both)
    assert best < newest == module.env_steps
    assert ppo_lightning.last_checkpoint(tmp_path) == both[1].best_model_path


def test_episodes_since_the_last_row_of_the_loggers_are_in_the_first_of_a_resumed_run(fit, tmp_path):
    data = SMALL | {"env_kwargs": {"max_episode_steps": 20}}
    rows = []
    for name in ("whole", "resumed"):
        save, logger = SaveAfter(tmp_path / "a.ckpt", 3), CSVLogger(tmp_path, name)
        path = None if name == "whole" else save.path
        fit(data, MODEL, ckpt_path=path, logger=logger, log_every_n_steps=5, callbacks=[save])
        found = read_csv(tmp_path / name / "version_0/metrics.csv")
        rows.append({row["step"]: row["charts/episodic_return"] for row in found if row["charts/SPS"]})
    assert "160" in rows[0] and rows[0].items() >= rows[1].items()


def test_the_last_checkpoint_of_several_runs_is_found(fit, tmp_path, capsys):
    assert ppo_lightning.last_checkpoint(tmp_path) is None
    for number, (seed, env_id) in enumerate([(1, "CartPole-v1"), (2, "CartPole-v1"), (1, "Acrobot-v1")]):
        options = {"logger": CSVLogger(tmp_path, "runs"), "enable_checkpointing": True}
        module = fit(SMALL | {"env_id": env_id}, MODEL, seed=seed, **options)
        saved = module.trainer.checkpoint_callback.best_model_path
        os.utime(saved, (number, number))
        assert f"version_{number}" in saved
    find = ppo_lightning.last_checkpoint
    assert "version_2" in find(tmp_path)
    assert "version_1" in find(tmp_path, env_id="CartPole-v1")
    assert "version_0" in find(tmp_path, env_id="CartPole-v1", seed=1)
    assert find(tmp_path, seed=3) is None
    torn = tmp_path / "runs/version_3/checkpoints/torn.ckpt"
    torn.parent.mkdir(parents=True)
    torn.write_bytes(Path(saved).read_bytes()[:1000])
    assert "version_2" in find(tmp_path)
    assert "skipped" in capsys.readouterr().err


def test_outside_the_main_thread_no_handler_is_registered(fit):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    trained = []
    thread = threading.Thread(target=lambda: trained.append(fit(SMALL, MODEL)))
    thread.start()
    thread.join()
    assert trained[0].env_steps == SMALL["total_timesteps"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


class Send(L.Callback):
    def __init__(self, number, rollouts):
        self.number, self.rollouts = number, rollouts

    def on_train_start(self, trainer, pl_module):
        if self.rollouts == 1:  # before Preemption registers its handlers
            signal.raise_signal(self.number)

    def on_train_batch_start(self, trainer, pl_module, *args):
        if pl_module.rollouts_done == self.rollouts == 12:  # past the first epoch
            signal.raise_signal(self.number)


class Evaluations(L.Callback):
    """Environment steps and returns of the evaluations of all fits with this callback."""

    def __init__(self):
        self.results = []

    def on_validation_end(self, trainer, pl_module):
        self.results.append((pl_module.env_steps, pl_module.progress.evaluation["episodic_return"]))


@pytest.fixture
def fit_and_signal(fit, tmp_path):
    """Return a function that trains a run of 24 rollouts, whole and with a callback that sends it a signal.

    It requires the exit code, a checkpoint after that many rollouts, and the same end and evaluations.
    """

    def run(callback, code, rollouts, rollouts_per_epoch):
        data = {"total_timesteps": 32 * 24, "eval_episodes": 2, "rollouts_per_epoch": rollouts_per_epoch}
        train = functools.partial(fit, SMALL | data, MODEL, limit_val_batches=1)
        played, expected = Evaluations(), Evaluations()
        whole = train(callbacks=expected)
        with pytest.raises(SystemExit) as end:
            train(callbacks=[callback, ModelCheckpoint(tmp_path), played], enable_checkpointing=True)
        assert end.value.code == code
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
        path = tmp_path / "preempted.ckpt"
        saved = torch.load(path, weights_only=True)
        assert saved["env_steps"] == 32 * rollouts
        require_same(whole, train(ckpt_path=path, callbacks=played))
        assert played.results == expected.results and len(played.results) == 24 // rollouts_per_epoch
        return saved

    return run


@pytest.mark.parametrize(
    ("number", "code", "rollouts"),
    [
        (signal.SIGTERM, 143, 1),
        (signal.SIGTERM, 143, 12),
        (signal.SIGINT, 130, 12),
        (signal.SIGUSR1, 143, 12),
    ],
)
def test_a_signal_saves_and_the_run_ends_as_the_uninterrupted_one(
    fit_and_signal, monkeypatch, number, code, rollouts
):
    """SIGUSR1 is SLURM's, here without Lightning's auto-requeue, as under torchrun."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    # The signal arrives in the last rollout of an epoch, or before.
    fit_and_signal(Send(number, rollouts), code, rollouts, rollouts_per_epoch=12)


def test_a_run_that_gets_a_signal_in_its_last_rollout_completes_without_an_evaluation(fit, tmp_path):
    data = SMALL | {"total_timesteps": 32 * 12, "eval_episodes": 2}
    run = functools.partial(fit, data, MODEL, enable_checkpointing=True)
    module = run(callbacks=[Send(signal.SIGTERM, 12), ModelCheckpoint(tmp_path)])
    assert module.env_steps == 32 * 12 and len(list(tmp_path.glob("epoch=*.ckpt"))) == 1
    with pytest.raises(SystemExit, match="143"):
        run(callbacks=[Send(signal.SIGTERM, 12), ModelCheckpoint(tmp_path)], limit_val_batches=1)
    assert torch.load(tmp_path / "preempted.ckpt", weights_only=True)["env_steps"] == 32 * 12


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("rollouts", [6, 24])
def test_a_signal_ends_an_evaluation_after_a_save(fit_and_signal, monkeypatch, number, code, rollouts):
    step, steps = CartPoleEnv.step, []

    def signals(env, action):
        steps.append(action)
        signal.raise_signal(number)
        return step(env, action)

    class Arm(L.Callback):
        def on_validation_start(self, trainer, pl_module):
            if pl_module.rollouts_done == rollouts:
                monkeypatch.setattr(CartPoleEnv, "step", signals)

        def on_exception(self, *args):
            monkeypatch.undo()

    assert fit_and_signal(Arm(), code, rollouts, rollouts_per_epoch=6)["evaluation"] is None
    assert len(steps) == 1, "the evaluation ends at once"


PROGRAM = """
import os, time
import lightning as L
from ppo_lightning import PPO, RolloutDataModule

class Slow(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, *args):
        print("rollout", pl_module.rollouts_done, flush=True)
        time.sleep(1 if pl_module.rollouts_done == 3 else 0)

L.seed_everything(1)
total = int(os.environ.get("TOTAL", 32_000))
data = RolloutDataModule("CartPole-v1", num_envs=2, num_steps=16, total_timesteps=total)
trainer = L.Trainer(accelerator="cpu", callbacks=[Slow()], enable_progress_bar=False)
trainer.fit(PPO(num_minibatches=2), data)
"""


@pytest.fixture
def program(tmp_path):
    """Start the program; the fixture ends it."""
    started = []

    def start(**environment):
        (tmp_path / "program.py").write_text(PROGRAM)
        started.append(Forked(tmp_path, script, "program.py", **environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.mark.integration
def test_a_second_interrupt_ends_a_script_at_once(program):
    process = program()
    process.wait_for("rollout 3")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    said = "".join(process.communicate(timeout=20))
    assert "Tip:" not in said
    assert "max_epochs" not in said
    assert "evaluation every 6400 environment steps, episodes: 2" in said
    assert process.returncode == -signal.SIGINT  # 130 in a shell
    assert "Interrupted: saving after this iteration. Interrupt again to end at once." in said
    assert "Interrupted after" not in said


SLURM = {"JOB_ID": "4711", "JOB_NAME": "train", "NODELIST": "localhost", "NTASKS": "1"}
SLURM |= {"NTASKS_PER_NODE": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}


@pytest.mark.integration
def test_slurm_requeues_the_run_as_lightning_documents(program, tmp_path, fit):
    """Lightning finds its own checkpoint when the job starts again."""
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text('#!/bin/sh\necho "scontrol $@"\n')
    scontrol.chmod(0o755)
    job = {f"SLURM_{name}": value for name, value in SLURM.items()}
    job |= {"PATH": f"{scontrol.parent}:{os.environ['PATH']}", "TOTAL": "3200"}
    process = program(**job)
    process.wait_for("rollout 3")
    process.send_signal(signal.SIGUSR1)
    said = "".join(process.communicate(timeout=60))
    assert process.returncode == 143, said
    assert "scontrol requeue 4711" in said
    process = program(**job)
    said = "".join(process.communicate(timeout=120))
    assert process.returncode == 0, said
    assert "hpc_ckpt_1.ckpt: each environment resumes its episode, to the bit" in said
    assert "rollout 4\n" in said
    assert "rollout 3\n" not in said
    data = {"env_id": "CartPole-v1", "num_envs": 2, "num_steps": 16, "total_timesteps": 3200}
    whole = fit(data, {"num_minibatches": 2})
    last = torch.load(ppo_lightning.last_checkpoint(tmp_path / "lightning_logs"), weights_only=True)
    assert last["env_steps"] == 3200
    for key, value in whole.state_dict().items():
        assert torch.equal(value, last["state_dict"][key]), key


@pytest.mark.integration
def test_the_stop_button_of_a_notebook_saves_and_raises_keyboard_interrupt(tmp_path):
    manager = pytest.importorskip("jupyter_client").KernelManager(kernel_name="python3")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    manager.start_kernel(cwd=str(tmp_path), env=environment)
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)

    def run(code, stop_at):
        """Run a cell, press the stop button once, and return what it printed and the name of its error."""
        said = ""

        def show(message):
            nonlocal said
            content = message["content"]
            before, said = said, said + content.get("text", content.get("evalue", ""))
            if stop_at in said and stop_at not in before:
                manager.interrupt_kernel()

        reply = client.execute_interactive(code, output_hook=show, timeout=300)
        return said, reply["content"].get("ename")

    try:
        said, error = run(PROGRAM, stop_at="rollout 3")
        assert error == "KeyboardInterrupt", said
        assert "preempted.ckpt" in said
        fit = "import ppo_lightning\n{}trainer.fit(PPO(num_minibatches=2), data, ckpt_path={})"
        last = "ppo_lightning.last_checkpoint('lightning_logs')"
        said, error = run(fit.format("", last), stop_at="rollout 9\n")
        assert "rollout 3\n" not in said
        assert error == "KeyboardInterrupt", said
        said, error = run("import time\nprint('asleep', flush=True)\ntime.sleep(60)", stop_at="asleep")
        assert error == "KeyboardInterrupt", "the stop button works after the fit"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
