"""The compiled update on several ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch import distributed as dist

from ppo_lightning import private
from ppo_lightning.algorithms.minibatches import Minibatch
from ppo_lightning.algorithms.update import CompiledUpdate, EagerUpdate, Metrics, Tensors, vector_of
from ppo_lightning.private import counted_step, foreach_copy_
from ppo_lightning.rollouts.learner import MinibatchLearner
from ppo_lightning.utils import collectives
from ppo_lightning.utils.compiler import compile_per_instance


class SynchronizedUpdate(CompiledUpdate):
    """Average the gradient of each minibatch over the ranks, between two compiled graphs.

    The first graph leads from a minibatch to the gradient as one vector. One ``all_reduce`` over the process
    group of Lightning's strategy averages the vector. The second graph clips it and takes Adam's step. Eager
    DDP has hooks for each parameter, and about 150 operations.

    Each minibatch is one exchange of a vector of the same size, whether it is differentiated in parts or not.
    The ranks decide together what changes this: the check of the compiled loss.

    If DDP has a communication hook, the update is eager.
    """

    def __init__(self, module: MinibatchLearner, eager: EagerUpdate) -> None:
        super().__init__(module, eager)
        self._ranks = module.trainer.world_size
        self._group: Any = module.trainer.model.process_group  # type: ignore[union-attr]
        self._gradient = compile_per_instance(self._gradient_vector)

    def __call__(self, minibatches: Iterable[Minibatch]) -> list[Metrics]:
        """Update the weights, see :meth:`EagerUpdate.__call__`."""
        if not private.averages_gradients(self.module.trainer):  # a hook that came after the start
            return self.eager(minibatches)
        return super().__call__(minibatches)

    def _can_scan(self, minibatches: Sequence[Minibatch]) -> bool:
        self._length = len(minibatches)  # a loop in Python takes any number
        return super()._can_scan(minibatches)

    def _scan_over(self, minibatches: Sequence[Minibatch]) -> list[Metrics]:
        vectors = [vector_of(parts) for parts in self._tensors]
        optimizer = self.module.optimizers()
        metrics = []
        rates = self._rates(len(minibatches), self._done[:1])
        for minibatch, rate in zip(minibatches, rates, strict=True):
            grads, parts = self._gradient(vectors[0], minibatch)
            dist.all_reduce(grads, group=self._group)
            with counted_step(optimizer):
                self._step([[vector] for vector in vectors], rate, [grads])
            metrics.append(parts)
        for old, vector in zip(self._tensors, vectors, strict=True):
            foreach_copy_(old, self._views(vector))
        return metrics

    def _gradient_vector(self, vector: Tensor, minibatch: Minibatch) -> tuple[Tensor, Metrics]:
        """Return this rank's part of the averaged gradient, with the parameters as one vector."""
        grads, metrics = self._differentiate(self._views(vector), minibatch)
        return vector_of(grads) / self._ranks, metrics

    def _averaged(self, grads: Tensors) -> Tensors:
        return collectives.averaged(grads, self._group)
