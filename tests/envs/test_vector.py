"""Vectorized environments of users: the same rollouts as single environments in each autoreset mode."""

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from lightning.pytorch.callbacks import ModelCheckpoint
from torchrl.envs import SerialEnv, StepCounter
from torchrl.envs.libs.gym import GymEnv

from ppo_lightning import PPO, MLPAgent, RecurrentPPO, make_env
from ppo_lightning.callbacks.guards import log_probs_again
from ppo_lightning.envs import EnvFactory
from ppo_lightning.errors import ConfigError
from ppo_lightning.models.normalizers import RewardScaler
from ppo_lightning.rollouts.evaluation import EvaluationLoader
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.spaces.specs import mask_columns
from ppo_lightning.utils.seeding import Shard, derive_seed
from ppo_lightning.video.record import record_video
from tests.environments import NextStepVector
from tests.helpers import Recorder

SCRIPT, REACH, PARTS = (f"tests.environments:{name}-v0" for name in ("Script", "Reach", "Parts"))
DISABLED, NEXT_STEP = AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP
SMALL = {"num_envs": 2, "num_steps": 48, "total_timesteps": 192, "eval_episodes": 3}


def vectorized(kind=SyncVectorEnv, mode=DISABLED, env_id=SCRIPT, **options):
    """Return a function that makes Gymnasium's own vectorized environment."""

    def make(num_envs):
        return kind([functools.partial(gym.make, env_id)] * num_envs, autoreset_mode=mode, **options)

    return make


def next_step(env_id):
    return lambda num_envs: NextStepVector(env_id, num_envs)


def collect(env, count=4, num_steps=40, deterministic=False, scaler=None, **options):
    """Return rollouts of an agent whose weights and noise depend on nothing else, and the agent."""
    torch.manual_seed(0)
    agent = MLPAgent(*env.agent_specs, shared="memory" in options, **options)
    shard = Shard.whole(env.num_envs, seed=3)
    collector = make_collector(
        env, agent, num_steps, count, shard=shard, deterministic=deterministic, reward_scaler=scaler
    )
    try:
        return [rollout.clone() for rollout in collector], agent
    finally:
        collector.shutdown()


def require_equal(ours, theirs):
    one, other = ([rollout.to_dict() for rollout in rollouts] for rollouts in (ours, theirs))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert sum(rollout["next", "done"].sum() for rollout in ours) > 20


@pytest.mark.parametrize("mode", [DISABLED, NEXT_STEP])
@pytest.mark.parametrize("env_id", [SCRIPT, REACH, PARTS])
def test_each_mode_gives_the_rollouts_of_single_environments(mode, env_id):
    options = {"norm_obs": True, "memory": "lstm"}
    single, agent = collect(make_env(env_id, 3, seed=5), scaler=RewardScaler(0.99), **options)
    env = make_env(vectorized(SyncVectorEnv, mode, env_id, copy=False), 3, seed=5)
    ours, other = collect(env, scaler=RewardScaler(0.99), **options)
    require_equal(ours, single)
    assert torch.equal(agent.normalizer.mean, other.normalizer.mean)


@pytest.mark.integration
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("mode", [DISABLED, NEXT_STEP])
def test_each_mode_of_gymnasiums_worker_processes(mode, shared_memory):
    make = vectorized(AsyncVectorEnv, mode, REACH, shared_memory=shared_memory)
    env = make_env(make, 3, seed=5)
    late = mode is NEXT_STEP and not shared_memory
    assert env.resets_late == late, "workers without shared memory would reset twice"
    ours, _ = collect(env, deterministic=True)
    single, _ = collect(make_env(REACH, 3, seed=5), deterministic=True)
    if late:
        require_same_valid_steps(ours, single)
    else:
        require_equal(ours, single)


# Steps that only reset an environment


