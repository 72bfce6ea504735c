"""Worker processes: the same episodes as in one process, errors, kills and clean ends."""

import functools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.envs import GymEnv, InitTracker

from ppo_lightning import ConfigError, MLPAgent
from ppo_lightning.callbacks.preemption import EXIT_CODE
from ppo_lightning.commands.profile import StageClock
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.envs.torchrl import as_torchrl
from ppo_lightning.envs.workers import processes as workers
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.utils.seeding import Shard
from tests.environments import Counter, Reach
from tests.helpers import SaveAfter, left_of, require_same, require_same_end, run, wait_for_a_checkpoint

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="reads /proc, and the tests' classes need fork"
)


class Fragile(Reach):
    """Reach that raises or returns NaN at random steps, the same ones for the same seed."""

    def __init__(self, only_raises=False):
        super().__init__()
        self.only_raises = only_raises

    def step(self, action):
        observation, reward, *rest = super().step(action)
        luck = self.np_random.random()
        if luck < 0.04:
            raise RuntimeError("the simulator is broken")
        return observation, np.nan if luck > 0.97 and not self.only_raises else reward, *rest


class UnpicklableError(Exception):
    def __init__(self, one, two):
        super().__init__("two arguments")


class Faulty(Counter):
    """Counter that fails where ``kind`` says, from the first step or reset on."""

    def __init__(self, kind):
        super().__init__()
        # The main process creates one to see the spaces.
        self.kind = kind if multiprocessing.parent_process() is not None else ""
        if self.kind == "is not created":
            raise ValueError("no license")
        if self.kind == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)

    def reset(self, *, seed=None, options=None):
        if self.kind == "reset":
            raise LookupError("no map")
        return super().reset(seed=seed)

    def step(self, action):
        observation, reward, *rest = super().step(action)
        if self.kind == "note":
            error = ValueError("the simulator is broken")
            error.add_note("a note of the simulator")
            raise error
        if self.kind == "unpicklable":
            raise UnpicklableError(1, 2)
        if self.kind == "exits":
            sys.exit(0)
        if self.kind == "reward":
            reward = "much"
        while self.kind == "hangs" and self.time > 3:
            time.sleep(1)
        return observation, reward, *rest

    def close(self):
        while self.kind == "hangs in close":
            time.sleep(1)


class Slow(Counter):
    """Counter whose step sleeps."""

    def step(self, action):
        time.sleep(0.005)
        return super().step(action)


@pytest.fixture
def make():
    """Return a function that makes environments; the fixture closes them and their workers."""
    made = []

    def make_env(env_id, num_workers, num_envs=4, step_timeout=None, **env_kwargs):
        factory = EnvFactory(env_id, "gymnasium", env_kwargs, (), num_workers, step_timeout)
        made.append(factory.make(num_envs, seed=3, first_env=5))
        return made[-1]

    yield make_env
    for env in made:
        env.close()
        assert not any(process.is_alive() for process in processes_of(env))


def processes_of(env):
    return [worker.process for worker in getattr(env, "workers", [])]


def collect(env, rollouts=4, num_steps=16, seed=None):
    torch.manual_seed(0)
    agent = MLPAgent(*env.agent_specs)
    as_torchrl(env).set_seed(seed)
    collector = make_collector(env, agent, num_steps, shard=Shard.whole(env.num_envs, seed=2))
    return [collector.rollout().clone() for _ in range(rollouts)]


def same(ours, others):
    return all(
        torch.equal(value, other.get(key))
        for one, other in zip(ours, others, strict=True)
        for key, value in one.items(True, True)
    )


ENVIRONMENTS = {
    "CartPole-v1": {},
    "Pendulum-v1": {"max_episode_steps": 11},
    "tests.environments:Script-v0": {},
    "tests.environments:Reach-v0": {},  # a dictionary of observations, and clipped actions
    "ppo_lightning.envs.tasks:Locks-v0": {"num_locks": 5},  # a mask from a method
    "Taxi-v4": {"max_episode_steps": 13},  # a mask in the info, and a discrete observation
    Fragile: {"max_restarts": 1000},
}


