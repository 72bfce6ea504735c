"""The update of a minibatch as one compiled graph."""

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.exc import GPUTooOldForTriton, InductorError, TritonMissing
from torch.optim.adam import adam as guarded_adam

from ppo_lightning.algorithms.graphs import recorded
from ppo_lightning.algorithms.minibatches import Minibatch, mean_of
from ppo_lightning.errors import ConfigError, first_line

State = dict[str, list[Tensor]]
Loss = Callable[[Minibatch], tuple[Tensor, dict[str, Tensor]]]
CHECK_EVERY = 1000  # updates
COMPILER_ERRORS = InductorError, TritonMissing, GPUTooOldForTriton, OSError
FIRST_REPLAY = 2  # of a CUDA graph, which is recorded at the second call
# Without its wrapper, which lets nothing compile a state that is on a GPU and not `capturable`. The capturable formula is 0 / 0
# at a learning rate of 0; the graph of the plain one reads the state where it lies, too.
adam: Any = inspect.unwrap(guarded_adam)


def compile_anew(method: Callable[..., Any], fullgraph: bool = True) -> Any:
    """Compiles a method for this object alone; ``fullgraph`` as for ``torch.compile``.

    Graphs belong to the code of a function. Shared by all objects of a class, they would be taken for each other where only a
    method differs, and after eight of them (runs in a notebook, say) PyTorch compiles no more.

    Raises:
        ConfigError: At the first call: the method cannot be compiled on this machine.
    """
    function = method.__func__  # type: ignore[attr-defined]
    code, about = function.__code__.replace(), (function.__name__, function.__defaults__, function.__closure__)
    copy = types.FunctionType(code, function.__globals__, *about)
    compiled = torch.compile(types.MethodType(copy, method.__self__), fullgraph=fullgraph)  # type: ignore[attr-defined]

    def call(*args: Any) -> Any:
        try:
            return compiled(*args)
        except (InductorError, TritonMissing, GPUTooOldForTriton, OSError) as error:
            raise ConfigError(
                f"model.compile does not work here ({first_line(error)}): install g++ (on a GPU, Triton) and make"
                " PyTorch's cache writable, or leave model.compile off."
            ) from error

    return call


