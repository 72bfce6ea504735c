"""Environment adapters: specs, seeds, and episode ends without dummy transitions."""

import enum
import functools
import multiprocessing
import threading

import gymnasium
import numpy as np
import pytest
from pettingzoo.classic import rps_v2
from torchrl.envs import check_env_specs

from ppo_lightning import ConfigError, RolloutDataModule, make_env
from ppo_lightning.envs import EnvFactory
from ppo_lightning.envs.conformance import check_environment
from ppo_lightning.envs.contract import place_of
from ppo_lightning.envs.gymnasium import GymnasiumEnv
from ppo_lightning.envs.vector import CartPoleEnv
from ppo_lightning.games.make import _make_game
from ppo_lightning.spaces.entries import entry_columns
from ppo_lightning.utils.seeding import derive_seed
from tests.environments import Counter
from tests.helpers import needs_dm_control

BACKENDS = ("gymnasium", "envpool")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "MountainCar-v0"])
def test_specs_are_what_the_environment_does(env, backend, env_id):
    check_env_specs(env(env_id, 3, backend), break_when_any_done="both")


@pytest.mark.parametrize("backend", BACKENDS)
def test_closing_an_environment_closes_what_it_steps_once(backend, monkeypatch):
    batch = make_env("CartPole-v1", 1, backend)
    batch.reset_arrays()
    closed = []
    stepped = batch.envs[0] if isinstance(batch.envs, list) else batch.envs
    monkeypatch.setattr(stepped, "close", lambda: closed.append(True))
    assert not batch.is_closed
    batch.close()
    batch.close(raise_if_closed=False)
    assert batch.is_closed and closed == [True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_transition_ignores_its_action_or_loses_its_last_observation(env, backend):
    """EnvPool's autoreset would add a reward of 0 and a repeated observation (pitfall A1)."""
    batch = env("CartPole-v1", 2, backend, env_kwargs={"max_episode_steps": 12})
    observation = batch.reset_arrays().copy()
    rewards, steps, last = 0.0, 0, None
    for step in range(40):  # the first pole falls, the second one stands until the time limit
        results = batch.step_arrays(np.array([0, step % 2]))
        following, reward, terminated, truncated, _ = (array.copy() for array in results)
        rewards += reward.sum()
        steps += 2
        # In every real transition, the position of the cart integrates the velocity.
        np.testing.assert_allclose(following[:, 0], observation[:, 0] + 0.02 * observation[:, 1], atol=1e-5)
        done = terminated | truncated
        observation = following
        if done.any():
            last = following[done]
            observation = batch.reset_arrays(done).copy()
            np.testing.assert_array_equal(observation[~done], following[~done])
            assert np.abs(observation[done]).max() <= 0.05, "a fresh episode starts near 0"
            assert not np.allclose(last, observation[done]), "the last observation is not the reset one"
    assert last is not None
    assert rewards == steps


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeds_decide_the_episodes(env, backend):
    first, same, other = (
        env("CartPole-v1", 4, backend, seed=seed).reset_arrays().copy() for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, same)
    assert not np.intersect1d(first, other).size
    assert len(np.unique(first[:, 0])) == 4
    # Environment 2 of a single rank is environment 0 of a rank whose first environment is 2.
    np.testing.assert_array_equal(
        env("CartPole-v1", 2, backend, seed=1, first_env=2).reset_arrays(), first[2:]
    )
    assert not np.intersect1d(
        env("CartPole-v1", 4, backend, seed=1, stream="eval").reset_arrays(), first
    ).size


@pytest.mark.parametrize(
    ("env_id", "backend", "env_kwargs", "said"),
    [
        ("CartPol-v1", "gymnasium", {}, r"env_id 'CartPol-v1' .*did you mean .*CartPole-v1"),
        ("CartPol-v1", "envpool", {}, r"env_id 'CartPol-v1' .*did you mean .*CartPole-v1"),
        ("CartPole-v1", "torch", {}, "makes a TorchEnv: call EnvFactory"),
        ("Pendulum-v1", "envpool", {"batch_size": 2}, r"data.env_kwargs does not fit .*batch_size"),
        ("Acrobot-v1", "vectorized", {}, "data.env_kwargs does not fit env_id 'Acrobot-v1'"),
        ("NeedsPackage-v0", "gymnasium", {}, "needs a package that is missing"),
        ("Pusher-v4", "gymnasium", {}, r"Pusher-v4.*mujoco<3"),
    ],
)
def test_what_cannot_be_made_ends_in_one_sentence(env_id, backend, env_kwargs, said):
    gymnasium.register("NeedsPackage-v0", "a_package_that_is_not_there:Env")
    with pytest.raises(ConfigError, match=said):
        make_env(env_id, 2, backend, env_kwargs=env_kwargs)


@pytest.mark.parametrize(
    ("env_id", "backend"),
    [
        pytest.param("dm_control/walker-walk-v0", "gymnasium", marks=needs_dm_control),
        ("WalkerWalk-v1", "envpool"),
    ],
)
def test_entries_are_in_alphabetical_order_on_each_backend(env, env_id, backend):
    """Their own orders are others: an agent could not change the backend."""
    columns = entry_columns(env(env_id, 1, backend).agent_specs[0])
    assert columns == {"height": slice(0, 1), "orientations": slice(1, 15), "velocity": slice(15, 24)}


@pytest.mark.parametrize(
    ("env_id", "backend"),
    [
        pytest.param("dm_control/cartpole-balance-v0", "gymnasium", marks=needs_dm_control),
        ("CartpoleBalance-v1", "envpool"),
    ],
)
def test_the_end_of_a_dm_control_episode_is_a_time_limit(env, env_id, backend):
    batch = env(env_id, 1, backend)
    batch.reset_arrays()
    ends = np.stack([np.array(batch.step_arrays(np.zeros((1, 1)))[2:4]) for _ in range(1000)])
    assert not ends[:999].any()
    assert ends[999].tolist() == [[False], [True]], "truncated, not terminated"


@pytest.mark.parametrize("options", [{}, {"max_episode_steps": 12}])
def test_many_cartpoles_are_many_single_ones_to_the_bit(env, options):
    many, single = (
        env("CartPole-v1", 16, "vectorized", seed=3, env_kwargs=options),
        GymnasiumEnv(functools.partial(gymnasium.make, "CartPole-v1", **options), many_seeds(3, 16)),
    )
    assert isinstance(many.arrays, CartPoleEnv)
    assert not isinstance(env("CartPole-v1", 16).arrays, CartPoleEnv), "only where it is asked for"
    assert np.array_equal(many.reset_arrays(), single.reset_arrays())
    rng, ends = np.random.default_rng(0), np.zeros(2, int)
    for _ in range(300):
        action = rng.integers(2, size=16)
        steps = [batch.step_arrays(action) for batch in (many, single)]
        for one, other in zip(*steps, strict=True):
            assert np.array_equal(one, other)
        _, _, terminated, truncated, _ = steps[0]
        ends += terminated.sum(), truncated.sum()
        if (done := terminated | truncated).any():
            assert np.array_equal(many.reset_arrays(done), single.reset_arrays(done))
    assert ends[0] > 50 and (ends[1] > 50) == bool(options)
    many.reseed(many_seeds(4, 16))
    single.reseed(many_seeds(4, 16))
    assert np.array_equal(many.reset_arrays(), single.reset_arrays())
    single.close()


def many_seeds(seed, count):
    return [derive_seed(seed, "train", index) for index in range(count)]


# Arguments of environments


class Taking(Counter):
    """Environment that takes a number out of a list in its arguments."""

    def __init__(self, lengths):
        super().__init__(terminate_at=lengths.pop())


def vector_of(num_envs, lengths):
    return gymnasium.vector.SyncVectorEnv([functools.partial(Counter, lengths.pop())] * num_envs)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Taking, {}),
        (Taking, {"num_workers": 1}),
        (Taking, {"env_kwargs": {"max_restarts": 1}}),
        (lambda lengths: Taking(lengths), {}),
        (lambda lengths: rps_v2.parallel_env(max_cycles=lengths.pop()), {"num_envs": 4}),
        (vector_of, {}),
        (functools.partial, {}),
    ],
)
def test_each_copy_has_arguments_of_its_own(fit, make, options):
    lengths = [8]
    options = {"num_envs": 2, "num_steps": 8, "total_timesteps": 64, "eval_episodes": 2} | options
    env_kwargs = {"lengths": lengths} | options.pop("env_kwargs", {})
    if make is functools.partial:
        make, env_kwargs = functools.partial(Taking, **env_kwargs), {}
    module = fit({"env_id": make, "env_kwargs": env_kwargs, **options}, limit_val_batches=1)
    assert module.env_steps == 64
    assert lengths == [8]


