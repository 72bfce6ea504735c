"""Random Network Distillation: two streams of rewards, novelty, its statistics and its checkpoints."""

import functools

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import InitTracker

from ppo_lightning import PPO, RND, CNNAgent, ConfigError, MLPAgent
from ppo_lightning.algorithms import losses
from ppo_lightning.algorithms.rnd import Curiosity, endless_gae, random_rollouts
from ppo_lightning.models import normalizers
from ppo_lightning.models.normalizers import Moments, merge_rows
from tests.helpers import Recorder, SaveAfter

SMALL = {"num_envs": 2, "num_steps": 16, "total_timesteps": 2 * 16 * 3}
COUNTER = SMALL | {"env_id": "Counter-v0"}
MODEL = {
    "num_minibatches": 2,
    "update_epochs": 2,
    "num_iterations_obs_norm_init": 2,
    "learning_rate": 1e-3,
    "agent": functools.partial(MLPAgent, hidden_sizes=(16,)),
}
PIXELS = {"env_id": "ALE/Breakout-v5", "env_kwargs": {"screen_size": 36}}


class RecordedRND(Recorder, RND):
    """Recorder that keeps the count at the start, and names parameters without a gradient."""

    def on_train_start(self):
        super().on_train_start()
        self.missing = set()
        self.count = self.curiosity.normalizer.count.item()

    def update(self, minibatches):
        metrics = super().update(minibatches)
        self.missing |= {name for name, p in self.named_parameters() if p.requires_grad and p.grad is None}
        return metrics


@pytest.fixture
def constant_novelty(monkeypatch):
    """Give every step an intrinsic reward of 1, and every observation an intrinsic value of 10."""
    monkeypatch.setattr(Curiosity, "error", lambda self, observation: torch.ones(len(observation)))
    monkeypatch.setattr(Curiosity, "reward_std", lambda self, *sums: torch.tensor(1.0))
    monkeypatch.setattr(RND, "int_value", lambda self, observation, action: torch.full((len(action),), 10.0))


# Two streams


@pytest.mark.parametrize(
    ("reward", "values", "gammas", "valid", "expected"),
    [
        *(([1] * 7, [10] * 8, (0.9, each), None, [10] * 7) for each in (0, 0.5, 1)),  # 1 + 0.9 + 0.81 + ...
        ([0] * 4, [0] * 4 + [1], (0.5, 1), None, [0.0625, 0.125, 0.25, 0.5]),  # the value after the rollout
        # The stream stops before an invalid step: its value counts, and its return does not.
        ([1] * 5, [0, 0, 7, 0, 0, 0], (1, 1), [True, True, False, True, True], [9, 8, None, 2, 1]),
    ],
)
def test_the_targets_of_the_stream_without_ends(reward, values, gammas, valid, expected):
    reward, values = (torch.tensor([numbers], dtype=torch.float64) for numbers in (reward, values))
    weight = None if valid is None else torch.tensor([valid]).double()
    advantage, target = endless_gae(reward, values[:, :-1], values[:, -1], *gammas, weight)
    counts = [number is not None for number in expected]
    assert target[0, counts].tolist() == pytest.approx([x for x in expected if x is not None], abs=1e-12)
    torch.testing.assert_close(advantage, target - values[:, :-1])


def test_the_extrinsic_stream_ends_with_the_episode_and_the_intrinsic_one_does_not(fit, constant_novelty):
    data = COUNTER | {"env_kwargs": {"terminate_at": 4}, "total_timesteps": 32}
    module = fit(data, MODEL | {"gae_lambda": 1.0, "gamma": 1.0, "int_gamma": 0.9}, ppo=RecordedRND)
    rollout = module.rollouts[0]
    assert rollout["next", "terminated"].sum() == 8
    steps_left = torch.tensor([4.0, 3, 2, 1]).repeat(2, 4)
    torch.testing.assert_close(rollout["value_target"].squeeze(-1), steps_left)
    torch.testing.assert_close(rollout["int_value_target"], torch.full((2, 16), 10.0))
    # At episode ends, the networks get the final observation, which no step acts on.
    assert rollout["novelty_input"][0, :6, 0].tolist() == [1, 2, 3, 4, 1, 2]