def require_same_valid_steps(ours, single):
    """Compare each environment's sequences of valid steps."""
    masked = torch.cat([rollout["weight"] > 0 for rollout in ours], dim=1)
    compared = 0
    for key in single[0].keys(include_nested=True, leaves_only=True):
        if key in ("memory", ("next", "memory")):
            continue  # held at the boundaries of rollouts, which differ
        a, b = (torch.cat([rollout[key] for rollout in rollouts], dim=1) for rollouts in (ours, single))
        for i, valid in enumerate(masked):
            kept = a[i][valid]
            torch.testing.assert_close(kept, b[i][: len(kept)], rtol=1e-5, atol=1e-6, msg=str((key, i)))
            compared += 1
    assert compared
    dones = torch.cat([rollout["next", "episode_done"][..., 0] for rollout in ours], dim=1)
    assert torch.equal(~masked[:, 1:], dones[:, :-1]), "exactly one step after each episode end"
    assert dones.sum() > 20


@pytest.mark.parametrize("options", [{}, {"memory": "lstm"}])
@pytest.mark.parametrize("env_id", [SCRIPT, REACH, PARTS])
def test_steps_that_only_reset_are_invalid_and_all_others_are_those_of_single_environments(env_id, options):
    env = make_env(next_step(env_id), 3, seed=5)
    assert env.resets_late
    ours, _ = collect(env, deterministic=True, **options)
    assert all(rollout["next", "reward"].isfinite().all() for rollout in ours)
    assert all(rollout["action_log_prob"].isfinite().all() for rollout in ours), (
        "the last mask allows nothing"
    )
    single, _ = collect(make_env(env_id, 3, seed=5), deterministic=True, **options)
    if env_id == PARTS:  # the policy acts on the final observation, and needs a mask that allows an action
        columns = mask_columns(env.agent_specs[0])
        for following in (rollout["next"] for rollout in (*ours, *single)):
            over = following["episode_done"].squeeze(-1)
            assert (following["observation"][..., columns][over] == 1).all()
    require_same_valid_steps(ours, single)


def test_statistics_sums_and_memory_leave_out_the_steps_that_only_reset(monkeypatch):
    """A constant noise is the same for valid steps; with one environment, statistics have one order."""
    monkeypatch.setattr(MLPAgent, "noise", lambda self, shape, generator: torch.full((*shape, 3), 0.5))
    options = {"norm_obs": True, "memory": "lstm"}
    scaler = RewardScaler(0.99)
    ours, agent = collect(make_env(next_step(SCRIPT), 1, seed=5), scaler=scaler, **options)
    valid = sum(int(rollout["weight"].sum()) for rollout in ours)
    same = RewardScaler(0.99)
    # The length of rollouts decides when memories are stored, and nothing else.
    single, other = collect(make_env(SCRIPT, 1, seed=5), 1, valid, scaler=same, **options)
    require_same_valid_steps(ours, single)
    assert 0 < scaler.count == valid < 4 * 40
    torch.testing.assert_close(scaler.std, same.std)
    assert not ours[-1]["next", "episode_done"][0, -1], "or the last reset is to come"
    assert agent.normalizer.count == other.normalizer.count
    torch.testing.assert_close(agent.normalizer.std, other.normalizer.std)