@pytest.mark.filterwarnings("ignore:Environment ")
@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_rollouts_are_equal_to_the_bit_for_any_number_of_workers(env_id, make):
    """CartPole also after another seed; Script shows the number of its resets."""
    seed = 7 if env_id == "CartPole-v1" else None
    expected = collect(make(env_id, 0, 5, **ENVIRONMENTS[env_id]), rollouts=6, seed=seed)
    if env_id is Fragile:
        assert sum(int(rollout["next", "truncated"].sum()) for rollout in expected) > 10
    for num_workers in (1, 2, 5, 9):
        env = make(env_id, num_workers, 5, **ENVIRONMENTS[env_id])
        assert len(processes_of(env)) == min(num_workers, 5)
        assert same(expected, collect(env, rollouts=6, seed=seed))


@pytest.mark.filterwarnings("ignore:Environment ")
def test_the_run_ends_at_the_same_failure_for_any_number_of_workers(make):
    ends = []
    for num_workers in (0, 2, 4):
        with pytest.raises(RuntimeError, match="broken") as end:
            collect(make(Fragile, num_workers, only_raises=True, max_restarts=1), 20)
        ends.append((str(end.value), end.value.__notes__[0].rpartition("\n")[2]))
    assert ends[0] == ends[1] == ends[2]


DATA = {"env_id": "Acrobot-v1", "env_kwargs": {"max_episode_steps": 30}, "num_envs": 4, "num_steps": 20}
DATA |= {"total_timesteps": 4 * 20 * 4, "eval_episodes": 4}
MODEL = {"num_minibatches": 2, "update_epochs": 2, "norm_reward": True, "learning_rate": 1e-3}
MODEL |= {"agent": functools.partial(MLPAgent, norm_obs=True)}


def test_weights_are_equal_to_the_bit_and_a_run_resumes_with_another_number(fit, tmp_path, capsys):
    options = {"limit_val_batches": 1, "check_val_every_n_epoch": None, "val_check_interval": 2}
    path = tmp_path / "middle.ckpt"
    whole = fit(DATA, MODEL, **options)
    for num_workers in (1, 2, 3):
        save = SaveAfter(path, 2)
        module = fit(DATA | {"num_workers": num_workers}, MODEL, callbacks=[save], **options)
        resumed = fit(DATA | {"num_workers": (num_workers + 1) % 3}, MODEL, ckpt_path=path, **options)
        assert "each environment resumes its episode, to the bit" in capsys.readouterr().out
        for other in (module, resumed):
            require_same(whole, other)
    assert not torch.equal(*(next(run.agent.parameters()) for run in (whole, fit(DATA, MODEL, seed=2))))


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("note", ValueError, "the simulator is broken"),
        ("unpicklable", RuntimeError, "UnpicklableError: two arguments"),
        ("exits", RuntimeError, "Faulty, environment 5: step() raised SystemExit(0)."),
        ("reward", ConfigError, "Faulty, environment 5, step 1: the reward is 'much'"),
        ("reset", LookupError, "no map"),
        ("is not created", ValueError, "no license"),
    ],
)
def test_an_error_in_a_worker_is_raised_as_in_one_process(kind, error, message, make, capfd):
    with pytest.raises(error) as caught:
        collect(make(Faulty, 2, kind=kind))
    assert str(caught.value).startswith(message)
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    if error is ConfigError:
        assert notes == ""
    else:
        assert "In the worker process:" in notes and "test_processes.py" in notes, "where it was raised"
    if kind == "note":
        assert "a note of the simulator\nFaulty, environment 5: step() raised this." in notes
    assert capfd.readouterr().err == "", "the worker prints nothing"