def test_the_advantage_is_the_weighted_sum_of_both(fit, monkeypatch):
    """The extrinsic advantages are those of PPO, the intrinsic ones those of the stream without ends."""
    both = []
    gae = losses.gae
    monkeypatch.setattr(losses, "gae", lambda *args: both.append(gae(*args)) or both[-1])
    weights = {"ext_coef": 3.0, "int_coef": 0.5}
    module = fit(SMALL | {"total_timesteps": 32}, MODEL | weights, ppo=RecordedRND)
    (extrinsic, _), (internal, int_target) = both
    assert internal.abs().max() > 1e-4
    torch.testing.assert_close(
        module.rollouts[0]["advantage"].squeeze(-1), torch.lerp(6 * extrinsic, internal, 0.5)
    )
    torch.testing.assert_close(module.rollouts[0]["int_value_target"], int_target)
    expected = PPO.advantages(module, module.rollouts[0].clone())["value_target"]
    torch.testing.assert_close(module.rollouts[0]["value_target"], expected, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("num_steps", "last_time"), [(15, 2.0), (16, 0.0)])
def test_intrinsic_values_are_of_the_observations_on_which_the_agent_acts(fit, overlap, num_steps, last_time):
    """The head reads the features of the value function. After the rollout, a new episode may have begun."""
    seen = []

    class Values(RND):
        def int_value(self, observation, action):
            seen.append(observation.clone())
            return super().int_value(observation, action)

    data = COUNTER | {"env_kwargs": {"terminate_at": 4}, "num_steps": num_steps, "overlap": overlap}
    module = fit(data | {"total_timesteps": 4 * num_steps}, MODEL | {"learning_rate": 1e-12}, ppo=Values)
    *_, stored, last = seen
    assert stored[:, 0].max() == 3.0
    assert last.flatten().tolist() == [last_time] * 2
    features = module.agent.critic_body(last)
    value = module.int_value(last, torch.zeros(2, dtype=torch.int64))
    torch.testing.assert_close(value, module.curiosity.critic(features).squeeze(-1))


@pytest.fixture(scope="module")
def module(fit_once):
    """Return the module of a finished run, which tests leave as it is."""
    return fit_once(SMALL, MODEL | {"vf_coef": 0.25}, ppo=RecordedRND)


def test_every_parameter_has_a_gradient(module):
    assert not module.missing
    names = {name for name, p in module.named_parameters() if not p.requires_grad}
    assert names and all(name.startswith("curiosity.target.") for name in names)
    optimized = {id(p) for group in module.trainer.optimizers[0].param_groups for p in group["params"]}
    assert optimized == {id(p) for p in module.parameters() if p.requires_grad}


def test_the_total_loss_is_that_of_ppo_and_two_more_and_the_intrinsic_value_is_not_clipped(module):
    minibatch = module.epochs[-1][0]
    evaluation = module.evaluate(minibatch)
    loss, parts = module.loss(minibatch, evaluation)
    expected = PPO.loss(module, minibatch, evaluation)[0] + 0.25 * parts["int_value_loss"] + parts["fwd_loss"]
    torch.testing.assert_close(loss, expected)
    value = module.int_value(minibatch["observation"], minibatch["action"])
    target = minibatch["int_value_target"] + 100
    far = module.loss(minibatch | {"int_value_target": target}, evaluation)[1]["int_value_loss"]
    torch.testing.assert_close(far, torch.nn.functional.mse_loss(value, target) / 2)


def test_the_losses_of_a_minibatch_with_weights_are_those_of_its_valid_rows(module):
    minibatch = module.epochs[-1][0]
    valid = torch.arange(len(minibatch["action"])) % 4 > 0
    alone = {key: rows[valid] for key, rows in minibatch.items()}
    weighted = minibatch | {"weight": valid * 4 / 3}
    expected, found = (module.loss(rows, module.evaluate(rows)) for rows in (alone, weighted))
    torch.testing.assert_close(found, expected)
    assert expected[1]["fwd_loss"] > 0 and expected[1]["int_value_loss"] > 0


# Intrinsic rewards


@pytest.fixture
def curiosity():
    torch.manual_seed(0)
    return Curiosity(Unbounded((3,)), critic_features=4)


def module_of(curiosity, num_envs):
    module = RND(int_gamma=0.9)
    module.curiosity, module.sums = curiosity, {"discounted": torch.zeros(num_envs, dtype=torch.float64)}
    return module


