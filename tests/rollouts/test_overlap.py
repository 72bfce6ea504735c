"""Rollouts collected during the update: a lag of one update, and nothing else that changes."""

import copy
import functools
import threading
import time
import warnings

import lightning as L
import numpy as np
import pytest
import torch
from torchrl.envs import InitTracker, VecNormV2

from ppo_lightning import PPG, PPO, RND, MLPAgent, RecurrentPPO, RolloutDataModule, SelfPlay
from ppo_lightning.callbacks import CaptureVideo
from ppo_lightning.callbacks.guards import RolloutGuard
from ppo_lightning.errors import NonFiniteError
from ppo_lightning.rollouts.overlap import OverlappedCollector
from ppo_lightning.rollouts.storage import add_evaluation
from tests.environments import Trouble
from tests.envs.workers.test_processes import Fragile
from tests.helpers import Dropout, SaveAfter, require_same

DATA = {"env_id": "Hopper-v5", "num_envs": 2, "num_steps": 32, "total_timesteps": 64 * 7, "overlap": True}
AGENT = functools.partial(MLPAgent, norm_obs=True)
MODEL = {"num_minibatches": 2, "update_epochs": 3, "learning_rate": 0.01, "norm_reward": True, "agent": AGENT}
OPENINGS = {"env_id": "ConnectFour-v1", "backend": "envpool", "env_kwargs": {"opening_moves": 3}}
MEMORY = {"agent": functools.partial(MLPAgent, norm_obs=True, memory="lstm", shared=True)}
VALIDATE = {"limit_val_batches": 1, "check_val_every_n_epoch": None, "val_check_interval": 1}


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollouts")]


class Recorder(L.Callback):
    """Callback that keeps rollouts, weights before each update, statistics and results of evaluations."""

    def on_train_start(self, trainer, pl_module):
        self.rollouts, self.agents, self.evaluations = [], [], []

    def on_train_batch_start(self, trainer, pl_module, rollout, batch_idx):
        self.rollouts.append(rollout.clone())
        self.agents.append(copy.deepcopy(pl_module.agent))

    def on_validation_end(self, trainer, pl_module):
        metrics = trainer.callback_metrics
        self.evaluations.append({key: float(metrics[key]) for key in metrics if key.startswith("eval/")})


class Slow(L.Callback):
    """Callback that delays the thread or the update at random."""

    def __init__(self, of_collector, of_update):
        self.of_collector, self.of_update = of_collector, of_update
        self.generator = np.random.default_rng(0)

    def on_train_start(self, trainer, pl_module):
        env = pl_module.data.env
        step_arrays = env.step_arrays

        def slow_step(action):
            time.sleep(self.generator.uniform(0, self.of_collector))
            return step_arrays(action)

        env.step_arrays = slow_step

    def on_train_batch_start(self, trainer, pl_module, rollout, batch_idx):
        time.sleep(self.generator.uniform(0, self.of_update))


def drift(rollout, agent):
    """Return the largest difference between stored log-probabilities and those of an agent."""
    with torch.no_grad():
        rows = (rollout[key].flatten(0, 1) for key in ("observation", "action"))
        recomputed = agent.evaluate(*rows).log_prob
    return (recomputed - rollout["action_log_prob"].flatten()).abs().max().item()


@pytest.mark.parametrize("data", [{}, {"transforms": [InitTracker()]}], ids=["arrays", "TorchRL"])
def test_a_rollout_is_collected_with_the_weights_of_one_update_before(fit, monkeypatch, data):
    recorder, collected = Recorder(), []

    def record(agent, rollout):
        collected.append(rollout.clone())
        add_evaluation(agent, rollout)

    monkeypatch.setattr("ppo_lightning.rollouts.overlap.add_evaluation", record)
    fit(DATA | data, MODEL, callbacks=[recorder])
    assert len(recorder.rollouts) == len(collected) == 7
    for t, rollout in enumerate(collected):
        for age in range(min(4, t + 1)):  # updates between the weights and the rollout's update
            matches = age == min(1, t)
            assert (drift(rollout, recorder.agents[t - age]) < 1e-4) == matches, (t, age)
    for rollout, agent in zip(recorder.rollouts, recorder.agents, strict=True):
        assert drift(rollout, agent) < 1e-4, "the clipping range is centered on the policy before the update"
        observation, value = rollout["observation"], rollout["state_value"].squeeze(-1)
        with torch.no_grad():
            torch.testing.assert_close(agent.value(observation.flatten(0, 1)), value.flatten())