class CompiledUpdate:
    """Loss, gradients, clipping and Adam of a minibatch in one graph, for a single device.

    It works on the parameters and on the optimizer's own state, so that a checkpoint of it is one of the eager update,
    and gives the same weights to float tolerance. A small network's eager update is mostly the cost of calling some 150
    operations; here it is one call. Lightning's hooks around backward and the optimizer's step do not run, and no
    parameter has a ``grad``.

    At the first and the third of every thousand calls the loss is computed without the compiler, too: ``drift`` is the largest
    difference between their parts, in proportion to 1 + the part.

    Args:
        module: Has ``loss``, from a minibatch to the loss and its detached parts. Nothing in it may depend on the iteration
            but tensors.
        optimizer: Adam, over parameters of the module.
        max_grad_norm: As for PPO.
        cuda_graphs: Record what the GPU does for a minibatch that is not in parts, and launch that from the third call on.

    Raises:
        ConfigError: The optimizer is another one.
    """

    def __init__(self, module: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float, cuda_graphs: bool = False) -> None:
        group = optimizer.param_groups[0]
        plain = not (group.get("weight_decay") or group.get("amsgrad") or group.get("maximize"))
        if type(optimizer) is not torch.optim.Adam or len(optimizer.param_groups) > 1 or not plain:
            raise ConfigError(
                "model.compile takes torch.optim.Adam without weight decay, AMSGrad or several groups, and configure_optimizers"
                f" gives {type(optimizer).__name__}: leave model.compile off."
            )
        if cuda_graphs and not group.get("fused"):  # its count of steps would be on the CPU, out of the graph's sight
            raise ConfigError("model.cuda_graphs takes torch.optim.Adam with fused=True: leave it off.")
        self._optimizer, self._max_grad_norm, self._holder = optimizer, max_grad_norm, _Holder(module)
        self._params = [parameter for parameter in group["params"] if parameter.requires_grad]
        self._detached = [parameter.detach() for parameter in self._params]
        names = {parameter: name for name, parameter in self._holder.named_parameters()}
        self._names = [names[parameter] for parameter in self._params]
        self._constants = (*group["betas"], group["eps"])
        self._lr = torch.zeros((), device=self._params[0].device)
        self._calls, self.drift, self._cuda_graphs = 0, 0.0, cuda_graphs
        self._whole: Any = compile_anew(self._update)
        self._gradients: Any = compile_anew(self._differentiate)
        self._step: Any = compile_anew(self._apply)

    @property
    def ready(self) -> bool:
        """Whether Adam has made its state, which it does in its first step."""
        return len(self._optimizer.state) == len(self._params)

    def __call__(self, parts: Sequence[Minibatch]) -> dict[str, Tensor]:
        """Takes one step of Adam on a minibatch and returns the parts of its loss.

        Args:
            parts: The minibatch in equal parts, whose gradients are added; tensors [B, ...].
        """
        self._lr.fill_(self._optimizer.param_groups[0]["lr"])
        expected = self._eager(parts) if self._calls % CHECK_EVERY in (0, FIRST_REPLAY) else None
        self._calls += 1
        with torch.no_grad():
            metrics = self._accumulate(parts) if len(parts) > 1 else self._in_one(parts[0])
        if expected is not None:
            self.drift = max(float((metrics[key] - value).abs() / (1 + value.abs())) for key, value in expected.items())
        return metrics

    @torch.no_grad()
    def _eager(self, parts: Sequence[Minibatch]) -> dict[str, Tensor]:
        """Returns the parts of the loss as they are without a compiler."""
        return mean_of([self._holder(part)[1] for part in parts])

    @functools.cached_property
    def _state(self) -> State:
        """Adam's own tensors, parameter by parameter."""
        return {key: [self._optimizer.state[p][key] for p in self._params] for key in ("exp_avg", "exp_avg_sq", "step")}

    @functools.cached_property
    def _in_one(self) -> Callable[[Minibatch], dict[str, Tensor]]:
        update = functools.partial(self._whole, self._detached, self._state, self._lr)
        return recorded(update) if self._cuda_graphs else update

    def _update(self, params: list[Tensor], state: State, lr: Tensor, minibatch: Minibatch) -> dict[str, Tensor]:
        grads, metrics = self._differentiate(params, minibatch)
        self._apply(params, state, lr, grads)
        return metrics

    def _accumulate(self, parts: Sequence[Minibatch]) -> dict[str, Tensor]:
        grads, metrics = self._gradients(self._detached, parts[0])
        sums = list(metrics.values())
        for part in parts[1:]:
            more_grads, metrics = self._gradients(self._detached, part)
            torch._foreach_add_([*grads, *sums], [*more_grads, *metrics.values()])
        torch._foreach_div_([*grads, *sums], len(parts))
        self._step(self._detached, self._state, self._lr, grads)
        return dict(zip(metrics, sums, strict=True))

    def _differentiate(self, params: list[Tensor], minibatch: Minibatch) -> tuple[list[Tensor], dict[str, Tensor]]:
        def loss(params: list[Tensor]) -> Any:
            return torch.func.functional_call(self._holder, dict(zip(self._names, params, strict=True)), (minibatch,))

        grads, (_, metrics) = torch.func.grad_and_value(loss, has_aux=True)(params)
        return grads, metrics

    def _apply(self, params: list[Tensor], state: State, lr: Tensor, grads: list[Tensor]) -> None:
        beta1, beta2, eps = self._constants
        norm = torch.nn.utils.get_total_norm(grads, foreach=False)  # which the compiler merges with what comes before it
        scale = (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_ does
        adam(
            params,
            [grad * scale for grad in grads],
            state["exp_avg"],
            state["exp_avg_sq"],
            [],
            state["step"],
            foreach=False,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=0.0,
            eps=eps,
            maximize=False,
        )


class _Holder(nn.Module):
    """Lets ``functional_call`` put other parameters into the module while its loss is computed."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.module.loss(minibatch)