def fake_rollout(observations, **keys):
    """Return a rollout [N, T] whose next observations are given, [N, T, D]."""
    shape = observations.shape[:2]
    done = torch.zeros(*shape, 1, dtype=torch.bool)
    step_count = torch.arange(1, shape[1] + 1).expand(shape).unsqueeze(-1)
    following = TensorDict({"observation": observations, "done": done, "step_count": step_count}, shape)
    before = torch.cat([torch.zeros_like(observations[:, :1]), observations[:, :-1]], dim=1)
    return TensorDict({"observation": before, "next": following, **keys}, shape)


def test_rewards_are_errors_divided_by_the_deviation_of_all_their_sums_so_far(curiosity):
    module, observations = module_of(curiosity, 2), 3 + 10 * torch.randn(2, 2, 5, 3)
    sums, total = [], np.zeros(2)
    for observation in observations:
        before = curiosity.error(observation.flatten(0, 1))
        rollout = fake_rollout(observation)
        rollout["next", "done"][:, 2] = True  # the sums go on
        scaled = module.int_rewards(rollout, microbatch_size=4)
        torch.testing.assert_close(rollout["int_reward"].flatten(), before.detach())
        assert (curiosity.error(observation.flatten(0, 1)) - before).abs().max() > 0.01, "new statistics"
        for t in range(5):
            total = 0.9 * total + rollout["int_reward"][:, t].numpy()
            sums += total.tolist()
        np.testing.assert_allclose(scaled, rollout["int_reward"] / np.std(sums), rtol=1e-4)
    assert curiosity.reward_moments.count == 20
    assert rollout["int_reward"].min() > 0
    mean = observations.flatten(0, 2).double().mean(0)
    torch.testing.assert_close(curiosity.normalizer.mean, mean, atol=1e-6, rtol=1e-6)


def test_invalid_steps_have_no_reward_and_enter_no_statistics(curiosity):
    valid = torch.tensor([[True, True, False, True]])
    observation = torch.randn(1, 4, 3)
    observation[0, 2] = 1e6
    rollout = fake_rollout(observation, weight=valid.float())
    scaled = module_of(curiosity, 1).int_rewards(rollout, microbatch_size=100)
    assert (scaled[0] > 0).tolist() == valid[0].tolist()
    assert curiosity.normalizer.count == curiosity.reward_moments.count == 3
    assert curiosity.normalizer.mean.abs().max() < 10


def test_the_episode_reward_is_the_sum_along_the_episode(fit, constant_novelty):
    """Episodes of 5 steps in rollouts of 3 steps; the scaled rewards would give another number."""
    data = COUNTER | {"env_kwargs": {"terminate_at": 5}, "num_steps": 3}
    for rollouts, ended in ((1, False), (2, True), (3, False), (4, True)):
        module = fit(data | {"total_timesteps": 6 * rollouts}, MODEL, ppo=RND)
        metrics = module.trainer.callback_metrics
        # Lightning keeps the values of earlier rollouts.
        assert ("charts/episode_curiosity_reward" in metrics) == (ended or rollouts > 2)
        if rollouts > 1:
            assert metrics["charts/episode_curiosity_reward"] == 5


# Statistics and networks


ACTIONS = Categorical(3, shape=())
PARTS = Composite(kind=Categorical(3, shape=()), place=Unbounded((2, 2)))


def picture(channels):
    return Unbounded((channels, 36, 36), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("spec", "agent", "shape"),
    [
        (Unbounded((5,)), MLPAgent, (5,)),
        (PARTS, MLPAgent, (5,)),
        (picture(4), CNNAgent, (1, 36, 36)),
        (picture(2), CNNAgent, (1, 36, 36)),
        (picture(3), CNNAgent, (3, 36, 36)),
        (picture(6), CNNAgent, (3, 36, 36)),
        (picture(12), CNNAgent, (3, 36, 36)),  # four frames in colours
    ],
)
def test_the_networks_fit_the_observations(spec, agent, shape):
    made = agent(spec, ACTIONS)
    curiosity = Curiosity(spec, made.critic.in_features)
    assert curiosity.shape == shape
    stored = torch.rand(2, 3, *(spec.shape if isinstance(spec, Unbounded) else (5,)))
    seen = curiosity.view((255 * stored).to(getattr(spec, "dtype", None) or torch.float32))
    last_frame = ((255 * stored).to(seen.dtype))[:, :, -shape[0] :]
    assert seen.shape == (2, 3, *shape) and torch.equal(seen, last_frame)
    assert curiosity.error(seen.flatten(0, 1)).shape == (6,)
    assert curiosity.value(torch.zeros(6, made.critic.in_features)).shape == (6,)


