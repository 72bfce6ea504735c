"""Subclasses of PPO: each method that a variant may override is used in training."""

import functools
import itertools
import signal
import warnings
from typing import ClassVar

import lightning as L
import pytest
import torch

from ppo_lightning import PPG, PPO, ConfigError, MLPAgent, RecurrentPPO
from ppo_lightning.algorithms import losses
from ppo_lightning.utils.overrides import NEVER_CALLED
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


def plateau(optimizer, num_rollouts):
    return {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "charts/SPS"}


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
REFUSED = {
    "nothing": lambda self: None,
    "empty list": form(optimizers=0, wrap=lambda found, _: []),
    "two optimizers": form(optimizers=2, wrap=lambda found, _: found),
    "two schedules": form(halved, halved),
    "plateau": form(plateau),
    "closures": form(kind=torch.optim.LBFGS, wrap=lambda found, _: found),
}


@pytest.mark.parametrize("name", FORMS)
def test_an_optimizer_may_have_any_form_of_lightning(fit, name):
    configure_optimizers, last = FORMS[name]
    module = fit(DATA, MODEL, ppo=own(configure_optimizers))
    assert module.moved > 1e-3
    has_schedule = module.lr_schedulers() is not None
    assert len(set(module.learning_rates)) == (ROLLOUTS if has_schedule else 1)
    assert module.trainer.callback_metrics["charts/learning_rate"] == pytest.approx(last)


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None")
@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_the_update_cannot_use_is_refused(fit, name):
    sentence = r"^Own.configure_optimizers must return one optimizer .*self.data.num_rollouts times\.$"
    with pytest.raises(ConfigError, match=sentence):
        fit(DATA, MODEL, ppo=own(REFUSED[name], PPO))


# Overrides without `super()`


class Counts(L.Callback):
    """Recorder of the steps that a callback of the user sees after each rollout."""

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


@pytest.mark.parametrize(
    ("ppo", "lost"),
    [
        (OwnStep, r"step the learning-rate schedule: call self.step_schedule.*, and not log the episodes"),
        (ReturnsALoss, r"step the optimizer: call self.update.*, and not step the learning-rate"),
        (OwnLog, r"log the episodes: call self.log_rollout\(rollout, metrics\)"),
    ],
)
def test_an_own_training_step_ends_in_time_and_is_told_what_it_lost(fit, ppo, lost):
    with pytest.warns(UserWarning, match=rf"^The first {ppo.__name__}.training_step did not .*{lost}"):
        fit_in_time(fit, ppo)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_start", "on_train_batch_end", "on_fit_end"])
def test_hooks_of_lightning_are_free(fit, hook):
    plain = fit(DATA, MODEL)
    module = fit_in_time(fit, type("Own", (PPO,), {hook: lambda self, *args: None}))
    assert torch.equal(weights(module), weights(plain))


@pytest.mark.parametrize(
    ("hook", "purpose"),
    [
        ("on_train_start", "Override restored optimizer settings"),
        ("on_save_checkpoint", "Add agent, seed"),
        ("on_load_checkpoint", "Restore the entries"),
        ("setup", "Check, before any environment"),
        ("configure_callbacks", "Add the guards"),
        ("teardown", "In a process that Lightning started"),
    ],
)
def test_an_override_that_loses_what_the_package_does_is_named(fit, hook, purpose):
    ppo = type("Own", (PPO,), {hook: lambda self, *args, **kwargs: []})
    sentence = rf"Own.{hook} does not call super\(\).{hook}\(\), so that .* lacks what it does: {purpose}"
    with pytest.warns(UserWarning, match=sentence):
        fit(DATA, MODEL, ppo=ppo, max_epochs=1)


class Fails(PPO):
    def on_train_end(self):
        super().on_train_end()
        pytest.fail("the run has not ended")

    def end_iteration(self, rollout, metrics):
        raise RuntimeError("my own error")


def test_the_end_of_training_is_no_error(fit):
    with pytest.raises(RuntimeError, match="my own error"):
        fit(DATA, MODEL, ppo=Fails)


@pytest.mark.parametrize("name", NEVER_CALLED)
def test_a_hook_that_lightning_does_not_call_is_named(fit, name):
    own = type("Own", (PPO,), {name: lambda self, *args: pytest.fail("it is called")})
    with pytest.warns(UserWarning, match=rf"^Own.{name} is never called, because training_step has"):
        fit(DATA, MODEL, ppo=own, max_epochs=1)


@pytest.mark.parametrize(("base", "named"), [(PPO, False), (PPG, True)])
def test_the_end_of_an_iteration_is_free_where_nothing_happens(fit, recwarn, base, named):
    own = type("Own", (base,), {"end_iteration": lambda self, rollout, metrics: None})
    fit(DATA, MODEL | ({"n_iteration": 2} if named else {}), ppo=own, max_epochs=1)
    sentences = [str(w.message) for w in recwarn if "does not call super().end_iteration()" in str(w.message)]
    assert bool(sentences) == named


def test_an_own_configure_model_without_super_is_refused(fit):
    own = type("Own", (PPO,), {"configure_model": lambda self: None})
    with pytest.raises(ConfigError, match=r"^Own.configure_model does not call super.*: Build the agent"):
        fit(DATA, MODEL, ppo=own)


def test_overrides_that_call_super_are_not_named(fit, recwarn):
    class Mixin:
        def on_train_start(self):
            super().on_train_start()

    class Own(Mixin, RecordedPPO):
        def setup(self, stage):
            PPO.setup(self, stage)

        def on_save_checkpoint(self, checkpoint):
            super().on_save_checkpoint(checkpoint)

    fit(DATA, MODEL, ppo=Own)
    assert not [str(w.message) for w in recwarn if "super()" in str(w.message)]


class Evaluations(PPO):
    """PPO that evaluates other actions, and records the ends of iterations."""

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


class NotOptimized(Auxiliary):
    """Auxiliary whose optimizer does not know the second network."""

    def trainable_parameters(self):
        return self.agent.parameters()


def test_an_additional_network_is_trained_if_it_is_among_the_trainable_parameters(fit):
    with pytest.warns(UserWarning, match="does not have all parameters of second_critic: yield"):
        constant = fit(DATA, MODEL, ppo=NotOptimized)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The optimizer does not have")
        trained = fit(DATA, MODEL, ppo=Auxiliary)
    assert trained.second_critic.weight.abs().min() > 1e-4
    assert not constant.second_critic.weight.any()
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
