"""Subclasses of PPO: each method that a variant may override is used in training."""

import functools
import itertools
import signal
from typing import ClassVar

import lightning as L
import pytest
import torch

from ppo_lightning import PPO, MLPAgent, RecurrentPPO
from ppo_lightning.algorithms import losses
from tests.helpers import RecordedPPO, weights

ROLLOUTS = 3
DATA = {"num_envs": 4, "num_steps": 16, "total_timesteps": 4 * 16 * ROLLOUTS}
MODEL = {"num_minibatches": 2, "update_epochs": 2, "learning_rate": 1e-3}


def form(*schedules, optimizers=1, kind=torch.optim.SGD, wrap=lambda found, schedules: (found, schedules)):
    """Return a method ``configure_optimizers`` with optimizers and schedules in a form of Lightning."""

    def configure_optimizers(self):
        found = [kind(self.trainable_parameters(), lr=0.1) for _ in range(optimizers)]
        return wrap(found, [make(found[0], self.data.num_rollouts) for make in schedules])

    return configure_optimizers


def halved(optimizer, num_rollouts):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def one_cycle(optimizer, num_rollouts):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=num_rollouts)


def own(configure_optimizers, base=RecordedPPO):
    return type("Own", (base,), {"configure_optimizers": configure_optimizers})


def test_a_resumed_run_leaves_an_own_optimizer_and_schedule_to_lightning(fit_and_resume):
    whole, resumed = fit_and_resume(1, DATA, MODEL, ppo=own(form(halved)))
    assert type(whole.trainer.optimizers[0]) is torch.optim.SGD
    assert whole.learning_rates == pytest.approx([0.1, 0.05, 0.025]), "one step of the schedule an iteration"
    assert whole.trainer.global_step == ROLLOUTS * 2 * 2
    assert whole.moved > 1e-3
    assert resumed.learning_rates == whole.learning_rates[1:]
    settings = torch.optim.SGD([torch.zeros(1)]).param_groups[0].keys() | {"initial_lr"}
    assert resumed.trainer.optimizers[0].param_groups[0].keys() == settings, "no setting of Adam is added"


def test_without_a_schedule_the_learning_rate_is_constant_in_a_resumed_run_too(fit_and_resume):
    """``anneal_lr`` is on: it is a setting of PPO's own ``configure_optimizers``."""
    no_schedule = own(form(wrap=lambda found, _: found[0]))
    module, _ = fit_and_resume(1, DATA, MODEL, ppo=no_schedule)
    assert module.lr_schedulers() is None
    assert module.learning_rates == [0.1] * ROLLOUTS
    assert module.moved > 1e-3


FORMS = {  # and the learning rate of the last rollout
    "list": (form(wrap=lambda found, _: found), 0.1),
    "dictionary": (form(wrap=lambda found, _: {"optimizer": found[0]}), 0.1),
    "dictionary, schedule": (
        form(halved, wrap=lambda found, s: {"optimizer": found[0], "lr_scheduler": s[0]}),
        0.025,
    ),
    "length of the run": (
        form(one_cycle, wrap=lambda found, s: {"optimizer": found[0], "lr_scheduler": {"scheduler": s[0]}}),
        0.1 / 25 / 1e4,
    ),
}
IMPOSSIBLE = {
    "empty list": form(optimizers=0, wrap=lambda found, _: []),
    "two optimizers": form(optimizers=2, wrap=lambda found, _: found),
    "two schedules": form(halved, halved),
}


@pytest.mark.parametrize("name", FORMS)
def test_an_optimizer_may_have_any_form_of_lightning(fit, name):
    configure_optimizers, last = FORMS[name]
    module = fit(DATA, MODEL, ppo=own(configure_optimizers))
    assert module.moved > 1e-3
    has_schedule = module.lr_schedulers() is not None
    assert len(set(module.learning_rates)) == (ROLLOUTS if has_schedule else 1)
    assert module.trainer.callback_metrics["charts/learning_rate"] == pytest.approx(last)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_two_optimizers_or_schedules_are_an_error_of_the_subclass(fit, name):
    with pytest.raises(AssertionError, match="one optimizer, with at most one schedule"):
        fit(DATA, MODEL, ppo=own(IMPOSSIBLE[name], PPO))