def test_values_of_novelty_start_near_0_and_hidden_layers_keep_the_scale():
    curiosity = Curiosity(Unbounded((5,)), critic_features=64)
    assert curiosity.critic.weight.norm().item() == pytest.approx(0.01)
    assert curiosity.critic.bias.item() == 0
    first = curiosity.target[0].weight
    torch.testing.assert_close(first.T @ first, 2 * torch.eye(5), atol=1e-5, rtol=0)


def test_networks_for_rows_bend_away_from_the_mean():
    """Without biases they are linear along rays, and the predictor extrapolates to places it never saw."""
    torch.manual_seed(0)
    target = Curiosity(Unbounded((2,)), critic_features=8).target
    near, far = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 2.0]])
    bend = (target(torch.zeros(1, 2)) + target(far) - 2 * target(near)).square().mean()
    assert bend > 0.01 * target(near).square().mean()


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
@pytest.mark.parametrize("part", [1, 7, 1000])
def test_rows_are_merged_part_by_part(monkeypatch, shape, part):
    monkeypatch.setattr(normalizers, "PART", part)
    rows = torch.randn(23, *shape) * 5 + 3
    moments = Moments(shape)
    for rows_of_rollout in rows.split([10, 0, 13]):
        merge_rows(moments, rows_of_rollout)
    assert moments.count == 23
    np.testing.assert_allclose(moments.mean, rows.double().mean(0), rtol=1e-9)
    np.testing.assert_allclose(moments.m2 / 23, rows.double().var(0, correction=0), rtol=1e-9)


def test_bytes_are_merged_as_numbers():
    moments = Moments((1,))
    merge_rows(moments, torch.tensor([[255], [0], [255], [0]], dtype=torch.uint8))
    assert moments.mean.item() == 127.5
    assert moments.m2.item() == 4 * 127.5**2


def test_the_statistics_begin_with_random_steps_in_environments_of_their_own(fit, module):
    assert module.count == 2 * 32
    assert module.curiosity.normalizer.count == (2 + 3) * 32
    assert (module.rollouts_done, module.env_steps) == (3, (2 + 3) * 32)
    without = fit(SMALL, MODEL | {"num_iterations_obs_norm_init": 0}, ppo=RecordedRND)
    assert without.count == 0
    assert torch.equal(without.rollouts[0]["observation"], module.rollouts[0]["observation"])


def test_the_time_left_is_unknown_after_random_steps(fit):
    class Estimates(RND):
        def on_train_epoch_start(self):
            self.left = self.progress.seconds_left(100)

    assert fit(SMALL, MODEL, ppo=Estimates).left is None


def test_random_steps_are_uniform_and_leave_the_agent_alone(fit):
    def stubborn(*specs):
        agent = MLPAgent(*specs)
        torch.nn.init.constant_(agent.head.linear.bias[:1], 50.0)  # always the first action
        return agent

    class Random(RecordedRND):
        def on_train_start(self):
            super().on_train_start()
            before = {key: value.clone() for key, value in self.agent.state_dict().items()}
            self.random = [rollout.clone() for rollout in random_rollouts(self.data, self.agent, 20)]
            assert all(torch.equal(before[key], value) for key, value in self.agent.state_dict().items())

    module = fit(SMALL | {"total_timesteps": 32}, MODEL | {"agent": stubborn}, ppo=Random)
    actions = torch.cat([rollout["action"].flatten() for rollout in module.random])
    assert 0.4 < actions.float().mean() < 0.6, "CartPole has two actions"
    first, random = (rollout["observation"][:, 0] for rollout in (module.rollouts[0], module.random[0]))
    assert (random != first).all()


def test_observations_are_clipped_to_5_deviations():
    curiosity = Curiosity(Unbounded((2,)), critic_features=4)
    curiosity.observe(torch.tensor([[[10.0, 0.0], [20.0, 2.0]]]))
    far = torch.tensor([[40.0, 6.0], [4e6, 6e6], [15.0, 1.0]])
    assert curiosity.normalizer(far).tolist() == [[5.0, 5.0], [5.0, 5.0], [0.0, 0.0]]
    errors = curiosity.error(far)
    assert errors[0] == errors[1] != errors[2]


