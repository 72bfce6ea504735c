"""Learning-rate schedules, against closed forms."""

import pytest
import torch

from ppo_lightning import PPO
from ppo_lightning.algorithms.schedule import IterationLR, KLAdaptiveLR, remaining
from tests.helpers import Recorder, SaveAfter

DESIRED_KL = 0.02
# Below half of the desired value, near it, above twice the value
TOO_LOW, NEAR, TOO_HIGH = 0.009, 0.03, 0.041
DATA = {"num_envs": 2, "num_steps": 16, "total_timesteps": 32 * 6}


def constant(optimizer):
    return IterationLR(optimizer, lambda done: 1.0)


def annealed(optimizer):
    return IterationLR(optimizer, lambda done: remaining(done, num_rollouts=4))


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


@pytest.mark.parametrize(("rollouts_done", "share"), [(0, 1.0), (1, 0.75), (3, 0.25), (4, 0.0), (5, 0.0)])
def test_the_remaining_share_of_a_run_falls_linearly_to_zero(rollouts_done, share):
    assert remaining(rollouts_done, 4) == share


@pytest.mark.parametrize(
    ("make_schedule", "shares"),
    [(constant, [1] * 6), (annealed, [1, 3 / 4, 1 / 2, 1 / 4, 0, 0])],
    ids=["constant", "annealed"],
)
def test_every_group_has_the_share_of_the_iteration(make_schedule, shares):
    optimizer = make_optimizer(0.1, 0.3)
    schedule = make_schedule(optimizer)
    for iteration, share in enumerate(shares):
        assert schedule.state_dict() == {"last_epoch": iteration}
        assert learning_rates(optimizer) == pytest.approx([0.1 * share, 0.3 * share])
        assert schedule.get_last_lr() == learning_rates(optimizer)
        step(schedule)


@pytest.mark.parametrize("divergence", [DESIRED_KL / 2, DESIRED_KL, NEAR, 2 * DESIRED_KL])
def test_kl_adaptation_keeps_the_learning_rate_between_half_and_twice_the_desired_kl(divergence):
    schedule = KLAdaptiveLR(make_optimizer(1e-3), DESIRED_KL)
    assert adapt(schedule, divergence) == [1e-3]


def test_kl_adaptation_stays_between_1e_5_and_1e_2_and_leaves_the_bounds_again():
    schedule = KLAdaptiveLR(make_optimizer(1e-3), DESIRED_KL)
    rising = adapt(schedule, *[TOO_LOW] * 8)
    assert rising == pytest.approx([min(1e-3 * 1.5**n, 1e-2) for n in range(1, 9)])
    falling = adapt(schedule, *[TOO_HIGH] * 20)
    assert falling == pytest.approx([max(1e-2 / 1.5**n, 1e-5) for n in range(1, 21)])
    assert adapt(schedule, TOO_LOW) == pytest.approx([1.5e-5])


def test_kl_adaptation_gives_all_groups_the_same_factor():
    optimizer = make_optimizer(1e-3, 4e-3)
    schedule = KLAdaptiveLR(optimizer, DESIRED_KL)
    assert adapt(schedule, TOO_LOW) == pytest.approx([1.5e-3, 6e-3])


def restore(make_schedule, old_lr, new_lr, state):
    """Restore a schedule as Lightning does: first the optimizer of the old run, then the schedule's state."""
    optimizer = make_optimizer(new_lr)
    schedule = make_schedule(optimizer)
    old = make_optimizer(old_lr)
    make_schedule(old)  # which sets `initial_lr`
    optimizer.load_state_dict(old.state_dict())
    assert learning_rates(optimizer) == [old_lr]
    schedule.load_state_dict(state)
    return schedule


@pytest.mark.parametrize(
    ("make_schedule", "factor", "next_factor"),
    [
        (constant, 1, 1),
        (annealed, 1 / 4, 0),
        (lambda optimizer: KLAdaptiveLR(optimizer, DESIRED_KL), 2.25, 2.25),
    ],
    ids=["constant", "annealed", "adaptive"],
)
def test_a_restored_schedule_keeps_the_base_learning_rate_of_its_own_run(make_schedule, factor, next_factor):
    state = {"last_epoch": 3, "kl_factor": 2.25}
    schedule = restore(make_schedule, old_lr=7e-3, new_lr=1e-3, state=state)
    group = schedule.optimizer.param_groups[0]
    assert schedule.last_epoch == 3
    assert group["initial_lr"] == 1e-3
    assert group["lr"] == pytest.approx(1e-3 * factor)
    assert schedule.get_last_lr() == [group["lr"]]
    step(schedule)
    assert group["lr"] == pytest.approx(1e-3 * next_factor)


def test_kl_adaptation_starts_at_factor_1_from_the_checkpoint_of_another_schedule():
    state = annealed(make_optimizer(1e-3)).state_dict()
    schedule = restore(lambda optimizer: KLAdaptiveLR(optimizer, DESIRED_KL), 7e-3, 1e-3, state)
    assert schedule.kl_factor == 1
    assert learning_rates(schedule.optimizer) == [1e-3]


class RecordedPPO(Recorder, PPO):
    pass


# The desired KL divergence is so high that each iteration multiplies the learning rate by 1.5.
GROWING = {"learning_rate": 1e-4, "anneal_lr": False, "desired_kl": 100.0}


def test_a_resumed_run_restores_the_factor_of_the_kl_adaptation(fit_and_resume, tmp_path):
    whole, resumed = fit_and_resume(3, DATA, GROWING)
    (saved,) = torch.load(tmp_path / "middle.ckpt")["lr_schedulers"]
    assert saved == {"last_epoch": 3, "kl_factor": pytest.approx(1.5**3)}
    assert resumed.lr_schedulers().kl_factor == pytest.approx(1.5**6)
    assert resumed.lr_schedulers().kl_factor == whole.lr_schedulers().kl_factor


def test_a_resumed_run_applies_the_restored_factor_to_its_own_learning_rate(fit, tmp_path):
    path = tmp_path / "middle.ckpt"
    fit(DATA, GROWING, callbacks=[SaveAfter(path, 3)])
    resumed = fit(DATA, GROWING | {"learning_rate": 2e-4}, ppo=RecordedPPO, ckpt_path=path)
    assert resumed.learning_rates == pytest.approx([2e-4 * 1.5**n for n in (3, 4, 5)])
