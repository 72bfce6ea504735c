"""Continuous actions: heads, running statistics, and clipping for the environment. Details 23 to 31."""

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchrl.data import Bounded, Unbounded
from torchrl.envs import Compose, InitTracker, TransformedEnv
from torchrl.envs.libs.gym import GymEnv

from ppo_lightning import PPO, ConfigError, MLPAgent, RolloutDataModule, evaluate, make_env
from ppo_lightning.errors import NonFiniteError
from ppo_lightning.models.heads import GaussianHead, TanhGaussianHead
from ppo_lightning.models.normalizers import (
    CollectorMoments,
    ObservationNormalizer,
    RewardScaler,
    merged,
    summary_of,
)
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.utils import collectives

VECTOR, ACTIONS = Unbounded(shape=(4,)), Bounded(-0.5, 0.5, shape=(2,), dtype=torch.float32)
REACH = {"env_id": "Reach-v0", "num_envs": 3, "num_steps": 16, "total_timesteps": 96, "eval_episodes": 2}


def agent_for(**options):
    torch.manual_seed(0)
    agent = MLPAgent(VECTOR, ACTIONS, **options)
    torch.nn.init.normal_(agent.head.linear.weight)
    torch.nn.init.normal_(agent.head.log_std, 0, 0.3)
    return agent


def reach(**kwargs):
    return make_env("Reach-v0", 3, seed=5, env_kwargs=kwargs)


# Heads


@pytest.mark.detail("23")
def test_gaussian_samples_have_the_mean_and_the_standard_deviation():
    head = GaussianHead(1, ACTIONS)
    torch.nn.init.constant_(head.linear.bias, 0.3)
    torch.nn.init.constant_(head.log_std, -1.0)
    action, _ = head.sample(torch.zeros(100_000, 1), head.noise((100_000,), torch.Generator().manual_seed(0)))
    torch.testing.assert_close(action.mean(0), torch.full((2,), 0.3), atol=0.01, rtol=0)
    torch.testing.assert_close(action.std(0), torch.full((2,), np.exp(-1.0)).float(), atol=0.01, rtol=0)


@pytest.mark.detail("24")
def test_the_standard_deviation_is_a_parameter_that_starts_at_1():
    head, noise = MLPAgent(VECTOR, ACTIONS).head, torch.ones(1, 2)
    assert torch.equal(head.log_std, torch.zeros(2))
    assert "log_std" in dict(head.named_parameters())
    for observation in (torch.zeros(1, 64), torch.ones(1, 64)):
        moved = head.sample(observation, noise)[0] - head.sample(observation, None)[0]
        torch.testing.assert_close(moved, noise)


def test_squashed_log_probabilities_are_finite_at_the_bounds():
    head = TanhGaussianHead(3, ACTIONS)
    for bound in (-0.5, 0.5):
        log_prob, *_ = head.evaluate(torch.zeros(1, 3), torch.full((1, 2), bound))
        assert log_prob.isfinite()
    action, log_prob = head.sample(torch.zeros(1, 3), torch.full((1, 2), 50.0))
    assert torch.equal(action, torch.full((1, 2), 0.5))
    assert torch.equal(head.evaluate(torch.zeros(1, 3), action)[0], log_prob)
    log_prob.sum().backward()
    assert head.log_std.grad.isfinite().all()


# Statistics


def test_moments_of_batches_are_those_of_the_data_together():
    data = np.random.default_rng(0).normal(1e4, 1e-2, (1000, 3))
    normalizer = ObservationNormalizer((3,))
    moments = CollectorMoments(normalizer, arrays=True)
    for batch in np.split(data, [1, 2, 50, 400]):
        moments.normalize([batch])
    moments.store()
    np.testing.assert_allclose(normalizer.mean, data.mean(0), rtol=1e-12)
    np.testing.assert_allclose((normalizer.m2 / normalizer.count).numpy(), data.var(0), rtol=1e-6)
    np.testing.assert_allclose(normalizer.std, np.sqrt(data.var(0) + 1e-8), rtol=1e-6)
    np.testing.assert_array_equal(moments.std, normalizer.std)


@pytest.mark.parametrize("arrays", [False, True])
def test_ranks_exchange_what_they_add_and_no_difference_of_totals(monkeypatch, arrays):
    """After 1e8 steps around 1e6, the difference of two totals has none of the digits of ten rows."""
    before = torch.tensor([[1e8] * 2, [1e6] * 2, [1e2] * 2], dtype=torch.float64)
    rows = torch.from_numpy(np.random.default_rng(0).normal(1e6, 1e-3, (2, 5, 2)))
    normalizer, given = ObservationNormalizer((2,)), []
    normalizer.store(before)
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    ranks = [CollectorMoments(normalizer, arrays) for _ in range(3)]
    for moments, own in zip(ranks, rows.numpy() if arrays else rows, strict=False):
        moments.normalize([own[:2], own[2:]])
    monkeypatch.setattr(collectives, "gather", lambda increment: given.append(increment) or increment[None])
    for moments in ranks:
        moments.store()
    for increment, own in zip(given, rows, strict=False):
        torch.testing.assert_close(increment, summary_of(own), rtol=1e-6, atol=0)
    assert not given[2].any(), "a rank without a counted row"
    expected = merged(before, summary_of(rows.flatten(0, 1)))
    torch.testing.assert_close(normalizer.summary, expected, rtol=1e-12, atol=0)