@pytest.mark.filterwarnings("ignore:Environment ")
@pytest.mark.parametrize(
    ("data", "model", "ppo"),
    [
        ({}, {}, PPO),
        ({"backend": "envpool", "env_id": "Hopper-v4"}, {}, PPO),
        ({}, MEMORY, RecurrentPPO),
        ({"transforms": [InitTracker()]}, {}, PPO),
        ({"env_id": "CartPole-v1", "backend": "torch"}, {"agent": MLPAgent}, PPO),
        ({"num_workers": 2}, {}, PPO),
        ({"env_id": Fragile, "env_kwargs": {"max_restarts": 99}}, {}, PPO),
        (OPENINGS, {"rating_games": 0}, SelfPlay),
    ],
    ids=["gymnasium", "envpool", "memory", "TorchRL", "scan", "workers", "restarts", "openings"],
)
def test_only_the_weights_lag(fit, data, model, ppo):
    """With weights that do not change, rollouts and statistics at each update are those without a thread."""
    runs = []
    for overlap in (False, True):
        recorder = Recorder()
        options = MODEL | model | {"learning_rate": 1e-15}
        module = fit(DATA | data | {"overlap": overlap}, options, ppo=ppo, callbacks=[recorder])
        runs.append((module, recorder))
    (off, expected), (on, found) = runs
    assert len(expected.rollouts) == len(found.rollouts) == 7
    for one, other in zip(expected.rollouts, found.rollouts, strict=True):
        for key, value in one.items(True, leaves_only=True):
            if key in ("action_log_prob", "state_value"):  # computed anew
                torch.testing.assert_close(value, other[key], atol=1e-4, rtol=1e-4)
            else:
                assert torch.equal(value, other[key]), key
    for one, other in zip(expected.agents, found.agents, strict=True):
        for (key, value), copied in zip(one.named_buffers(), other.buffers(), strict=True):
            assert torch.equal(value, copied), key
    for key, value in off.state_dict().items():
        torch.testing.assert_close(value, on.state_dict()[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "options", [VALIDATE, {"precision": "bf16-mixed"}, {"reload_dataloaders_every_n_epochs": 1}], ids=str
)
def test_the_speed_of_the_thread_changes_nothing(fit, options):
    runs = []
    for slow in (Slow(0, 0), Slow(0.004, 0), Slow(0, 0.2)):
        recorder = Recorder()
        data = DATA | {"rollouts_per_epoch": 2}
        runs.append((fit(data, MODEL, callbacks=[slow, recorder], **options), recorder))
    for module, recorder in runs[1:]:
        require_same(runs[0][0], module)
        assert len(recorder.evaluations) == (7 if options is VALIDATE else 0)
        assert recorder.evaluations == runs[0][1].evaluations


def test_an_evaluation_sees_the_statistics_of_the_rollouts_that_were_learned(fit):
    """The pending rollout has moved those of the thread only."""
    counts = []

    class Count(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            collected = pl_module.data.collector.collector.rollouts_done
            counts.append((pl_module.agent.normalizer.count.item(), collected))

    fit(DATA, MODEL, callbacks=[Slow(0.004, 0), Count()], **VALIDATE)
    steps = [2 * 32 * rollouts for rollouts in range(1, 8)]
    assert [collected for _, collected in counts] == [2, 3, 4, 5, 6, 7, 7], "one rollout ahead"
    for (count, _), learned in zip(counts, steps, strict=True):
        assert learned <= count < learned + 2 * 32, "a reset counts, too"


PHASES = {"n_iteration": 2, "e_auxiliary": 2, "num_aux_rollouts": 2}
SCAN = {"env_id": "CartPole-v1", "backend": "torch"}
RUNS = [
    *((PPO, rollouts, {}, {}) for rollouts in (1, 4, 6)),
    *((RecurrentPPO, rollouts, MEMORY, {}) for rollouts in (1, 4)),
    *((PPG, rollouts, PHASES, {}) for rollouts in (3, 4)),
    (RND, 3, {"num_iterations_obs_norm_init": 1}, {}),
    (PPO, 3, {"agent": MLPAgent}, SCAN),
    pytest.param(PPO, 2, {"compile": True}, {}, marks=pytest.mark.integration),
]


@pytest.mark.parametrize(("ppo", "rollouts", "model", "data"), RUNS)
def test_a_resumed_run_ends_as_the_uninterrupted_one_to_the_bit(
    fit, tmp_path, capsys, ppo, rollouts, model, data
):
    recorders = [Recorder(), Recorder()]
    path = tmp_path / "middle.ckpt"
    options = {"ppo": ppo, **VALIDATE}
    data, model = DATA | data, MODEL | model
    whole = fit(data, model, callbacks=[SaveAfter(path, rollouts), recorders[0]], **options)
    slow = [] if "backend" in data else [Slow(0.002, 0)]  # a scan does not step
    resumed = fit(data, model, ckpt_path=path, callbacks=[*slow, recorders[1]], **options)
    assert "resumes its episode, to the bit" in capsys.readouterr().out
    require_same(whole, resumed)
    assert recorders[0].evaluations[-1] == recorders[1].evaluations[-1]
    pairs = zip(recorders[0].rollouts[rollouts:], recorders[1].rollouts, strict=True)
    for pair in pairs:
        one, other = (rollout.exclude(("next", "memory")).to_dict() for rollout in pair)
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_may_be_resumed_with_another_setting(fit, tmp_path, capsys, saved):
    """The episodes resume; the first rollout has the weights of the checkpoint where none lag."""
    recorders = [Recorder(), Recorder()]
    path = tmp_path / "middle.ckpt"
    fit(DATA | {"overlap": saved}, MODEL, callbacks=[SaveAfter(path, 3), recorders[0]])
    resumed = fit(DATA | {"overlap": not saved}, MODEL, ckpt_path=path, callbacks=[recorders[1]])
    assert "resumes its episode, to the bit" in capsys.readouterr().out
    assert resumed.rollouts_done == 7
    first = recorders[1].rollouts[0]
    assert torch.equal(first["observation"][:, 0], recorders[0].rollouts[3]["observation"][:, 0])
    assert drift(first, recorders[1].agents[0]) < 1e-4


def test_a_checkpoint_has_the_buffers_of_transforms_before_the_pending_rollout(fit, tmp_path):
    paths = tmp_path / "overlap.ckpt", tmp_path / "plain.ckpt"
    for path, overlap in zip(paths, (True, False), strict=True):
        data = DATA | {"transforms": [VecNormV2(["observation"])], "overlap": overlap}
        model = MODEL | {"agent": MLPAgent, "learning_rate": 1e-15}
        fit(data, model, callbacks=[SaveAfter(path, 3)])
    states = [torch.load(path, weights_only=True)["RolloutDataModule"]["collector"]["env"] for path in paths]
    for key, value in states[0].items():
        torch.testing.assert_close(value, states[1][key], msg=key)


def test_environments_without_a_state_start_fresh_episodes(fit, tmp_path, capsys):
    data = DATA | {"env_id": "Hopper-v4", "backend": "envpool"}
    fit(data, MODEL, callbacks=[SaveAfter(tmp_path / "middle.ckpt", 3)])
    resumed = fit(data, MODEL, ckpt_path=tmp_path / "middle.ckpt")
    assert "the environments start fresh episodes" in capsys.readouterr().out
    assert resumed.rollouts_done == 7
    assert resumed.agent.normalizer.count.item() >= 7 * 64


@pytest.mark.parametrize("epochs", [1, 3, 7])
def test_no_rollout_is_collected_beyond_the_end(fit, epochs):
    steps = []

    class Count(L.Callback):
        def on_train_start(self, trainer, pl_module):
            step_arrays = pl_module.data.env.step_arrays
            pl_module.data.env.step_arrays = lambda action: steps.append(1) or step_arrays(action)

    module = fit(DATA | {"rollouts_per_epoch": epochs}, MODEL, callbacks=[Count()])
    assert module.rollouts_done == 7
    assert len(steps) == 7 * 32


@pytest.mark.parametrize("limit", [{"max_epochs": 1}, {"max_steps": 12}])
def test_a_run_that_ends_early_ends_its_thread(fit, limit):
    """Rollout 3 is pending."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = fit(DATA | {"rollouts_per_epoch": 2}, MODEL, **limit)
    assert module.rollouts_done == 2


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("raises", RuntimeError, "the simulator is broken"),
        ("exits", RuntimeError, r"Trouble-v0, environment 1: step\(\) raised SystemExit\(0\)"),
        ("nan", NonFiniteError, "reward of environment 1 is nan"),
    ],
)
@pytest.mark.parametrize("transforms", [False, True])
def test_an_exception_in_the_thread_ends_the_run_with_the_same_sentence(
    fit, kind, error, message, transforms
):
    """It is raised where the rollout would be handed out. Another run in the process then works."""
    raised = []
    for overlap in (False, True):
        recorder = Recorder()
        kwargs = {"kind": kind, "at": 90, "env": Trouble.made + 1}
        data = DATA | {"env_id": "tests.environments:Trouble-v0", "env_kwargs": kwargs, "overlap": overlap}
        if transforms:
            data["transforms"] = [InitTracker()]
        with pytest.raises(error, match=message) as info:
            fit(data, MODEL | {"agent": MLPAgent}, callbacks=[recorder])
        raised.append((type(info.value), str(info.value)))
        assert len(recorder.rollouts) == 2
    assert raised[0] == raised[1]
    assert fit(DATA, MODEL).rollouts_done == 7


def test_an_exception_of_the_update_ends_the_thread(fit):
    class Broken(PPO):
        def training_step(self, rollout, batch_idx):
            if batch_idx == 2:
                raise KeyboardInterrupt
            super().training_step(rollout, batch_idx)

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(DATA, MODEL, ppo=Broken)


def test_two_runs_with_one_module_and_one_data_module(make_trainer):
    module, data = PPO(**MODEL), RolloutDataModule(**DATA)
    for _ in range(2):
        make_trainer().fit(module, data)
        assert module.rollouts_done == 7


@pytest.mark.parametrize("agent", [AGENT, Dropout])
def test_the_guard_finds_dropout_alone(fit, agent, tmp_path, monkeypatch):
    monkeypatch.setattr(RolloutGuard, "every", 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = tmp_path / "middle.ckpt"
        data = DATA | {"env_id": "CartPole-v1"}
        fit(data, MODEL | {"agent": agent}, callbacks=[SaveAfter(path, 3)])
        if agent is AGENT:
            fit(data, MODEL | {"agent": agent}, ckpt_path=path)
    warned = [str(w.message) for w in caught if "log-probabilities" in str(w.message)]
    assert bool(warned) == (agent is Dropout)


def test_no_thread_runs_during_the_first_update(fit):
    """PyTorch compiles then."""
    idle = []

    class Idle(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, *args):
            idle.append(pl_module.data.collector._pending.done())

    fit(DATA, MODEL, callbacks=[Slow(0.004, 0), Idle()])
    assert idle[:6] == [True, False, False, False, False, False]


def test_a_video_waits_for_the_thread(fit, monkeypatch):
    idle = []
    monkeypatch.setattr(
        "ppo_lightning.callbacks.video.record_video",
        lambda *args, **kwargs: idle.append(pending is None or pending.done()),
    )
    collect = OverlappedCollector._collect

    def slow_collect(self):
        time.sleep(0.05)
        return collect(self)

    monkeypatch.setattr(OverlappedCollector, "_collect", slow_collect)

    class Pending(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, *args):
            nonlocal pending
            pending = pl_module.data.collector._pending

    pending = None
    fit(DATA, MODEL, callbacks=[Pending(), CaptureVideo(every=1)])
    assert idle == [True] * (1 + 7), "one step at the start of the run, before any rollout"