class Named(Counter):
    """Environment that takes one argument of any name."""

    def __init__(self, keywords):
        super().__init__(terminate_at=8)
        assert list(keywords.values()) == [3]


@pytest.mark.parametrize("name", ["self", "cls", "seed", "seeds", "env_id", "auto_reset", "copies", "render"])
@pytest.mark.parametrize("make", ["Named-v0", lambda **keywords: Named(keywords)])
def test_arguments_have_any_name(fit, make, name):
    gymnasium.register("Named-v0", lambda **keywords: Named(keywords), disable_env_checker=True)
    data = {"env_id": make, "env_kwargs": {name: 3}, "num_envs": 2, "num_steps": 8, "total_timesteps": 16}
    assert fit(data).env_steps == 16


class Level(enum.IntEnum):
    """A difficulty."""

    HARD = 2


class Holding(Counter):
    """Environment that keeps its argument."""

    def __init__(self, argument):
        super().__init__(terminate_at=8)
        self.argument = argument


@pytest.mark.parametrize(
    ("argument", "is_plain"),
    [
        ((1, {"a": (2.0, None)}), True),
        ({1: True}, True),
        (Level.HARD, False),
        ({Level.HARD: 1}, False),
        ({1, 2}, False),
        (np.arange(3), False),
        (threading.Lock(), False),
        (len, False),
    ],
)
def test_a_checkpoint_gives_arguments_back_as_they_were_or_asks_for_them(fit, tmp_path, argument, is_plain):
    env_kwargs = {"argument": argument}
    data = {"env_id": Holding, "env_kwargs": env_kwargs, "num_envs": 2, "num_steps": 8, "total_timesteps": 16}
    trainer = fit(data).trainer
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    load = functools.partial(RolloutDataModule.load_from_checkpoint, tmp_path / "a.ckpt", env_id=Holding)
    if is_plain:
        assert load().hparams["env_kwargs"] == env_kwargs
    else:
        with pytest.raises(ConfigError, match=r"data\.env_kwargs"):
            load()
    assert load(env_kwargs=env_kwargs).factory.env_kwargs.keys() == {"argument"}