def test_advantages_and_the_update_of_a_memory_are_those_of_single_environments():
    """In one rollout, an LSTM's log-probabilities are recomputed, and advantages of whole episodes agree."""
    env = make_env(next_step(SCRIPT), 3, seed=5)
    ours, agent = collect(env, 1, 120, deterministic=True, memory="lstm")
    single, _ = collect(make_env(SCRIPT, 3, seed=5), 1, 120, deterministic=True, memory="lstm")
    module = RecurrentPPO(num_minibatches=1)
    module.agent = agent
    recomputed, stored = log_probs_again(module.agent, ours[0])
    torch.testing.assert_close(recomputed, stored)
    found = [module.advantages(rollouts[0].copy()) for rollouts in (ours, single)]
    for i in range(3):
        ends = found[0]["next", "episode_done"][i, :, 0].nonzero().flatten()
        whole = found[0]["weight"][i][: ends[-1] + 1].nonzero().flatten()
        for key in ("advantage", "value_target"):
            a, b = found[0][key][i, whole, 0], found[1][key][i, : len(whole), 0]
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("ppo", [PPO, RecurrentPPO])
@pytest.mark.parametrize("env_id", [SCRIPT, PARTS])
def test_environments_that_reset_at_the_next_step_train(fit, ppo, env_id, recwarn):
    memory = "lstm" if ppo is RecurrentPPO else None

    class Recorded(Recorder, ppo):
        pass

    agent = functools.partial(MLPAgent, norm_obs=True, memory=memory, shared=memory is not None)
    model = {"agent": agent, "norm_reward": True, "num_minibatches": 2, "update_epochs": 2}
    module = fit(SMALL | {"env_id": next_step(env_id)}, model, ppo=Recorded, limit_val_batches=1)
    minibatches = [minibatch for epoch in module.epochs for minibatch in epoch]
    assert len(minibatches) == 2 * 2 * 2
    assert all((minibatch["weight"] == 0).any() for minibatch in minibatches)
    assert all(minibatch["weight"].mean() == pytest.approx(1) for minibatch in minibatches)
    assert not [warning for warning in recwarn if "log-probabilities" in str(warning.message)]
    results = module.trainer.callback_metrics
    assert results["charts/episodic_length"] <= 6, "the lengths of Script and Parts"
    assert results["eval/episodic_length_max"] <= 6
    assert results["losses/explained_variance"].isfinite()


def test_checkpoints_cannot_count_optimizer_steps_that_vary(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=16)
    with pytest.raises(ConfigError, match=r"VectorEnv with AutoresetMode.NEXT_STEP"):
        fit(SMALL | {"env_id": next_step(SCRIPT)}, callbacks=[callback], enable_checkpointing=True)


# Ids, seeds, numbers and arguments


class LateCartPole(CartPoleVectorEnv):
    """A vectorized environment that the package does not know."""


def test_an_id_with_a_vectorized_environment_trains(fit):
    """Its ``reset`` refuses a list of seeds, so that the first one counts, and resets at the next step."""
    if "OnlyVector-v0" not in gym.registry:
        gym.register("OnlyVector-v0", vector_entry_point=LateCartPole, max_episode_steps=20)
    env = make_env("OnlyVector-v0", 2, "vectorized", seed=4)
    assert env.resets_late
    expected = gym.make_vec("CartPole-v1", 2).reset(seed=derive_seed(4, "train"))[0]
    assert np.array_equal(env.reset_arrays(), expected)
    module = fit(SMALL | {"env_id": "OnlyVector-v0", "backend": "vectorized"}, limit_val_batches=1)
    assert module.trainer.callback_metrics["charts/episodic_length"] <= 20
    with pytest.raises(ConfigError, match=r"data.env_kwargs does not fit env_id 'OnlyVector-v0'.*'wind'"):
        make_env("OnlyVector-v0", 2, "vectorized", env_kwargs={"wind": 1})
    with pytest.raises(ConfigError, match=r"'OnlyVector-v0' is not an environment .*entry_point"):
        make_env("OnlyVector-v0", 2)


def test_a_function_gets_what_its_parameters_name():
    calls = []

    def make(num_envs, first_env, *, seed, gravity=10.0, **others):
        calls.append((num_envs, first_env, seed, gravity, others))
        return gym.make_vec("CartPole-v1", num_envs)

    factory = EnvFactory(make, env_kwargs={"gravity": 9.0})
    factory.make(3, seed=7, first_env=6)
    factory.make(2, seed=7, stream="eval")
    EnvFactory(functools.partial(make, seed=5), env_kwargs={"first_env": 1}).make(2)
    assert calls == [
        (3, 6, derive_seed(7, "train", 6), 9.0, {}),
        (2, 0, derive_seed(7, "eval", 0), 9.0, {}),
        (2, 1, 5, 10.0, {}),
    ]
    calls.clear()

    def make_one(num_envs, seed):
        calls.append((num_envs, seed))
        return gym.make("CartPole-v1")

    make_env(make_one, 1, seed=7)
    calls.clear()
    with pytest.warns(UserWarning, match=r"the same seed each time: leave the parameter out, reset\(seed="):
        make_env(make_one, 2, seed=7)
    assert calls == [(2, derive_seed(7, "train", 0))] * 2


