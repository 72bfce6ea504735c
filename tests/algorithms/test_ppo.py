"""The PPO iteration: what training_step does, hyperparameter by hyperparameter."""

import csv
import functools
import threading

import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torchrl.envs import InitTracker

from ppo_lightning import PPO, ConfigError, MLPAgent, RolloutDataModule
from ppo_lightning.algorithms import losses, run_log
from ppo_lightning.algorithms.minibatches import split_epoch
from ppo_lightning.callbacks import Threads
from ppo_lightning.envs import EnvFactory
from tests.helpers import Recorder, weights

SMALL = {"num_envs": 4, "num_steps": 16, "total_timesteps": 4 * 16 * 5}


class RecordedPPO(Recorder, PPO):
    """Recorder that keeps the gradient norm and the clipping range of each minibatch."""

    def on_train_start(self):
        super().on_train_start()
        self.grad_norms, self.clip_coefs = [], []

    def update(self, minibatches):
        metrics = []
        for minibatch in minibatches:
            metrics += super().update([minibatch])
            grads = [parameter.grad.flatten() for parameter in self.agent.parameters()]
            self.grad_norms.append(torch.cat(grads).norm().item())
            self.clip_coefs.append(float(self.clip_coef))
        return metrics


@pytest.fixture
def module(fit):
    return fit(SMALL, {"vf_coef": 0.25, "ent_coef": 0.125}, ppo=RecordedPPO)


