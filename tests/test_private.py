"""Private attributes of Lightning that no run of the package shows to do what their functions say.

After an update of Lightning, run the quick tests. If they pass, add the version to ``CHECKED_VERSIONS``.
"""

from datetime import timedelta

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from ppo_lightning import private
from ppo_lightning.private import CHECKED_VERSIONS


class Manual(BoringModel):
    """A model that steps its optimizer in ``training_step``, as PPO does."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class CountedTwice(Manual):
    """A model that counts one optimizer step beside the one that Lightning counts."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.step()
        self.after_own_step = self.trainer.global_step
        with private.counted_step(optimizer):
            pass
        self.after_counted_step = self.trainer.global_step


def test_the_installed_version_has_been_checked():
    assert L.__version__ in CHECKED_VERSIONS, "run the quick tests, then add the version to CHECKED_VERSIONS"


def test_a_module_has_a_trainer_during_fit_only(make_trainer):
    class Asking(BoringModel):
        def on_train_start(self):
            self.had_trainer = private.has_trainer(self)

    model = Asking()
    assert not private.has_trainer(model)
    with pytest.raises(RuntimeError):
        _ = model.trainer
    make_trainer(max_epochs=1, limit_train_batches=1).fit(model)
    assert model.had_trainer


def test_fast_dev_run_without_the_step_limit_takes_every_step(make_trainer):
    class ManySteps(Manual):
        def __init__(self, remove):
            super().__init__()
            self.remove = remove
            self.batches = 0

        def setup(self, stage):
            if self.remove:
                private.replace_defaults(self.trainer)

        def training_step(self, batch, batch_idx):
            self.batches += 1
            for _ in range(3):
                self.optimizers().step()

    limited, unlimited = ManySteps(remove=False), ManySteps(remove=True)
    for model in (limited, unlimited):
        trainer = make_trainer(fast_dev_run=2)
        trainer.fit(model)
    assert limited.batches == 1, "Lightning stops after two optimizer steps, which the first batch takes"
    assert unlimited.batches == 2
    assert trainer.global_step == 6


def test_a_counted_step_raises_the_global_step_by_one(make_trainer):
    model = CountedTwice()
    trainer = make_trainer(max_epochs=1, limit_train_batches=1)
    trainer.fit(model)
    assert (model.after_own_step, model.after_counted_step) == (1, 2)
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
    assert progress.ready == progress.completed == 2


@pytest.mark.parametrize(
    ("options", "by_time", "steps"),
    [
        ({"train_time_interval": timedelta(minutes=5)}, True, 0),
        ({"every_n_train_steps": 7}, False, 7),
        ({"every_n_epochs": 1}, False, 0),
    ],
)
def test_the_interval_of_a_model_checkpoint_is_read(options, by_time, steps):
    checkpoint = ModelCheckpoint(**options)
    assert private.saves_by_time(checkpoint) is by_time
    assert private.steps_between_saves(checkpoint) == steps