# Optional parts of environments


class Pooled(Counter):
    """Environment with processes of its own."""

    def __init__(self):
        super().__init__(terminate_at=8)
        self.pool = multiprocessing.get_context("fork").Pool(1)

    def step(self, action):
        assert self.pool.map(abs, [-2]) == [2]
        return super().step(action)

    def close(self):
        self.pool.terminate()
        self.pool.join()


TRAINS = {"num_envs": 2, "num_steps": 8, "total_timesteps": 16}


def test_an_environment_in_a_worker_has_processes(fit):
    assert fit(TRAINS | {"env_id": Pooled, "num_workers": 2}).env_steps == 16


def test_a_process_of_a_pool_has_workers(fit):
    process = multiprocessing.current_process()
    process._config["daemon"] = True  # as a Pool marks its processes
    try:
        assert fit(TRAINS | {"env_id": Counter, "num_workers": 2}).env_steps == 16
        assert process.daemon
    finally:
        process._config["daemon"] = False


# Constructors


class Broken(gymnasium.Env):
    def __init__(self, error=None, size=3):
        raise (error or self.error)


ERRORS = [ValueError("bad map"), TypeError("a None"), AssertionError("no"), OSError(2, "no file")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("backend", ["gymnasium", "vectorized", "pettingzoo"])
def test_an_error_inside_a_constructor_is_its_own(monkeypatch, error, backend):
    monkeypatch.setattr(Broken, "error", error, raising=False)
    gymnasium.register("Broken-v0", entry_point=Broken, vector_entry_point=lambda num_envs: Broken())
    try:
        with pytest.raises(type(error)) as raised:
            if backend == "pettingzoo":
                _make_game(Broken, "Broken-v0")
            make_env("Broken-v0", 2, backend)
        assert not isinstance(raised.value, ConfigError) and "env_kwargs" not in str(raised.value)
        assert place_of(raised.value).startswith("test_gymnasium.py, line ")
        (finding,) = check_environment(EnvFactory("Broken-v0"), 2).findings
        assert "(test_gymnasium.py, line " in finding.what and type(error).__name__ in finding.what
        start = "does not fit env_id 'Broken-v0': "
        with pytest.raises(ConfigError, match=rf"{start}.*\(test_gymnasium.py, line \d+\)"):
            make_env("Broken-v0", 2, env_kwargs={"error": error})
        with pytest.raises(ConfigError, match=rf"{start}.*'wind'") as refused:
            make_env("Broken-v0", 2, env_kwargs={"wind": 1})
        assert "test_gymnasium.py" not in str(refused.value)
    finally:
        del gymnasium.registry["Broken-v0"]
