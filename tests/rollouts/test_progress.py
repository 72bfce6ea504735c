"""What a run has done, and the numbers that follow from its settings."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from tensordict import TensorDict

from ppo_lightning import PPO, RolloutDataModule
from ppo_lightning.rollouts.plan import Plan
from ppo_lightning.rollouts.progress import Progress

DATA = {"num_envs": 2, "num_steps": 16, "total_timesteps": 32 * 3}
MODEL = {"num_minibatches": 2, "update_epochs": 1}


def rollout(*ends):
    """Return a rollout [1, T] whose episodes end with these (return, length), None: no end."""
    done = torch.tensor([[[end is not None] for end in ends]])
    returns, lengths = (torch.tensor([[[float(end[i]) if end else 0.0] for end in ends]]) for i in range(2))
    following = {"episode_done": done, "episode_reward": returns, "step_count": lengths.long()}
    return TensorDict({"next": TensorDict(following, [1, len(ends)])}, [1, len(ends)])


def test_rollouts_and_extra_steps_are_counted_and_restored(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 7.0)
    progress = Progress()
    progress.count_extra(5)
    progress.count(rollout(None, (3, 7), None, (1, 2)), frames=4)
    assert (progress.env_steps, progress.rollout_steps, progress.mean_return) == (9, 4, 2.0)
    assert progress.finished[0].tolist() == [[3, 7, 0], [1, 2, 0]]
    assert progress.state_dict() == {
        "env_steps": 9,
        "extra_steps": 5,
        "begun": 7.0,
        "episode_returns": [3, 1],
        "episode_lengths": [7, 2],
        "finished": [[[3, 7, 0], [1, 2, 0]]],
        "metrics": {},
    }
    restored = Progress()
    for _ in range(2):
        restored.load_state_dict(progress.state_dict())
        assert restored.state_dict() == progress.state_dict()
    returns = progress.episode_returns
    progress.reset()
    assert progress.state_dict() == Progress().state_dict()
    assert progress.episode_returns is returns, "a module hands it out"


def test_draws_are_numbered_within_a_rollout():
    progress = Progress()
    progress.draws["shuffle"] += 2
    progress.count(rollout(None), frames=1)
    assert progress.draws["shuffle"] == 0


def test_the_time_left_follows_from_the_steps_with_learning(monkeypatch):
    clock = iter([3.0, 5.0])
    progress = Progress()
    stopped = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr("ppo_lightning.rollouts.progress.time", stopped)
    progress.count(rollout(None), frames=1000)  # random actions, which take no time
    progress.learn_from_here()
    assert progress.seconds_left(50) is None
    progress.count(rollout(None), frames=10)
    assert progress.seconds_left(50) == 10.0  # two for ten steps


class Seen(L.Callback):
    """Recorder of the count when a rollout begins and ends."""

    def __init__(self):
        self.steps = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.steps.append(pl_module.env_steps)

    def on_train_batch_end(self, trainer, pl_module, *args):
        assert self.steps[-1] == pl_module.env_steps == trainer.callback_metrics["step"]


def test_callbacks_see_the_new_count_and_a_second_fit_counts_from_zero(make_trainer):
    one, other = Seen(), type("Other", (Seen,), {})()
    trainer, module, data = make_trainer(callbacks=[one, other]), PPO(**MODEL), RolloutDataModule(**DATA)
    for fits in (1, 2):
        trainer.fit(module, data)
        assert one.steps == other.steps == [32, 64, 96] * fits
        assert module.rollouts_done == 3
    trainer.validate(module, RolloutDataModule(**DATA), verbose=False)
    assert module.env_steps == 96, "another data module changes no count"


@pytest.mark.parametrize(
    ("plan", "epoch", "episodes"),
    [
        (Plan(4, 128, 500_000, time_limit=500), 49, 4),
        (Plan(4, 128, 20_000, time_limit=10), 3, 2),
        (Plan(64, 128, 409_600, time_limit=10), 3, 10),
        (Plan(4, 128, 20_000, time_limit=500), 39, 3),
        (Plan(4, 128, 20_000), 39, 2),
        (Plan(4, 128, 50_000, time_limit=500), 19, 2),  # at least five evaluations
        (Plan(4, 128, 20_000, given_rollouts=39, given_episodes=4), 39, 4),
        (Plan(4, 128, 20_000, given_episodes=4), 2, 4),
        (Plan(4, 128, 20_000, given_rollouts=5, time_limit=200), 5, 2),
    ],
)
def test_a_plan_has_about_twenty_epochs_whose_evaluations_take_a_tenth_of_the_steps(plan, epoch, episodes):
    assert plan.num_rollouts == plan.total_timesteps // (plan.num_envs * plan.num_steps)
    assert (plan.rollouts_per_epoch, plan.eval_episodes) == (epoch, episodes)