def test_statistics_keep_their_precision_and_change_nothing_before_any_data():
    normalizer = ObservationNormalizer((3,)).to(torch.bfloat16)
    assert normalizer.mean.dtype == normalizer.count.dtype == torch.float64
    observation = torch.tensor([[1.0, -2.0, 3.0]])
    assert torch.equal(normalizer(observation), observation)


@pytest.mark.detail("28")
@pytest.mark.detail("29")
def test_observations_are_normalized_by_the_statistics_up_to_each_step_and_clipped():
    """The reference is the moments of all observations so far, resets and final observations included."""
    agent, plain = agent_for(norm_obs=True), make_collector(reach(), agent_for(), 40, deterministic=True)
    agent.normalizer.clip = 1.5
    with torch.no_grad():  # actions independent of the observation
        for policy in (agent, plain.agent):
            policy.head.linear.weight.zero_()
    normalizing = make_collector(reach(), agent, 40, deterministic=True)
    normalizing.deterministic = False
    with torch.no_grad():
        agent.head.log_std.fill_(-100)
    raw, normalized = plain.rollout(), normalizing.rollout()
    torch.testing.assert_close(raw["action"], normalized["action"])
    shown = []

    def expect(values, rows, got):
        data = np.concatenate(shown)
        mean, std = data.mean(0), np.sqrt(data.var(0) + 1e-8)
        expected = torch.from_numpy(np.clip((values[rows] - mean) / std, -1.5, 1.5)).float()
        torch.testing.assert_close(got[rows], expected, atol=1e-5, rtol=1e-5)

    everyone, clipped = np.ones(3, bool), 0
    shown.append(raw["observation"][:, 0].double().numpy())
    for t in range(39):
        last = raw["next", "observation"][:, t].double().numpy()
        shown.append(last)
        done = raw["next", "done"][:, t, 0].numpy()
        expect(last, everyone, normalized["next", "observation"][:, t])
        following = raw["observation"][:, t + 1].double().numpy()
        if done.any():
            shown.append(following[done])
            expect(following, done, normalized["observation"][:, t + 1])
        followed, last = normalized["observation"][~done, t + 1], normalized["next", "observation"][~done, t]
        torch.testing.assert_close(followed, last)
        clipped += (normalized["observation"][:, t].abs() == 1.5).sum()
    assert clipped > 10
    assert agent.normalizer.count == 3 * 41 + int(raw["next", "done"].sum())


@pytest.mark.detail("30")
@pytest.mark.detail("31")
@pytest.mark.parametrize("limit", [None, 4])
def test_rewards_are_divided_by_the_std_of_the_discounted_return_and_clipped(limit):
    """The discounted return restarts at every episode end; a limit of 4 truncates nearly all episodes."""
    scaler = RewardScaler(gamma=0.8, clip=1.2)
    collector = make_collector(reach(max_episode_steps=limit), agent_for(), 50, reward_scaler=scaler)
    raw_sum, returns, running = np.zeros(3), [], np.zeros(3)
    for _ in range(2):
        rollout = collector.rollout()
        rewards = np.diff(rollout["next", "episode_reward"][..., 0].double(), axis=1, prepend=0)
        for t in range(50):
            total = rollout["next", "episode_reward"][:, t, 0].double().numpy()
            done = rollout["next", "done"][:, t, 0].numpy()
            reward, raw_sum = total - raw_sum, np.where(done, 0, total)
            running = 0.8 * running + reward
            returns.append(running)
            std = np.sqrt(np.concatenate(returns).var() + 1e-8)
            expected = torch.from_numpy(np.clip(reward / std, -1.2, 1.2)).float()
            torch.testing.assert_close(rollout["next", "reward"][:, t, 0], expected, atol=1e-4, rtol=1e-4)
            running = np.where(done, 0, running)
    assert rewards.any()
    assert (rollout["next", "reward"].abs() == torch.tensor(1.2)).any()
    assert scaler.count == 2 * 50 * 3


def test_the_reward_scaler_has_the_gamma_of_ppo():
    assert PPO(gamma=0.9, norm_reward=True).reward_scaler.gamma == 0.9
    assert PPO().reward_scaler is None