@pytest.mark.parametrize("started", [False, True])
def test_a_killed_worker_ends_the_step_with_one_sentence(started, make):
    env = make("CartPole-v1", 2)
    if started:
        env.reset_arrays()
        env.step_arrays(np.zeros(4, int))
    processes_of(env)[1].kill()
    with pytest.raises(RuntimeError, match=r"Worker 1 of 2 \(environments 7, 8\) was ended by SIGKILL"):
        for _ in range(2):
            env.reset_arrays()
            env.step_arrays(np.zeros(4, int))
    began = time.monotonic()
    env.close()
    assert time.monotonic() - began < 3


class Paid(Counter):
    """Counter that hangs if its wage is negative."""

    wage = 1.0

    def step(self, action):
        observation, _, *rest = super().step(action)
        while self.wage < 0:
            time.sleep(1)
        return observation, self.wage, *rest


def lose_worker(env, number, lose, step_timeout=60.0):
    """Lose a worker before a step, and require that the episodes of its rows are truncated."""
    count = env.num_envs
    env.reset_arrays()
    env.set_attr("wage", 3.0)
    before = env.step_arrays(np.zeros(count, int))[0].copy()
    lose(env, env.workers[number])
    env.step_timeout = step_timeout
    with pytest.warns(UserWarning, match=rf"Worker {number} of 2 .* is made anew \(restart . of"):
        observation, reward, terminated, truncated, _ = env.step_arrays(np.zeros(count, int))
    env.step_timeout = 60.0
    lost = (np.arange(count) >= count // 2) == number
    assert np.array_equal(truncated, lost) and not terminated.any()
    assert np.array_equal(observation, before + ~lost[:, None])
    assert np.array_equal(reward, 3.0 * ~lost)
    env.reset_arrays(truncated)
    observation, reward, *_ = env.step_arrays(np.zeros(count, int))
    assert reward.tolist() == [3] * count, "with the attributes of the lost ones"
    assert observation[:, 0].tolist() == np.where(lost, 1, 3).tolist()


def hang(env, worker):
    env._ask({worker: ("set_attr", "wage", -1.0)})


def test_a_lost_worker_is_made_anew(make):
    env = make(Paid, 2, 5, step_timeout=60.0, max_restarts=3)
    lose_worker(env, 1, lambda env, worker: worker.process.kill())
    lose_worker(env, 1, hang, step_timeout=1.5)
    env.workers[1].process.kill()  # before a reset of one of its environments
    with pytest.warns(UserWarning, match=r"restart 3 of 3"):
        env.reset_arrays(np.array([True, False, True, False, False]))
    assert env.step_arrays(np.zeros(5, int))[3].tolist() == [False, False, True, True, True]
    env.workers[1].process.kill()
    with pytest.raises(RuntimeError, match=r"Worker 1 of 2 .* SIGKILL, .*: resume .* raise .*max_restarts"):
        env.step_arrays(np.zeros(5, int))


def test_a_worker_that_is_lost_before_its_episodes_begin_truncates_none(make):
    env = make(Paid, 2, 4, step_timeout=60.0, max_restarts=3)
    for mask in (None, np.array([False, False, True, True])):
        env.workers[1].process.kill()
        with pytest.warns(UserWarning, match="Worker 1 of 2 .* is made anew"):
            env.reset_arrays(mask)
        assert not env.step_arrays(np.zeros(4, int)).truncated.any()


def test_an_environment_that_hangs_ends_its_worker_with_its_traceback(make, capfd):
    env = make(Faulty, 2, step_timeout=5.0, kind="hangs")
    collector = make_collector(env, MLPAgent(*env.agent_specs), 16, step_timeout=5.0)
    with pytest.raises(RuntimeError, match=r"Worker . of 2 .* hung for 0.8 \* data.step_timeout = 4 s"):
        collector.rollout()
    errors = capfd.readouterr().err
    assert 'test_processes.py", line' in errors.split("most recent call first")[1]


def test_the_timeout_holds_with_transforms():
    factory = EnvFactory("CartPole-v1", transforms=(InitTracker(),), num_workers=2, step_timeout=5.0)
    env = factory.make(4)
    agent = MLPAgent(env.observation_spec_unbatched["observation"], env.action_spec_unbatched)
    collector = make_collector(env, agent, 8, step_timeout=5.0)
    collector.rollout()
    os.kill(processes_of(env.base_env)[1].pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"Worker 1 of 2 .* did not answer for .* = 4 s"):
        collector.rollout()
    collector.shutdown()


EXCHANGES = {
    "reset": lambda env, states: env.reset_arrays(),
    "step": lambda env, states: env.step_arrays(np.zeros(4, int)),
    "state": lambda env, states: env.get_state(),
    "more than a pipe holds": lambda env, states: env.set_state(
        [row | {"attribute large": np.zeros(10**6)} for row in states]
    ),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_stopped_worker_ends_every_exchange_with_one_sentence(exchange, make, monkeypatch):
    monkeypatch.setattr(workers, "LOADING_SHARE", 0.8)
    env = make("CartPole-v1", 2, step_timeout=1.5)
    env.reset_arrays()
    states = env.get_state()
    os.kill(processes_of(env)[1].pid, signal.SIGSTOP)
    message = r"Worker 1 of 2 \(environments 7, 8\) did not answer for 0.8 \* data.step_timeout = 1.2 s, nor"
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        EXCHANGES[exchange](env, states)
    env.close()
    assert time.monotonic() - began < 5


def test_a_worker_that_is_stopped_while_it_creates_environments_ends_the_start(make, monkeypatch):
    monkeypatch.setattr(workers, "LOADING_SHARE", 1.0)
    with pytest.raises(RuntimeError, match=r"Worker 0 of 2 .* did not answer for .*step_timeout = 1 s"):
        make(Faulty, 2, step_timeout=1.0, kind="is stopped")


def test_an_environment_that_hangs_in_close_is_killed(make, monkeypatch):
    monkeypatch.setattr(workers, "CLOSE_SECONDS", 0.3)
    env = make(Faulty, 2, kind="hangs in close")
    env.reset_arrays()
    began = time.monotonic()
    env.close()
    assert 0.3 < time.monotonic() - began < 3


def test_an_interrupted_step_leaves_no_worker(make):
    """As Ctrl-C does. The workers do not see the signal."""
    env = make(Faulty, 2, kind="hangs")
    env.reset_arrays()
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in range(9):
                env.step_arrays(np.zeros(4, int))
    finally:
        signal.signal(signal.SIGALRM, before)
    began = time.monotonic()
    env.close()
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("draw", [np.random.random, lambda: torch.rand(()), random.random])
def test_workers_seed_the_global_random_generators(draw, make):
    class Careless(Counter):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, float(draw()), *rest

    rewards = []
    for _ in range(2):
        env = make(Careless, 4)
        env.reset_arrays()
        rewards.append(env.step_arrays(np.zeros(4, int))[1].tolist())
    assert rewards[0] == rewards[1]
    assert len(set(rewards[0])) == 4


# Settings


def vector_cartpole(num_envs):
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"backend": "envpool", "num_workers": 2}, "must be 0 for EnvPoolEnv"),
        ({"env_id": "ALE/Breakout-v5", "num_workers": 2}, "must be 0 for GymnasiumAtari"),
        ({"env_id": lambda: GymEnv("CartPole-v1"), "num_workers": 2}, "must be 0 for SerialEnv"),
        ({"env_id": vector_cartpole, "num_workers": 2}, "must be 0 for GymnasiumVectorEnv"),
        ({"num_workers": "many"}, "data.num_workers is 'many': it must be at least 0"),
        ({"num_workers": -1}, "data.num_workers is -1"),
        ({"worker_backend": "ray"}, "data.worker_backend is 'ray' and data.num_workers is 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_one_sentence(data, message, fit):
    with pytest.raises(ConfigError, match=message):
        fit({"num_envs": 4, "num_steps": 8, "total_timesteps": 32} | data)


def test_profile_tries_workers_for_slow_environments_only(fit):
    for env_id, expected in ((Slow, True), ("CartPole-v1", False)):
        clock = StageClock(0.1)
        data = {"env_id": env_id, "num_envs": 2, "num_steps": 8, "total_timesteps": 10**9}
        # Also beside other processes, the update takes less time than the sleeps of 16 steps.
        fit(data, {"num_minibatches": 1, "update_epochs": 1}, callbacks=[clock], max_epochs=-1)
        assert (("--data.num_workers", "2") in clock.changes) == expected


# Processes of the command line

WORKERS = ("--data.num_workers", "2")


def workers_of(process):
    """Return the forked processes of a run; tqdm starts another one."""
    commands = left_of(process.pid)
    parent = commands.pop(process.pid, None)
    return [number for number, command in commands.items() if command == parent]


@pytest.mark.integration
def test_ranks_have_workers_of_their_own(tmp_path):
    data = {"env_id": "Acrobot-v1", "env_kwargs": {"max_episode_steps": 30}}
    ends = [
        run(tmp_path / f"{num_workers}", 2, data=data | {"num_workers": num_workers})
        for num_workers in (0, 2)
    ]
    assert all(torch.equal(a["weights"], b["weights"]) for a, b in zip(*ends, strict=True))


@pytest.mark.integration
def test_spawned_workers_step_the_same_episodes(make, monkeypatch):
    """As on systems without fork."""
    expected = collect(make("CartPole-v1", 0))
    monkeypatch.setattr(workers, "START_METHOD", "spawn")
    assert same(expected, collect(make("CartPole-v1", 2)))


@pytest.mark.integration
def test_sigterm_to_all_processes_saves_at_the_end_of_the_iteration(runs):
    """Schedulers signal every process of a job."""
    broken = runs("broken")
    process = broken.start(*WORKERS, total=10**6)
    assert wait_for_a_checkpoint(broken, process)
    os.killpg(process.pid, signal.SIGTERM)
    code, said = broken.wait(process)
    assert code == EXIT_CODE, said
    assert "Preempted after" in said


@pytest.mark.integration
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("victim", ["a worker", "the parent"])
def test_kills_leave_no_process_and_the_run_resumes_to_the_bit(victim, kills, runs):
    whole, broken = runs("whole"), runs("broken")
    steps = 4 * 128 * 3 * 4 * (kills + 2)
    for number in range(kills):
        newest = broken.newest()
        process = broken.start(*WORKERS, "--auto_resume", total=steps)
        wait_for_a_checkpoint(broken, process, after=newest)
        time.sleep(random.Random(number).uniform(0, 0.3))
        found = workers_of(process)
        assert len(found) == 2, process.communicate()
        os.kill(found[number % 2] if victim == "a worker" else process.pid, signal.SIGKILL)
        code, said = broken.wait(process, timeout=30)
        if victim == "a worker":
            assert code == 1, said
            assert "was ended by SIGKILL, as Linux does when memory runs out: resume from" in said
        else:
            assert code == -signal.SIGKILL
    require_same_end(whole, broken, steps)


HOPPER = ("--data.env_id", "Hopper-v5", "--data.num_steps", "512", "--model.update_epochs", "1")


@pytest.mark.integration
@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_a_run_that_is_stopped_longer_than_the_timeout_continues(num_workers, runs):
    steps = 4 * 512 * 12
    stopped = runs("stopped")
    limits = ("--data.step_timeout", "2", "--data.num_workers", num_workers)
    process = stopped.start(*HOPPER, *limits, total=steps)
    assert wait_for_a_checkpoint(stopped, process), process.communicate()
    for seconds in (0.1, 0.4):
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(3)
        os.killpg(process.pid, signal.SIGCONT)
    code, said = stopped.wait(process)
    assert code == 0, said
    stopped.final(steps)


@pytest.mark.integration
def test_an_environment_that_is_never_closed_does_not_block_the_end_of_python():
    script = """
from ppo_lightning.envs.factory import EnvFactory
env = EnvFactory("CartPole-v1", num_workers=2).make(2)
env.reset_arrays()
kept = [env]
kept.append(kept)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
