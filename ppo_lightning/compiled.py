"""The update of a minibatch as one compiled graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from ppo_lightning.errors import ConfigError, first_line

Minibatch = dict[str, Tensor]
Loss = Callable[[Minibatch], tuple[Tensor, dict[str, Tensor]]]


class CompiledUpdate:
    """Loss, gradients, clipping and Adam of a minibatch in one graph, for a single device.

    It works on the parameters and on the optimizer's own state, so that a checkpoint of it is one of the eager update,
    and gives the same weights to float tolerance. A small network's eager update is mostly the cost of calling some 150
    operations; here it is one call. Lightning's hooks around backward and the optimizer's step do not run, and no
    parameter has a ``grad``.

    Args:
        module: Has ``loss``, from a minibatch to the loss and its detached parts. Nothing in it may depend on the iteration
            but tensors.
        optimizer: Adam, over parameters of the module.
        max_grad_norm: As for PPO.

    Raises:
        ConfigError: The optimizer is another one.
    """

    def __init__(self, module: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> None:
        group = optimizer.param_groups[0]
        plain = not (group.get("weight_decay") or group.get("amsgrad") or group.get("maximize"))
        if type(optimizer) is not torch.optim.Adam or len(optimizer.param_groups) > 1 or not plain:
            raise ConfigError(
                "model.compile takes torch.optim.Adam without weight decay, AMSGrad or several groups, and configure_optimizers"
                f" gives {type(optimizer).__name__}: leave model.compile off."
            )
        self._optimizer, self._max_grad_norm, self._holder = optimizer, max_grad_norm, _Holder(module)
        self._params = [parameter for parameter in group["params"] if parameter.requires_grad]
        self._detached = [parameter.detach() for parameter in self._params]
        names = {parameter: name for name, parameter in self._holder.named_parameters()}
        self._names = [names[parameter] for parameter in self._params]
        self._lr = torch.zeros((), device=self._params[0].device)
        self._graph = torch.compile(self._update, fullgraph=True)

    @property
    def ready(self) -> bool:
        """Whether Adam has made its state, which it does in its first step."""
        return len(self._optimizer.state) == len(self._params)

    def __call__(self, minibatch: Minibatch) -> dict[str, Tensor]:
        """Takes one step of Adam and returns the parts of the loss.

        Args:
            minibatch: Tensors [B, ...], always of the same shapes.

        Raises:
            ConfigError: The graph cannot be compiled on this machine.
        """
        group = self._optimizer.param_groups[0]
        self._lr.fill_(group["lr"])
        state = [self._optimizer.state[parameter] for parameter in self._params]
        exp_avgs, exp_avg_sqs, steps = ([entry[key] for entry in state] for key in ("exp_avg", "exp_avg_sq", "step"))
        constants = (*group["betas"], group["eps"])
        try:
            with torch.no_grad():
                return self._graph(self._detached, exp_avgs, exp_avg_sqs, steps, self._lr, constants, minibatch)
        except torch._inductor.exc.InductorError as error:
            raise ConfigError(
                f"model.compile does not work here ({first_line(error)}): install g++, or leave model.compile off."
            ) from error

    def _update(
        self,
        params: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
        lr: Tensor,
        constants: tuple[float, float, float],
        minibatch: Minibatch,
    ) -> dict[str, Tensor]:
        beta1, beta2, eps = constants

        def loss(params: list[Tensor]) -> Any:
            return torch.func.functional_call(self._holder, dict(zip(self._names, params, strict=True)), (minibatch,))

        grads, (_, metrics) = torch.func.grad_and_value(loss, has_aux=True)(params)
        norm = torch.nn.utils.get_total_norm(grads)
        scale = (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_ does
        adam(
            params,
            [grad * scale for grad in grads],
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            foreach=False,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=0.0,
            eps=eps,
            maximize=False,
        )
        return metrics


class _Holder(nn.Module):
    """Lets ``functional_call`` put other parameters into the module while its loss is computed."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.module.loss(minibatch)