# Overrides without `super()`


class Counts(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        self.seen = [*getattr(self, "seen", []), pl_module.env_steps]


def fit_in_time(fit, ppo, **options):
    """Train a run that an own hook could keep from ending, and require its end and its counts."""
    counts = Counts()
    signal.alarm(60)
    try:
        module = fit(DATA, MODEL, ppo=ppo, callbacks=[counts], max_epochs=-1, **options)
    finally:
        signal.alarm(0)
    assert counts.seen == [64 * rollouts for rollouts in range(1, ROLLOUTS + 1)]
    return module


class OwnStep(PPO):
    def training_step(self, rollout, batch_idx):
        for minibatch in self.minibatches(self.advantages(rollout)):
            metrics = self.update([minibatch])
        self.log("my/kl", metrics[-1]["approx_kl"])


class ReturnsALoss(PPO):
    def training_step(self, rollout, batch_idx):
        (minibatch, *_) = self.minibatches(self.advantages(rollout))
        return self.total_loss(minibatch)[0]


class OwnLog(PPO):
    def log_rollout(self, rollout, metrics):
        self.log("my/value", rollout["state_value"].mean())


HOOKS = [
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
    "configure_callbacks",
    "on_save_checkpoint",
    "on_load_checkpoint",
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("ppo", [OwnStep, ReturnsALoss, OwnLog])
def test_a_run_with_an_own_training_step_ends_in_time(fit, ppo):
    fit_in_time(fit, ppo)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_lightning_are_free(fit, hook):
    """No hook of a subclass that leaves out ``super()`` loses a count or the end of the run."""
    plain = fit(DATA, MODEL)
    module = fit_in_time(fit, type("Own", (PPO,), {hook: lambda self, *args, **kwargs: []}))
    assert torch.equal(weights(module), weights(plain))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_epoch_that_a_hook_ends_counts_its_rollout_once(fit):
    """Lightning ends an epoch whose ``on_train_batch_start`` returns -1, after the rollout was handed on."""

    def on_train_batch_start(self, rollout, batch_idx):
        return -1 if batch_idx == 0 and self.rollouts_done == 2 else None

    counts = Counts()
    own = type("Own", (PPO,), {"on_train_batch_start": on_train_batch_start})
    module = fit(DATA | {"rollouts_per_epoch": 1}, MODEL, ppo=own, callbacks=[counts], max_epochs=-1)
    assert counts.seen == [64, 192], "the second rollout has no update"
    assert module.env_steps == 192


def test_a_checkpoint_without_the_hook_of_the_package_is_loaded_and_resumed(fit_and_resume, tmp_path):
    def forget(self, checkpoint):
        checkpoint["mine"] = 1

    own = type("Own", (PPO,), {"on_save_checkpoint": forget, "on_load_checkpoint": lambda self, _: None})
    fit_and_resume(1, DATA, MODEL, ppo=own)
    loaded = PPO.load_from_checkpoint(tmp_path / "middle.ckpt")
    assert loaded.env_steps == 64
    assert torch.load(tmp_path / "middle.ckpt", weights_only=True)["mine"] == 1


class Fails(PPO):
    def on_train_end(self):
        super().on_train_end()
        pytest.fail("the run has not ended")

    def end_iteration(self, rollout, metrics):
        raise RuntimeError("my own error")


def test_the_end_of_training_is_no_error(fit):
    with pytest.raises(RuntimeError, match="my own error"):
        fit(DATA, MODEL, ppo=Fails)


class Evaluations(PPO):
    def evaluate(self, minibatch):
        return super().evaluate(minibatch | {"action": 1 - minibatch["action"]})

    def end_iteration(self, rollout, metrics):
        logged = self.trainer.callback_metrics["losses/approx_kl"].item()
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.ends = [*getattr(self, "ends", []), (rollout["advantage"].shape, len(metrics), logged, rate)]


def test_the_end_of_an_iteration_is_between_its_log_and_the_next_learning_rate(fit):
    module = fit(DATA, MODEL, ppo=Evaluations)
    shapes, counts, divergences, rates = zip(*module.ends, strict=True)
    assert set(shapes) == {(4, 16, 1)} and set(counts) == {4}
    assert divergences[-1] == module.trainer.callback_metrics["losses/approx_kl"].item()
    assert min(divergences) > 1e-5, "the ratios are those of the other actions"
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])