@pytest.mark.detail("6")
def test_each_epoch_visits_each_transition_once_in_a_fresh_order(fit):
    module = fit(SMALL, {"num_minibatches": 4, "update_epochs": 3, "norm_adv": False}, ppo=RecordedPPO)
    assert len(module.epochs) == 5 * 3
    orders = []
    for i, epoch in enumerate(module.epochs):
        rollout = module.rollouts[i // 3]
        assert [len(minibatch["advantage"]) for minibatch in epoch] == [16] * 4
        visited = torch.cat([minibatch["advantage"] for minibatch in epoch]).flatten()
        stored = rollout["advantage"].flatten()
        assert torch.equal(visited.sort().values, stored.sort().values)
        assert len(stored.unique()) == len(stored), "otherwise this test would not see a repetition"
        orders.append(torch.stack([(stored == v).nonzero()[0, 0] for v in visited]))
        for visit in orders[-1].view(4, 16):
            # Each minibatch has equally many steps of each environment.
            assert torch.bincount(visit // 16, minlength=4).tolist() == [4] * 4
    assert len({tuple(order.tolist()) for order in orders}) == len(orders)


@pytest.mark.parametrize(
    ("num_envs", "num_steps", "num_minibatches"), [(8, 5, 4), (1, 12, 4), (3, 4, 6), (2, 3, 1)]
)
def test_minibatches_of_any_divisible_size_partition_the_rollout(fit, num_envs, num_steps, num_minibatches):
    data = {"num_envs": num_envs, "num_steps": num_steps, "total_timesteps": num_envs * num_steps}
    module = fit(data, {"num_minibatches": num_minibatches, "update_epochs": 1}, ppo=RecordedPPO)
    visited = torch.cat([minibatch["observation"] for minibatch in module.epochs[0]])
    stored = module.rollouts[0]["observation"].flatten(0, 1)
    assert torch.equal(visited.sort(0).values, stored.sort(0).values)


@pytest.mark.detail("4")
def test_the_learning_rate_falls_linearly_by_one_step_an_iteration(fit):
    rates = fit(SMALL, {"learning_rate": 0.01}, ppo=RecordedPPO).learning_rates
    assert rates == pytest.approx([0.01, 0.008, 0.006, 0.004, 0.002])
    constant = fit(SMALL, {"learning_rate": 0.01, "anneal_lr": False}, ppo=RecordedPPO)
    assert constant.learning_rates == [0.01] * 5


@pytest.mark.detail("A1")
def test_the_clipping_range_falls_linearly_when_asked(fit):
    model = {"clip_coef": 0.2, "update_epochs": 1, "num_minibatches": 1}
    module = fit(SMALL, model | {"anneal_clip_coef": True}, ppo=RecordedPPO)
    assert module.clip_coefs == pytest.approx([0.2, 0.16, 0.12, 0.08, 0.04])
    assert fit(SMALL, model, ppo=RecordedPPO).clip_coefs == pytest.approx([0.2] * 5)


@pytest.mark.detail("3")
def test_adam_has_the_reference_epsilon(module):
    optimizer = module.optimizers().optimizer
    assert isinstance(optimizer, torch.optim.Adam)
    assert [group["eps"] for group in optimizer.param_groups] == [1e-5]
    assert len(optimizer.param_groups[0]["params"]) == 12, "one optimizer for everything"


@pytest.mark.detail("11")
def test_the_norm_of_all_gradients_together_is_clipped(fit):
    module = fit(SMALL, {"vf_coef": 100.0}, ppo=RecordedPPO)
    assert max(module.grad_norms) <= 0.5 * (1 + 1e-4)
    assert min(module.grad_norms) == pytest.approx(0.5, rel=1e-4), "the value loss always reaches the limit"
    assert max(fit(SMALL, {"vf_coef": 100.0, "max_grad_norm": 1e9}, ppo=RecordedPPO).grad_norms) > 5


@pytest.mark.detail("10")
def test_the_total_loss_weighs_its_parts(module):
    loss, parts = module.total_loss(module.rollouts[-1].flatten())
    expected = parts["policy_loss"] + 0.25 * parts["value_loss"] - 0.125 * parts["entropy"]
    torch.testing.assert_close(loss, expected)
    assert loss.requires_grad and not any(part.requires_grad for part in parts.values())


@pytest.mark.detail("7")
def test_the_advantages_of_each_minibatch_are_normalized(fit):
    for epoch in fit(SMALL, {"num_minibatches": 2}, ppo=RecordedPPO).epochs:
        for minibatch in epoch:
            assert minibatch["advantage"].shape == (32, 1)
            assert minibatch["advantage"].mean().abs() < 1e-6
            assert minibatch["advantage"].std() == pytest.approx(1, abs=1e-4)
    module = fit(SMALL, {"num_minibatches": 2, "adv_eps": 1e6}, ppo=RecordedPPO)
    assert all(minibatch["advantage"].std() < 0.01 for minibatch in module.epochs[0])
    module = fit(SMALL, {"num_minibatches": 2, "norm_adv": False}, ppo=RecordedPPO)
    advantage = torch.cat([minibatch["advantage"] for minibatch in module.epochs[0]])
    assert advantage.std() != pytest.approx(1, abs=0.01)


def test_minibatches_with_fewer_than_two_valid_steps_are_skipped():
    valid = torch.tensor([[True, False], [False, False], [True, True]])
    epoch = {"advantage": torch.tensor([5.0, 1, 2, 3, 4, 6]), "weight": valid.flatten().float()}
    (kept,) = split_epoch(epoch, count=3, norm_adv=True)
    torch.testing.assert_close(kept["advantage"], torch.tensor([-1.0, 1.0]) / 2**0.5)
    assert kept["weight"].tolist() == [1, 1]


@pytest.mark.detail("8")
@pytest.mark.detail("9")
def test_the_loss_uses_its_options(module):
    batch = module.rollouts[-1].flatten()
    noise = torch.randn(len(batch), generator=torch.Generator().manual_seed(0))
    batch["action_log_prob"] = batch["action_log_prob"] + noise
    batch["state_value"] = batch["state_value"] - 1  # clipped to below the targets
    evaluation = module.evaluate(batch)
    parts = module.loss(batch, evaluation)[1]
    assert parts["clipfrac"] > 0.1
    module.hparams["clip_vloss"] = False
    assert module.loss(batch, evaluation)[1]["value_loss"] != parts["value_loss"]
    module.clip_coef = 0.01
    assert module.loss(batch, evaluation)[1]["policy_loss"] != parts["policy_loss"]


@pytest.mark.detail("A3")
def test_the_epochs_stop_when_the_policy_has_moved_too_far(fit):
    eager = {"learning_rate": 0.05, "update_epochs": 10, "num_minibatches": 2}
    module = fit(SMALL, {**eager, "target_kl": 0.01}, ppo=RecordedPPO)
    iterations = len(module.rollouts)
    assert iterations == 5
    assert iterations <= len(module.epochs) < iterations * 10
    # The last minibatch of an epoch decides: its KL is above the target where the iteration stopped early.
    last = [metrics["approx_kl"].item() for metrics in module.metrics[1::2]]
    assert len(last) == len(module.epochs)
    assert sum(kl > 0.01 for kl in last) >= 1
    assert module.trainer.global_step == len(module.metrics), "Lightning counts the steps that were taken"
    assert [module.kl_exceeded(torch.tensor(kl)) for kl in (0.009, 0.011)] == [False, True]
    assert len(fit(SMALL, eager, ppo=RecordedPPO).epochs) == 50


class Watching(RecordedPPO):
    def log_rollout(self, rollout, metrics):
        super().log_rollout(rollout, metrics)
        with open(f"{self.logger.log_dir}/metrics.csv") as file:
            self.lines = [*getattr(self, "lines", []), len(file.readlines()) - 1]


@pytest.mark.detail("12")
def test_metrics_are_means_over_the_iteration_and_the_x_axis_counts_environment_steps(
    fit, tmp_path, monkeypatch
):
    monkeypatch.setattr(run_log, "SAVE_EVERY", 0)
    logger = CSVLogger(tmp_path)
    module = fit(SMALL, {"update_epochs": 2}, ppo=Watching, logger=logger, log_every_n_steps=1)
    assert module.lines == [1, 2, 3, 4, 5], "metrics are on the disk during the run"
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    assert [row["step"] for row in rows] == [64, 128, 192, 256, 320]
    for i, row in enumerate(rows):
        iteration = module.metrics[8 * i : 8 * (i + 1)]
        for key in ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"):
            mean = sum(metrics[key].item() for metrics in iteration) / 8
            assert row[f"losses/{key}"] == pytest.approx(mean, abs=1e-6, rel=1e-5), key
        rollout = module.rollouts[i]
        explained = losses.explained_variance(rollout["state_value"], rollout["value_target"]).item()
        assert row["losses/explained_variance"] == pytest.approx(explained, abs=1e-6)
        done = rollout["next", "done"]
        # Without an end of an episode there is no number, rather than an old one.
        assert ("charts/episodic_return" in row) == bool(done.any())
        if done.any():
            mean_return = rollout["next", "episode_reward"][done].mean().item()
            mean_length = rollout["next", "step_count"][done].float().mean().item()
            assert row["charts/episodic_return"] == pytest.approx(mean_return)
            assert row["charts/episodic_length"] == pytest.approx(mean_length)
        assert row["charts/SPS"] > 0
        assert row["charts/learning_rate"] == pytest.approx(2.5e-4 * (1 - i / 5))
    entropy = rows[-1]["losses/entropy"]
    assert module.trainer.callback_metrics["losses/entropy"] == pytest.approx(entropy)
    assert any("charts/episodic_return" in row for row in rows)


@pytest.mark.detail("5")
@pytest.mark.parametrize("num_steps", [8, 6])  # 6: the limit is at the last step of the rollout
def test_a_time_limit_is_bootstrapped_from_the_real_last_observation(fit, num_steps):
    """With lambda 0 the advantage is r + gamma V(s') - V(s), where s' is the final observation."""
    data = {"num_envs": 2, "num_steps": num_steps, "total_timesteps": 2 * num_steps}
    data |= {"env_id": "Counter-v0", "env_kwargs": {"max_episode_steps": 6}}
    for bootstrap in (True, False):
        model = {"gae_lambda": 0.0, "bootstrap_truncated": bootstrap, "num_minibatches": 1}
        rollout = fit(data, model, ppo=RecordedPPO).rollouts[0]
        fresh = fit(data, {"num_minibatches": 1, "update_epochs": 1, "learning_rate": 1e-12}).agent
        value, following = (
            fresh.value(rollout[key]).detach() for key in ("observation", ("next", "observation"))
        )
        truncated = rollout["next", "truncated"].squeeze(-1)
        assert truncated.sum() == 2
        if not bootstrap:
            following = following * ~truncated
        advantage = rollout["advantage"].squeeze(-1)
        torch.testing.assert_close(advantage, 1 + 0.99 * following - value, atol=1e-5, rtol=1e-5)


def test_the_step_before_one_that_does_not_count_leaves_out_its_reward(module):
    rollout = module.rollouts[-1]
    rollout["weight"] = torch.ones(rollout.batch_size)
    rollout["weight"][0, 5] = 0
    before = []
    for reward in (0.0, 1e3):
        rollout["next", "reward"][0, 5] = reward
        before.append(PPO.advantages(module, rollout.clone())["advantage"][0, :5])
    assert torch.equal(*before)


def test_seeded_runs_are_equal_to_the_bit_and_other_seeds_differ(fit):
    one, same, other = (weights(fit(SMALL, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_initial_weights_do_not_depend_on_the_number_of_threads(fit):
    initial = []
    for count in (1, 2):
        torch.set_num_threads(count)
        try:
            initial.append(fit(SMALL | {"total_timesteps": 64}, ppo=RecordedPPO).initial)
            assert torch.get_num_threads() == count
        finally:
            torch.set_num_threads(1)
    assert torch.equal(*initial)


@pytest.mark.parametrize("transforms", [None, [InitTracker()]])
def test_a_validation_changes_no_training_number(fit, transforms):
    data = {**SMALL, "transforms": transforms}
    plain = fit(data)
    validated = fit(
        data, limit_val_batches=1, val_check_interval=2, check_val_every_n_epoch=None, num_sanity_val_steps=1
    )
    assert "eval/episodic_return" in validated.trainer.callback_metrics
    assert torch.equal(weights(plain), weights(validated))
    assert plain.episode_returns == validated.episode_returns


def test_wrong_numbers_end_before_an_environment_is_made(fit, monkeypatch):
    monkeypatch.setattr(EnvFactory, "make", lambda *args, **kwargs: pytest.fail("an environment was made"))
    for steps, message in ((10, "= 40 is not divisible"), (90, "data.total_timesteps is 320")):
        with pytest.raises(ConfigError, match=message):
            fit(SMALL | {"num_steps": steps}, {"num_minibatches": 3})


def test_rollouts_must_come_from_the_data_module(make_trainer):
    with pytest.raises(ConfigError, match="RolloutDataModule"):
        make_trainer().fit(PPO(), [1])


def test_construction_starts_nothing():
    """No process, thread or environment starts before a stage needs it (notebooks fork, DDP spawns)."""
    before = threading.active_count()
    PPO(), RolloutDataModule(env_id="Pong-v5", backend="envpool")
    assert threading.active_count() <= before  # threads of earlier tests may end
    assert not torch.cuda.is_initialized()


def test_fit_warns_of_nothing(fit, recwarn):
    checkpoint = ModelCheckpoint()
    options = {"enable_checkpointing": True, "limit_val_batches": 1}
    options["max_epochs"] = -1  # recwarn resets the filter of Lightning's warning
    fit(SMALL, callbacks=[checkpoint], **options)
    assert checkpoint.best_model_path
    warned = [str(w.message) for w in recwarn if issubclass(w.category, UserWarning)]
    assert not [message for message in warned if "LeafSpec" not in message]


def smallest():
    """Return a number near float32's smallest, 0 where such numbers are rounded."""
    return (torch.tensor(1e-30) * 1e-10).item()


@pytest.mark.parametrize("flushes", [False, True])
def test_the_smallest_numbers_are_0_during_updates(fit, request, flushes):
    """The environments, whose results a fit must not change, keep them."""

    class Watched(CartPoleEnv):
        def step(self, action):
            assert (smallest() == 0) == flushes
            return super().step(action)

    class Interrupted(PPO):
        def training_step(self, rollout, batch_idx):
            assert smallest() == 0
            if batch_idx:
                raise RuntimeError("interrupted")
            super().training_step(rollout, batch_idx)

    request.addfinalizer(lambda: torch.set_flush_denormal(False))
    torch.set_flush_denormal(flushes)
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(SMALL | {"env_id": Watched}, ppo=Interrupted)
    assert (smallest() == 0) == flushes


def test_small_layers_train_on_one_thread_and_the_thread_count_is_restored(fit):
    class Watching(PPO):
        def training_step(self, rollout, batch_idx):
            self.threads = torch.get_num_threads()
            return super().training_step(rollout, batch_idx)

    torch.set_num_threads(2)
    try:
        assert fit(SMALL, ppo=Watching).threads == 1
        assert torch.get_num_threads() == 2
        assert fit(SMALL, ppo=Watching, callbacks=[Threads(2)]).threads == 2
        many = {"num_envs": 512, "num_steps": 32, "total_timesteps": 512 * 32}
        few_updates = {"num_minibatches": 2, "update_epochs": 1}
        assert fit(many, few_updates, ppo=Watching).threads == 1, "small layers, whatever the rows"
        wide = few_updates | {"agent": functools.partial(MLPAgent, hidden_sizes=(256, 256))}
        assert fit(many, wide, ppo=Watching).threads == 2
    finally:
        torch.set_num_threads(1)
