"""Eager and compiled updates with minibatches."""

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ppo_lightning.algorithms.adam import adam_state, trained_parameters
from ppo_lightning.algorithms.minibatches import Minibatch, equal_parts, mean_of
from ppo_lightning.errors import ConfigError
from ppo_lightning.private import counted_step, foreach_add_, foreach_copy_, foreach_div_
from ppo_lightning.rollouts.learner import MinibatchLearner
from ppo_lightning.utils import collectives
from ppo_lightning.utils.compiler import compile_per_instance, compile_scan, scan
from ppo_lightning.utils.rounding import tolerance

Metrics = dict[str, Tensor]  # parts of a loss, scalars
Loss = Callable[[Minibatch], tuple[Tensor, Metrics]]
Tensors = list[Tensor]
Rows = tuple[Tensor, Minibatch]
Step = tuple[Tensors, Metrics]  # in a compiled function, an annotation must be a name
CHECK_EVERY = 1000  # updates
CPP_PARAMETERS = 16  # an MLP has 12 or 13


class EagerUpdate:
    """Take an optimizer step on each minibatch through Lightning: backward, clipping, step.

    Args:
        module: The module to update.
        loss: Method of the module that maps a minibatch to the loss and its detached parts.
        compile_loss: Compile the loss, where several ranks or a memory keep the update from being one graph.
    """

    def __init__(self, module: MinibatchLearner, loss: Loss, compile_loss: bool = False) -> None:
        self.module = module
        self.loss = loss
        self._loss: Loss = compile_per_instance(loss, module.agent.traceable) if compile_loss else loss

    def __call__(self, minibatches: Iterable[Minibatch]) -> list[Metrics]:
        """Take a step on one minibatch [B, ...] after the other, and return the parts of each loss."""
        return [self._update(minibatch) for minibatch in minibatches]

    def _update(self, minibatch: Minibatch) -> Metrics:
        module = self.module
        optimizer: Any = module.optimizers()
        # Gradients of the parts are added. The result is the same, and the activations fit into the cache.
        parts = equal_parts(minibatch, module.microbatch_size)
        without_exchange = getattr(module.trainer.model, "no_sync", nullcontext)
        optimizer.zero_grad()
        metrics = []
        for number, part in enumerate(parts, start=1):
            with nullcontext() if number == len(parts) else without_exchange():
                loss, parts_of_loss = self._loss(part)
                # detail A2
                # The last part averages the gradients of all ranks. A division by 1 takes 20 us.
                module.manual_backward(loss / len(parts) if len(parts) > 1 else loss)
            metrics.append(parts_of_loss)
        # detail 11
        module.clip_gradients(optimizer, module.hparams.max_grad_norm, "norm")
        optimizer.step()
        return metrics[0] if len(metrics) == 1 else mean_of(metrics)


