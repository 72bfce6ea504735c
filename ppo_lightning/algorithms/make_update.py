"""Choose the update for a run."""

from ppo_lightning import private
from ppo_lightning.algorithms.synchronized_update import SynchronizedUpdate
from ppo_lightning.algorithms.update import CompiledUpdate, EagerUpdate, Loss
from ppo_lightning.rollouts.learner import MinibatchLearner


def make_update(module: MinibatchLearner, loss: Loss) -> EagerUpdate | CompiledUpdate:
    """Return the update with a loss of a module in a fit, compiled if the module's settings say so."""
    compiled, several = module.hparams.compile, module.trainer.world_size > 1
    exchanges = not several or private.averages_gradients(module.trainer)
    whole = compiled and exchanges and module.agent.traceable
    eager = EagerUpdate(module, loss, compile_loss=compiled and not whole)
    if not whole:
        return eager
    return SynchronizedUpdate(module, eager) if several else CompiledUpdate(module, eager)