@pytest.mark.detail("27")
def test_the_environment_gets_the_clipped_action_and_the_rollout_keeps_the_unclipped():
    agent = agent_for()
    with torch.no_grad():
        agent.head.log_std.fill_(1.0)
    rollout = make_collector(reach(), agent, 30).rollout()
    received = rollout["next", "observation"][..., :2]  # alphabetical order: action, luck, time
    torch.testing.assert_close(received, rollout["action"].clamp(-0.5, 0.5))
    assert (rollout["action"].abs() > 0.5).float().mean() > 0.5
    log_prob, *_ = agent.evaluate(rollout["observation"].flatten(0, 1), rollout["action"].flatten(0, 1))
    torch.testing.assert_close(log_prob.reshape(3, 30), rollout["action_log_prob"], atol=1e-5, rtol=1e-5)


def test_the_tanh_head_scales_to_unequal_bounds_and_needs_bounds():
    spec = Bounded(torch.tensor([-1.0, -50.0]), torch.tensor([1.0, 50.0]), shape=(2,))
    with pytest.raises(ConfigError, match="unequal widths, from 2 to 100"):
        MLPAgent(VECTOR, spec)
    with pytest.raises(ConfigError, match="without finite bounds"):
        MLPAgent(VECTOR, Unbounded((2,)), head="tanh_gaussian")
    action = MLPAgent(VECTOR, spec, head="tanh_gaussian").act(torch.zeros(1, 4), torch.full((1, 2), 9.0))[0]
    torch.testing.assert_close(action, torch.tensor([[1.0, 50.0]]))


# In a run

TRAINED = {"norm_reward": True, "num_minibatches": 2, "agent": lambda o, a: MLPAgent(o, a, norm_obs=True)}


def test_evaluation_changes_nothing(fit, make_trainer):
    module = fit(REACH, TRAINED)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    assert before["agent.normalizer.count"] > 96 and before["reward_scaler.count"] == 96
    make_trainer(limit_val_batches=1.0).validate(module, RolloutDataModule(**REACH), verbose=False)
    evaluate(module.agent, TransformedEnv(reach(), Compose(InitTracker())))
    after = module.state_dict()
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value, after[key]), key


def test_an_evaluation_is_the_most_probable_actions_on_raw_observations(fit):
    """The statistics of training are used, and an evaluation does not update them."""
    agent = fit(REACH, TRAINED).agent
    with torch.no_grad():
        torch.nn.init.normal_(agent.head.linear.weight)  # so that the actions depend on the observation
    env, returns, playing = reach(), np.zeros(3), np.ones(3, bool)
    observation = env.reset_arrays()
    while playing.any():
        action = agent.mode(torch.tensor(observation, dtype=torch.float32))
        observation, reward, terminated, truncated, _ = env.step_arrays(action.numpy(force=True))
        returns += reward * playing
        done = terminated | truncated
        playing &= ~done
        observation = env.reset_arrays(done) if done.any() else observation
    np.testing.assert_allclose(evaluate(agent, reach())["episode_reward"], returns, rtol=1e-5)


@pytest.mark.parametrize("transforms", [None, [InitTracker()]], ids=["ours", "torchrl"])
@pytest.mark.parametrize("norm_obs", [True, False])
@pytest.mark.parametrize("broken", ["observation", "reward"])
def test_nonfinite_values_end_the_run_before_they_are_saved(fit, tmp_path, broken, norm_obs, transforms):
    data = REACH | {"env_kwargs": {"broken": broken, "break_at": 20}, "transforms": transforms}
    model = TRAINED | {"agent": lambda o, a: MLPAgent(o, a, norm_obs=norm_obs)}
    callback = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, save_on_exception=True)
    value = {"observation": "nan", "reward": "inf"}[broken]
    with pytest.raises(NonFiniteError, match=f"The {broken} of environment 0 is {value} at its step 19"):
        fit(data, model, callbacks=[callback], enable_checkpointing=True)
    saved = list(tmp_path.glob("*.ckpt"))
    assert saved
    for path in saved:
        for name, tensor in torch.load(path, weights_only=True)["state_dict"].items():
            assert tensor.isfinite().all(), (path, name)


def test_nonfinite_weights_are_not_saved(fit, tmp_path):
    module = fit(REACH, TRAINED)
    with torch.no_grad():
        module.agent.critic.bias.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"agent.critic.bias is not finite"):
        module.trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()


def test_double_precision_of_a_torchrl_environment_becomes_single(fit):
    module = fit(REACH | {"env_id": lambda: GymEnv("InvertedPendulum-v5")})
    assert module.env_steps == 96
    assert module.predict(torch.zeros(5, 4, dtype=torch.float64)).dtype == torch.float32