class CompiledUpdate:
    """Compute loss, gradients, clipping and Adam of all minibatches in one graph, on a single device.

    The graph is a scan over the minibatches, so that it is compiled for one of them and its guards are paid
    once per iteration, or once per epoch if ``target_kl`` may end the iteration. Minibatches of an agent with
    convolutions, of different sizes, or that are differentiated in parts have calls of their own, of a graph
    of the gradients and one of clipping and Adam. Weights equal those of the eager update to float tolerance,
    and checkpoints are interchangeable. The eager update of a small network is dominated by the overhead of
    about 150 operations per minibatch. Lightning's hooks around backward and the optimizer's step do not run,
    and no parameter has a ``grad``.

    Once in about a thousand updates, the loss of a minibatch is also computed without the compiler. If the
    two losses differ, the run continues eagerly, with a warning.

    Args:
        module: The module to update.
        eager: The same update without a compiler. In its loss, only tensors may depend on the iteration.

    Raises:
        ConfigError: The optimizer is not a plain Adam.
    """

    def __init__(self, module: MinibatchLearner, eager: EagerUpdate) -> None:
        self.module = module
        self.eager = eager
        optimizer = module.trainer.optimizers[0]
        group = optimizer.param_groups[0]
        plain = not (group.get("weight_decay") or group.get("amsgrad") or group.get("maximize"))
        if type(optimizer) is not torch.optim.Adam or len(optimizer.param_groups) > 1 or not plain:
            raise ConfigError(
                "model.compile takes torch.optim.Adam without weight decay, AMSGrad or several groups, and"
                f" configure_optimizers gives {type(optimizer).__name__}: leave model.compile off."
            )
        self._optimizer = optimizer
        self._holder = _Holder(module, eager.loss)
        self._params, *moments, self._steps = adam_state(optimizer)
        self._tensors = [[parameter.detach() for parameter in self._params], *moments]
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._holder.named_parameters()}
        self._names = [names[parameter] for parameter in self._params]
        self._constants = (*group["betas"], group["eps"])
        self._calls = 0
        self._drift = 0.0
        self._tolerance = tolerance(str(module.trainer.precision), module.device)
        self._length: int | None = None  # number of minibatches for which the scan is compiled
        # The loop of two runs with RND compiles for 140 s in C++, and for 57 s in Python.
        cpp_loop = self._params[0].device.type == "cpu" and len(self._params) <= CPP_PARAMETERS
        self._scan: Any = compile_scan(self._epoch, cpp_loop)
        self._gradients: Any = compile_per_instance(self._differentiate)
        self._step: Any = compile_per_instance(self._apply)

    def __call__(self, minibatches: Iterable[Minibatch]) -> list[Metrics]:
        """Update the weights, see :meth:`EagerUpdate.__call__`."""
        if self._drift > self._tolerance:
            return self.eager(minibatches)
        group, parameters = self._optimizer.param_groups[0], trained_parameters(self._optimizer)
        constants = *group["betas"], group["eps"]
        if [*map(id, parameters)] != [*map(id, self._params)] or constants != self._constants:
            raise ConfigError(
                "model.compile takes the parameters that require gradients and the betas when the run starts,"
                " and these have changed: leave it off, or set OneCycleLR's cycle_momentum to False."
            )
        self._done = torch.stack(self._steps).tolist()
        remaining = iter(minibatches)
        first = next(remaining, None)
        if first is None:
            return []
        # The scan of convolutions would compile for more than a minute.
        convolutions = any(parameter.ndim > 2 for parameter in self._params)
        if convolutions or len(equal_parts(first, self.module.microbatch_size)) > 1:
            # Several minibatches may not fit into memory.
            return [self._compiled([minibatch])[0] for minibatch in itertools.chain([first], remaining)]
        return self._compiled([first, *remaining])

    def _compiled(self, minibatches: Sequence[Minibatch]) -> list[Metrics]:
        expected = None
        if -self._calls % CHECK_EVERY < len(minibatches):
            parts = equal_parts(minibatches[0], self.module.microbatch_size)
            with torch.no_grad():
                expected = mean_of([self._holder(part)[1] for part in parts])
        self._calls += len(minibatches)
        with torch.no_grad():
            if self._can_scan(minibatches):
                metrics = self._scan_over(minibatches)
            else:
                metrics = [self._one(minibatch) for minibatch in minibatches]
        if expected is not None:
            pairs = [(x, metrics[0][key]) for key, x in expected.items()]
            drift = max(float((compiled - x).abs() / (1 + x.abs())) for x, compiled in pairs)
            # All ranks continue in the same way: those of the eager update would wait for the others.
            self._drift = float(collectives.gather(torch.tensor(drift)).max())
            if self._drift > self._tolerance:
                warnings.warn(
                    f"The compiled loss is off by {self._drift:.2g}: the run continues without it.",
                    stacklevel=2,
                )
        return metrics

    def _can_scan(self, minibatches: Sequence[Minibatch]) -> bool:
        sizes = {len(minibatch["action"]) for minibatch in minibatches}
        if len(minibatches) == 1 or len(sizes) > 1:
            return False
        # The scan carries all parameters as one vector, with one step count.
        if len(set(self._done)) > 1 or len({parameter.dtype for parameter in self._params}) > 1:
            return False
        # Minibatches without two valid steps are left out. A graph for each number of them would take long.
        self._length = self._length or len(minibatches)
        return len(minibatches) == self._length

    def _scan_over(self, minibatches: Sequence[Minibatch]) -> list[Metrics]:
        stacked = {key: torch.stack([rows[key] for rows in minibatches]) for key in minibatches[0]}
        tensors, metrics = self._scan(self._tensors, self._rates(len(minibatches), self._done[:1]), stacked)
        for old, new in zip(self._tensors, tensors, strict=True):
            foreach_copy_(old, new)
        optimizer = self.module.optimizers()
        for _ in minibatches:
            with counted_step(optimizer):
                pass
        rows = zip(*(values.unbind() for values in metrics.values()), strict=True)
        return [dict(zip(metrics, scalars, strict=True)) for scalars in rows]

    def _one(self, minibatch: Minibatch) -> Metrics:
        parts = equal_parts(minibatch, self.module.microbatch_size)
        grads, metrics = self._gradients(self._tensors[0], parts[0])
        sums = list(metrics.values())
        for part in parts[1:]:
            more_grads, metrics = self._gradients(self._tensors[0], part)
            foreach_add_([*grads, *sums], [*more_grads, *metrics.values()])
        if len(parts) > 1:
            foreach_div_([*grads, *sums], len(parts))
        grads = self._averaged(grads)
        with counted_step(self.module.optimizers()):
            self._step(self._tensors, self._rates(1, self._done)[0], grads)
        return dict(zip(metrics, sums, strict=True))

    def _averaged(self, grads: Tensors) -> Tensors:
        return grads  # of one rank

    def _rates(self, count: int, done: list[float]) -> Tensor:
        """Count Adam's steps; return step size and correction of the second moment, [count, 2, len(done)].

        A graph would compute them anew for each element of the parameters.
        """
        beta1, beta2, _ = self._constants
        lr = float(self._optimizer.param_groups[0]["lr"])
        steps = [before + n for n in range(1, count + 1) for before in done]
        rates = [[lr / (1 - beta1**n) for n in steps], [math.sqrt(1 - beta2**n) for n in steps]]
        foreach_add_(self._steps, count)
        self._done = [before + count for before in self._done]
        device = self._params[0].device
        pinned = device.type == "cuda"  # no wait for the GPU
        tensor = torch.tensor(rates, dtype=torch.float32, device="cpu", pin_memory=pinned)
        return tensor.to(device, non_blocking=True).view(2, count, -1).transpose(0, 1)

    def _epoch(self, tensors: list[Tensors], rates: Tensor, stacked: Minibatch) -> tuple[Any, Metrics]:
        """Return copies of the tensors, updated with minibatches [count, B, ...].

        The scan carries each list as one vector, so that Adam is one loop instead of one per parameter.
        """

        def step(carry: Tensors, rows: Rows) -> Step:
            # A scan takes functions without effects, and outputs that share no memory with inputs.
            vectors = [vector.clone() for vector in carry]
            rates, minibatch = rows
            grads, metrics = self._differentiate(self._views(carry[0]), minibatch)
            self._apply([[vector] for vector in vectors], rates, [vector_of(grads)])
            return vectors, {key: value.clone() for key, value in metrics.items()}

        vectors, metrics = scan(step, [vector_of(parts) for parts in tensors], (rates, stacked))
        return [self._views(vector) for vector in vectors], metrics

    def _views(self, vector: Tensor) -> Tensors:
        """Return the parts of a vector in the shapes of the parameters."""
        parts = vector.split([parameter.numel() for parameter in self._params])
        return [part.view_as(parameter) for part, parameter in zip(parts, self._params, strict=True)]

    def _differentiate(self, params: Tensors, minibatch: Minibatch) -> tuple[Tensors, Metrics]:
        def loss(params: Tensors) -> Any:
            named = dict(zip(self._names, params, strict=True))
            return torch.func.functional_call(self._holder, named, (minibatch,))

        grads, (_, metrics) = torch.func.grad_and_value(loss, has_aux=True)(params)
        return grads, metrics

    def _apply(self, tensors: list[Tensors], rates: Tensor, grads: Tensors) -> None:
        """Clip the gradients and take Adam's step, in place; ``rates`` are those of :meth:`_rates`."""
        beta1, beta2, eps = self._constants
        # Without `foreach`, the compiler fuses the norm with the backward pass.
        norm = torch.nn.utils.get_total_norm(grads, foreach=False)
        scale = (self.module.hparams.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_ does
        for param, mean, square, grad, size, root in zip(*tensors, grads, *rates, strict=True):
            clipped = grad * scale
            mean.lerp_(clipped, 1 - beta1)
            square.mul_(beta2).addcmul_(clipped, clipped, value=1 - beta2)
            param.sub_(size * mean / (square.sqrt() / root + eps))


def vector_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors one after the other, flat."""
    return torch.cat([tensor.flatten() for tensor in tensors])


class _Holder(nn.Module):
    """Module whose ``forward`` is the loss, so that ``functional_call`` can replace the parameters."""

    def __init__(self, module: MinibatchLearner, loss: Loss) -> None:
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self, minibatch: Minibatch) -> tuple[Tensor, Metrics]:
        return self.loss(minibatch)
