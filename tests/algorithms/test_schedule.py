"""Learning-rate schedules, against closed forms."""

import pytest
import torch

from ppo_lightning import RolloutDataModule
from ppo_lightning.algorithms.schedule import IterationLR, KLAdaptiveLR, remaining
from tests.helpers import RecordedPPO, SaveAfter

DESIRED_KL = 0.02
TOO_LOW, TOO_HIGH = 0.009, 0.041  # below half of the desired value, above twice the value
DATA = {"num_envs": 2, "num_steps": 16, "total_timesteps": 32 * 6}


def make_optimizer(*learning_rates):
    """Return an optimizer with one parameter group for each learning rate."""
    return torch.optim.Adam(
        [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in learning_rates]
    )


def learning_rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def step(schedule):
    """Step the optimizer and the schedule; PyTorch warns if the schedule is stepped alone."""
    schedule.optimizer.step()
    schedule.step()


def adapt(schedule, *divergences):
    """Run one iteration for each KL divergence and return the learning rate after each of them."""
    rates = []
    for divergence in divergences:
        schedule.adapt(divergence)
        step(schedule)
        rates += learning_rates(schedule.optimizer)
    return rates


@pytest.mark.parametrize(
    ("factor", "shares"),
    [(lambda done: 1.0, [1] * 6), (lambda done: remaining(done, 4), [1, 3 / 4, 1 / 2, 1 / 4, 0, 0])],
    ids=["constant", "annealed"],
)
def test_every_group_has_the_share_of_the_iteration(factor, shares):
    optimizer = make_optimizer(0.1, 0.3)
    schedule = IterationLR(optimizer, factor)
    for iteration, share in enumerate(shares):
        assert schedule.state_dict() == {"last_epoch": iteration}
        assert learning_rates(optimizer) == pytest.approx([0.1 * share, 0.3 * share])
        assert schedule.get_last_lr() == learning_rates(optimizer)
        step(schedule)


def test_kl_adaptation_acts_on_all_groups_below_half_and_above_twice_the_desired_kl():
    schedule = KLAdaptiveLR(make_optimizer(1e-3, 4e-3), DESIRED_KL)
    assert adapt(schedule, DESIRED_KL / 2, DESIRED_KL, 1.5 * DESIRED_KL, 2 * DESIRED_KL) == [1e-3, 4e-3] * 4
    assert adapt(schedule, TOO_LOW) == pytest.approx([1.5e-3, 6e-3])


def test_kl_adaptation_stays_between_1e_5_and_1e_2_and_leaves_the_bounds_again():
    schedule = KLAdaptiveLR(make_optimizer(1e-3), DESIRED_KL)
    rising = adapt(schedule, *[TOO_LOW] * 8)
    assert rising == pytest.approx([min(1e-3 * 1.5**n, 1e-2) for n in range(1, 9)])
    falling = adapt(schedule, *[TOO_HIGH] * 20)
    assert falling == pytest.approx([max(1e-2 / 1.5**n, 1e-5) for n in range(1, 21)])
    assert adapt(schedule, TOO_LOW) == pytest.approx([1.5e-5])


class Grouped(RecordedPPO):
    def configure_optimizers(self):
        agent = self.agent
        actor, critic = (
            [*body.parameters(), *out.parameters()]
            for body, out in ((agent.actor_body, agent.head), (agent.critic_body, agent.critic))
        )
        groups = [{"params": actor}, {"params": critic, "eps": 1e-8}]
        optimizer = torch.optim.Adam(groups, lr=1e-3, eps=1e-5)
        return [optimizer], [IterationLR(optimizer, [lambda done: 0.5**done, lambda done: 1.0])]

    def on_train_batch_start(self, rollout, batch_idx):
        groups = self.trainer.optimizers[0].param_groups
        self.seen = [*getattr(self, "seen", []), [(group["lr"], group["eps"]) for group in groups]]


def test_groups_keep_their_schedules_and_epsilons(fit, tmp_path):
    path = tmp_path / "middle.ckpt"
    whole = fit(DATA, {}, ppo=Grouped, callbacks=[SaveAfter(path, 3)])
    assert whole.seen == [[(1e-3 * 0.5**done, 1e-5), (1e-3, 1e-8)] for done in range(6)]
    assert fit(DATA, {}, ppo=Grouped, ckpt_path=path).seen == whole.seen[3:]


# The desired KL divergence is so high that each iteration multiplies the learning rate by 1.5.
GROWING = {"learning_rate": 1e-4, "anneal_lr": False, "desired_kl": 100.0}


@pytest.mark.parametrize(("first", "factor"), [(GROWING, 1.5**3), ({"anneal_lr": True}, 1)])
def test_a_resumed_run_applies_the_factor_of_its_checkpoint_to_its_own_learning_rate(
    fit, tmp_path, first, factor
):
    """In a checkpoint of another schedule, the factor is 1."""
    path = tmp_path / "middle.ckpt"
    fit(DATA, first, callbacks=[SaveAfter(path, 3)])
    resumed = fit(DATA, GROWING | {"learning_rate": 2e-4}, ppo=RecordedPPO, ckpt_path=path)
    assert resumed.learning_rates == pytest.approx([2e-4 * factor * 1.5**n for n in range(3)])


@pytest.mark.parametrize(
    ("factor", "learning_rate", "used"),
    [(33.3, 5e-3, 1e-2), (1 / 30, 2e-5, 1e-5), (1.0, 2e-2, 1e-2), (1.0, 1e-6, 1e-5), (2.0, 3e-3, 6e-3)],
)
def test_a_restored_factor_stays_within_the_bounds_of_any_learning_rate(factor, learning_rate, used):
    optimizer = make_optimizer(learning_rate)
    schedule = KLAdaptiveLR(optimizer, DESIRED_KL)
    schedule.load_state_dict(schedule.state_dict() | {"kl_factor": factor})
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(used)
    assert adapt(schedule, DESIRED_KL)[0] == pytest.approx(used)


@pytest.mark.parametrize(("desired_kl", "factor"), [(100.0, 1.5), (1e-12, 1 / 1.5)])
def test_the_measured_kl_adapts_the_learning_rate_and_a_second_fit_starts_anew(
    make_trainer, desired_kl, factor
):
    module = RecordedPPO(**GROWING | {"desired_kl": desired_kl})
    for _ in range(2):
        make_trainer().fit(module, RolloutDataModule(**DATA))
        assert module.learning_rates == pytest.approx([1e-4 * factor**n for n in range(6)])
