"""Two runs in one process: the first leaves nothing behind."""

import pytest
import torch

from ppo_lightning import PPO, ConfigError, RolloutDataModule
from ppo_lightning.algorithms.update import EagerUpdate
from ppo_lightning.callbacks import Threads
from tests.helpers import CARTPOLE, MODEL, Recorder


class Interrupted(Recorder, PPO):
    """Recorder whose second iteration raises an error if it ``fails``."""

    fails = False

    def training_step(self, rollout, batch_idx):
        self.threads = torch.get_num_threads()
        if self.fails and batch_idx == 1:
            raise RuntimeError("interrupted")
        super().training_step(rollout, batch_idx)


def test_a_second_fit_starts_at_the_learning_rate_again(make_trainer):
    module = Interrupted(learning_rate=1e-3, anneal_lr=False, desired_kl=10.0)
    for _ in range(2):
        make_trainer().fit(module, RolloutDataModule(**CARTPOLE))
        assert module.learning_rates == pytest.approx([1e-3, 1.5e-3, 2.25e-3])


def test_an_exception_leaves_nothing_of_the_run_behind(make_trainer, monkeypatch):
    """Compiled graphs and thread counts are dropped, so that the next run is an ordinary one."""
    nothing = [{"approx_kl": torch.zeros(())}]
    monkeypatch.setattr(PPO, "update", lambda self, minibatches: nothing)  # nothing is compiled
    module = Interrupted(**MODEL, compile=True)
    module.fails = True
    with pytest.raises(RuntimeError, match="interrupted"):
        make_trainer(callbacks=[Threads(2)]).fit(module, RolloutDataModule(**CARTPOLE))
    assert module.threads == 2
    assert torch.get_num_threads() == 1
    assert type(module.optimize) is EagerUpdate
    assert module.optimize._loss == module.total_loss


def test_a_run_that_is_refused_before_setup_says_why(make_trainer):
    """Teardown works although setup did not finish."""
    with pytest.raises(ConfigError, match=r"trainer.precision is '64-true'"):
        make_trainer(precision="64-true").fit(PPO(), RolloutDataModule(**CARTPOLE))