def test_the_error_falls_where_the_agent_was(fit):
    data = COUNTER | {"env_kwargs": {"terminate_at": 4}, "total_timesteps": 32 * 40}
    module = fit(data, MODEL | {"update_epochs": 4}, ppo=RecordedRND)
    with torch.no_grad():
        error = {place: module.curiosity.error(torch.tensor([[place]])).item() for place in (1.0, 4.0, 8.0)}
    assert module.rollouts[0]["int_reward"].mean() > 100 * error[1.0]
    assert error[8.0] > 50 * error[4.0]


def test_the_predictor_learns_from_a_share_of_the_steps_drawn_in_each_epoch(fit):
    data = SMALL | {"num_steps": 512, "total_timesteps": 1024}
    module = fit(data, MODEL | {"update_proportion": 0.25, "update_epochs": 3}, ppo=RecordedRND)
    weights = [torch.cat([minibatch["novelty_weight"] for minibatch in epoch]) for epoch in module.epochs]
    steps = [torch.cat([minibatch["observation"] for minibatch in epoch]) for epoch in module.epochs]
    for epoch in weights:
        assert epoch.unique().tolist() == [0.0, 4.0]
        assert epoch.mean() == pytest.approx(1, abs=0.25)
    chosen = [set(map(tuple, step[weight > 0].tolist())) for step, weight in zip(steps, weights, strict=True)]
    assert len(chosen[0] & chosen[1]) < 0.5 * len(chosen[0]), "a fresh draw"
    minibatch = module.epochs[0][0]
    evaluation = module.evaluate(minibatch)
    nothing = minibatch | {"novelty_weight": torch.zeros(512)}
    assert module.loss(nothing, evaluation)[1]["fwd_loss"] == 0
    whole = minibatch | {"novelty_weight": torch.ones(512)}
    expected = module.curiosity.error(minibatch["novelty_input"]).mean()
    torch.testing.assert_close(module.loss(whole, evaluation)[1]["fwd_loss"], expected.detach())