def test_functions_of_batched_torchrl_environments_get_them_too(fit):
    made = []

    def make(num_envs, seed):
        made.append(SerialEnv(num_envs, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)))
        return made[-1]

    module = fit(SMALL | {"env_id": make}, limit_val_batches=1)
    assert module.env_steps == 192
    # As Lightning does, which takes no second batch from a loader of length 1.
    batches = iter(EvaluationLoader(EnvFactory(make), module.agent, Shard.whole(3, seed=1)))
    assert next(batches).batch_size == (3,)
    assert made[-1].is_closed


def test_keyword_arguments_without_a_name_get_nothing():
    make_env(lambda **options: gym.make_vec("CartPole-v1", 2, **options), 2)


def test_evaluation_of_a_fixed_number_plays_this_number_with_different_seeds():
    def make():
        return vectorized()(4)

    played = []
    for rank_episodes, first_env in ((2, 0), (2, 2), (6, 4)):
        env = EnvFactory(make).make(rank_episodes, 1, first_env, stream="eval")
        played.append(env.reset_arrays()[:, 0].tolist())  # Script observes its seed
        assert env.num_envs == 4
        env.close()
    assert len({name for names in played for name in names}) == 12, "no rank repeats episodes of another"
    agent = MLPAgent(*EnvFactory(make).specs())
    (episodes,) = EvaluationLoader(EnvFactory(make), agent, Shard.whole(2, seed=1))
    assert episodes.batch_size == (4,)
    with pytest.raises(ConfigError, match=r"batch size \[4\], and \[2\] is needed"):
        EnvFactory(make).make(2)


class Shifted(gym.vector.VectorWrapper):
    """A wrapper that transforms all observations again at each reset."""

    resets = 0

    def reset(self, **options):
        self.resets += 1
        observation, info = self.env.reset(**options)
        return observation + self.resets, info


def test_the_reset_of_one_environment_leaves_the_observations_of_others():
    env = make_env(lambda num_envs: Shifted(vectorized()(num_envs)), 3, seed=5)
    before = env.reset_arrays().copy()
    after = env.reset_arrays(np.arange(3) == 1)
    assert np.array_equal((before == after).all(1), [True, False, True])


def test_the_same_environment_twice_is_refused():
    envs = vectorized()(2)
    factory = EnvFactory(lambda: envs)
    factory.make(2)
    with pytest.raises(ConfigError, match="makes the same SyncVectorEnv at each call"):
        factory.make(2, stream="eval")


# What a vectorized environment must return


class Changed(gym.vector.VectorWrapper):
    """A vectorized environment one of whose methods is another."""

    @property
    def unwrapped(self):
        return self


def wrapped(kind, mode=DISABLED, env_id=SCRIPT):
    return lambda num_envs: kind(vectorized(mode=mode, env_id=env_id)(num_envs))


def changed(mode=DISABLED, **methods):
    return wrapped(type("Changed", (Changed,), methods), mode)


def reset_all(self, *, seed=None, options=None):
    return self.env.reset(seed=seed)


def ends_twice(self, actions):
    observation, reward, *_ = self.env.step(actions)
    return observation, reward, np.arange(3) == 1, np.zeros(3, bool), {}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (changed(metadata={}), r"Changed has the metadata\['autoreset_mode'\] None: .*NEXT_STEP"),
        (changed(reset=reset_all), "Changed: reset.*reset_mask.* changed observations outside of the mask"),
        (vectorized(mode=AutoresetMode.SAME_STEP), "AutoresetMode.SAME_STEP: make it with"),
        (changed(NEXT_STEP, step=ends_twice), "Changed, step 2: an episode ended at the step"),
    ],
)
def test_what_is_no_vectorized_environment_ends_in_one_sentence(make, said):
    with pytest.raises(ConfigError, match=said):
        collect(make_env(make, 3, seed=5), 1)


NO_MASK = {"action_mask": np.zeros((3, 5), np.int8)}