class Numbered:
    """Mixin that numbers the steps of a rollout and checks number and observation in the loss."""

    minibatch_keys: ClassVar = (*PPO.minibatch_keys, "number")

    def advantages(self, rollout):
        rollout = super().advantages(rollout)
        rollout["number"] = torch.arange(rollout.numel()).view(*rollout.batch_size, 1)
        self.observations = rollout["observation"].flatten(0, 1).clone()
        self.numbers = []
        return rollout

    def loss(self, minibatch, evaluation):
        number = minibatch["number"].flatten()
        self.numbers += number.tolist()
        assert torch.equal(minibatch["observation"].flatten(0, -2), self.observations[number])
        return super().loss(minibatch, evaluation)


@pytest.mark.parametrize(
    ("ppo", "agent"),
    [(PPO, MLPAgent), (RecurrentPPO, functools.partial(MLPAgent, memory="lstm", memory_size=8))],
    ids=["steps", "sequences"],
)
def test_an_additional_rollout_key_goes_through_the_minibatches(fit, ppo, agent):
    module = fit(DATA, MODEL | {"agent": agent}, ppo=type("Numbering", (Numbered, ppo), {}))
    assert sorted(module.numbers) == sorted(2 * list(range(4 * 16))), "each step once in each of two epochs"


class Auxiliary(RecordedPPO):
    """PPO with a second value network, which only the loss uses."""

    def __init__(self, **hyperparameters):
        super().__init__(**hyperparameters)
        self.second_critic = torch.nn.Linear(4, 1)
        torch.nn.init.zeros_(self.second_critic.weight)

    def trainable_parameters(self):
        return itertools.chain(super().trainable_parameters(), self.second_critic.parameters())

    def loss(self, minibatch, evaluation):
        loss, parts = super().loss(minibatch, evaluation)
        value = self.second_critic(minibatch["observation"])
        second_loss = losses.value_loss(value, value, minibatch["value_target"], None)
        return loss + second_loss, parts | {"second_value_loss": second_loss.detach()}


def test_an_additional_network_is_trained_if_it_is_among_the_trainable_parameters(fit):
    trained = fit(DATA, MODEL, ppo=Auxiliary)
    assert trained.second_critic.weight.abs().min() > 1e-4
    assert trained.moved > 1e-3
    assert trained.trainer.callback_metrics["losses/second_value_loss"] > 0


class Terse(PPO):
    def loss(self, minibatch, evaluation):
        loss, parts = super().loss(minibatch, evaluation)
        return loss, {"policy_loss": parts["policy_loss"]}


def test_a_loss_names_the_parts_that_it_likes(fit):
    metrics = fit(DATA, MODEL, ppo=Terse).trainer.callback_metrics
    assert {name for name in metrics if name.startswith("losses/")} == {
        "losses/policy_loss",
        "losses/explained_variance",
    }


def test_an_additional_network_is_saved_and_resumed(fit_and_resume, tmp_path):
    fit_and_resume(1, DATA, MODEL, ppo=Auxiliary)
    path = tmp_path / "middle.ckpt"
    saved = torch.load(path, weights_only=False)["state_dict"]["second_critic.weight"]
    assert torch.equal(Auxiliary.load_from_checkpoint(path).second_critic.weight, saved)