@pytest.mark.parametrize(
    ("data", "agent"),
    [
        ({"env_id": "Reach-v0"}, functools.partial(MLPAgent, norm_obs=True)),
        ({"env_id": "Pendulum-v1"}, functools.partial(MLPAgent, head="tanh_gaussian")),
        ({"env_id": "CartPole-v1"}, functools.partial(MLPAgent, shared=True)),
        ({"env_id": "Parts-v0"}, MLPAgent),  # a mask, choices, and an action of two parts
        ({"env_id": "Parts-v0"}, functools.partial(MLPAgent, actor_keys=["kind"])),
        ({"transforms": [InitTracker()]}, functools.partial(MLPAgent, norm_obs=True)),
        ({"env_id": "MiniGrid-Empty-5x5-v0", "backend": "envpool"}, functools.partial(MLPAgent, shared=True)),
        pytest.param(PIXELS, CNNAgent, marks=pytest.mark.integration),
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_rnd_trains_each_kind_of_agent(fit, data, agent, precision):
    model = MODEL | {"agent": agent, "norm_reward": True}
    module = fit(SMALL | {"total_timesteps": 64} | data, model, ppo=RecordedRND, precision=precision)
    assert not module.missing
    assert abs(module.metrics[0]["approx_kl"]) < 1e-6
    assert all(value.isfinite() for metrics in module.metrics for value in metrics.values())
    assert module.rollouts[0]["int_reward"].min() > 0
    if data == PIXELS:  # seen as their last frame, as bytes
        rollout = module.rollouts[0]
        assert torch.equal(rollout["novelty_input"], rollout["next", "observation"][:, :, 3:])
        assert module.epochs[0][0]["novelty_input"].dtype == torch.uint8
        assert module.curiosity.shape == module.curiosity.normalizer.mean.shape == (1, 36, 36)


@pytest.mark.parametrize(
    "options",
    [{"microbatch_size": 4}, pytest.param({"compile": True}, marks=pytest.mark.integration)],
    ids=str,
)
def test_microbatches_and_a_compiled_loss_give_the_same_update(fit, options):
    expected, found = (fit(SMALL, MODEL | model, ppo=RND).state_dict() for model in ({}, options))
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-3)


# Runs and checkpoints


@pytest.mark.parametrize(
    ("data", "model"),
    [
        ({}, {}),
        ({}, {"norm_reward": True}),
        pytest.param(PIXELS, {"agent": CNNAgent}, marks=pytest.mark.integration),
    ],
    ids=str,
)
def test_a_resumed_run_ends_as_the_uninterrupted_one_to_the_bit(fit_and_resume, data, model):
    data = SMALL | {"total_timesteps": 32 * 13} | data
    whole, resumed = fit_and_resume(11, data, MODEL | model, ppo=RND)
    for name in ("discounted", "episode"):
        assert torch.equal(whole.sums[name], resumed.sums[name]) and whole.sums[name].abs().max() > 0


def test_a_resumed_run_with_fresh_episodes_starts_their_sums_again(fit, tmp_path, constant_novelty):
    data = COUNTER | {"env_kwargs": {"terminate_at": 20}}
    fit(data, MODEL, ppo=RND, callbacks=[SaveAfter(tmp_path / "middle.ckpt", 1)])
    resumed = fit(data, MODEL, ppo=RND, ckpt_path=tmp_path / "middle.ckpt")
    assert resumed.trainer.callback_metrics["charts/episode_curiosity_reward"] == 20, "not 36"


def test_a_second_fit_keeps_the_networks_and_starts_with_sums_of_zero(fit, tmp_path, make_trainer):
    class Starting(RecordedRND):
        def on_train_start(self):
            super().on_train_start()
            self.started_with = self.sums["discounted"].clone()

    fit(SMALL, MODEL, ppo=Starting, callbacks=[SaveAfter(tmp_path / "middle.ckpt", 1)])
    module = fit(SMALL, MODEL, ppo=Starting, ckpt_path=tmp_path / "middle.ckpt")
    assert module.started_with.min() > 0
    count = module.curiosity.normalizer.count.item()
    make_trainer().fit(module, module.trainer.datamodule)
    assert module.started_with.tolist() == [0, 0]
    assert module.count == count, "no random steps"
    assert module.curiosity.normalizer.count == count + 3 * 32


def test_a_checkpoint_has_networks_and_statistics_and_predicts(fit, tmp_path, make_trainer):
    path = tmp_path / "end.ckpt"
    module = fit(SMALL | {"eval_episodes": 2}, MODEL, ppo=RND, callbacks=[SaveAfter(path, 3)])
    state = torch.load(path, weights_only=True)["state_dict"]
    observation = torch.randn(3, 4)
    loaded = RND.load_from_checkpoint(path)
    assert torch.equal(loaded.predict(observation), module.predict(observation))
    trainer = make_trainer(limit_val_batches=1)
    trainer.validate(RND(**MODEL), module.trainer.datamodule, ckpt_path=path)
    assert "eval/episodic_return" in trainer.callback_metrics
    for name, value in trainer.lightning_module.state_dict().items():
        assert torch.equal(state[name], value), f"{name}: validation needs no random steps"
    trainer.save_checkpoint(tmp_path / "validated.ckpt")
    data = SMALL | {"total_timesteps": 32 * 5}
    assert fit(data, MODEL, ppo=RND, ckpt_path=tmp_path / "validated.ckpt").rollouts_done == 5


def test_a_checkpoint_of_another_algorithm_is_refused(fit, tmp_path):
    path = tmp_path / "ppo.ckpt"
    ppo = {key: value for key, value in MODEL.items() if key != "num_iterations_obs_norm_init"}
    fit(SMALL, ppo, callbacks=[SaveAfter(path, 3)])
    for load in (RND.load_from_checkpoint, lambda path: fit(SMALL, MODEL, ppo=RND, ckpt_path=path)):
        with pytest.raises(ConfigError, match="where the module has shape"):
            load(path)


@pytest.mark.parametrize(
    ("data", "model", "sentence"),
    [
        ({}, {"agent": lambda *specs: MLPAgent(*specs, memory="lstm", shared=True)}, "has a memory"),
        ({"env_id": "TicTacToe-v1", "backend": "envpool"}, {}, "whose players take turns"),
        ({}, {"update_proportion": 0.0}, "model.update_proportion is 0.0"),
    ],
)
def test_what_rnd_cannot_train_is_refused(fit, data, model, sentence):
    with pytest.raises(ConfigError, match=sentence):
        fit(SMALL | data, MODEL | model, ppo=RND)