@pytest.mark.parametrize("first", [1, 20])
@pytest.mark.parametrize(
    ("part", "change", "said", "env_id"),
    [
        (0, np.ravel, r"the batch of .* is an array of shape \(9,\)", SCRIPT),
        (0, lambda rows: [[0], [1, 2]], r"the batch of observations is \[\[0\], \[1", SCRIPT),
        (1, lambda rewards: rewards[:, None], r"the reward is .* \(3, 1\): .* 3 num", SCRIPT),
        (3, lambda truncated: False, "truncated is False: step.. must return 3 numbers", SCRIPT),
        (0, lambda rows: rows | NO_MASK, "its action_mask allows no action", PARTS),
        (0, lambda rows: {"kind": rows["kind"]}, "the batch of .* must be a dictionary with", PARTS),
    ],
)
def test_a_wrong_answer_at_any_step_ends_in_one_sentence(part, change, said, env_id, first):
    class Late(Changed):
        count = 0

        def step(self, actions):
            self.count += 1
            answer = list(self.env.step(actions))
            if self.count >= first:
                answer[part] = change(answer[part])
            return tuple(answer)

    with pytest.raises(ConfigError, match=f"^Late, step {first}: {said}"):
        collect(make_env(wrapped(Late, env_id=env_id), 3, seed=5), 1)


def test_an_integer_that_the_dtype_of_the_space_cannot_hold_ends_in_one_sentence():
    class Bytes(Changed):
        single_observation_space = gym.spaces.Box(0, 255, (3,), np.uint8)
        observation_space = gym.spaces.Box(0, 255, (3, 3), np.uint8)
        value = 253

        def reset(self, **options):
            return np.full((3, 3), self.value), self.env.reset(**options)[1]

        def step(self, actions):
            self.value += 1
            return np.full((3, 3), self.value), *self.env.step(actions)[1:]

    with pytest.raises(ConfigError, match=r"^Bytes, step 3: the observation has the value 256, which"):
        collect(make_env(wrapped(Bytes), 3, seed=5), 1)


def test_errors_of_the_environment_keep_their_type_and_name_it():
    with pytest.raises(ZeroDivisionError) as raised:
        collect(make_env(changed(step=lambda self, actions: 1 / 0), 3))
    assert any("Changed: step() raised this" in note for note in raised.value.__notes__)


@pytest.mark.integration
def test_a_dead_worker_ends_the_run_without_a_hang():
    env = make_env(vectorized(AsyncVectorEnv, NEXT_STEP), 2)
    env.reset_arrays()
    env.envs.processes[1].kill()
    env.envs.processes[1].join()
    with pytest.raises((EOFError, OSError)):
        env.step_arrays(np.zeros(2, np.int64))
    env.close()
    assert not any(process.is_alive() for process in env.envs.processes)


def test_transforms_do_not_count_the_steps_that_only_reset(fit):
    with pytest.raises(ConfigError, match=r"data.transforms do not work with a vectorized environment"):
        fit(SMALL | {"env_id": next_step(SCRIPT), "transforms": [StepCounter(3)]})
    fit(SMALL | {"env_id": vectorized(), "transforms": [StepCounter(1)]})


@pytest.mark.parametrize("env_id", ["Taxi-v4", "ppo_lightning.envs.tasks:Locks-v0"])
def test_masks_in_the_info_or_a_method_are_refused(env_id):
    with pytest.raises(ConfigError, match="action_mask is in the info or a method: it must be an entry"):
        make_env(vectorized(env_id=env_id), 2).reset_arrays()


def test_a_video_shows_the_first_environment(tmp_path):
    def make(num_envs, render_mode=None):
        return gym.make_vec("CartPole-v1", num_envs, render_mode=render_mode, max_episode_steps=5)

    agent = MLPAgent(*EnvFactory(make).specs())
    assert record_video(agent, EnvFactory(make), tmp_path / "video.gif", episodes=2) == [5.0, 5.0]
    with pytest.raises(ConfigError, match=r"batch size \[2\], and \[1\] is needed"):
        record_video(agent, EnvFactory(lambda: make(2)), tmp_path / "video.gif")
