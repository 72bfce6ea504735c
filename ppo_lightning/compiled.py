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
    operations; here it is one call.

    Args:
        agent: Whose parameters are trained.
        loss: From a minibatch to the loss and its detached parts; nothing in it may depend on the iteration but attributes
            that are tensors or floats.
        max_grad_norm: As for PPO.
    """

    def __init__(self, agent: nn.Module, loss: Loss, max_grad_norm: float) -> None:
        self._names = [f"agent.{name}" for name, _ in agent.named_parameters()]
        self._params = list(agent.parameters())
        self._detached = [parameter.detach() for parameter in self._params]
        self._holder, self._max_grad_norm = _Holder(agent, loss), max_grad_norm
        self._graph = torch.compile(self._update, fullgraph=True)
        self._lr = torch.zeros((), device=self._params[0].device)

    def __call__(self, optimizer: Any, minibatch: Minibatch) -> dict[str, Tensor]:
        """Takes one step of Adam and returns the parts of the loss.

        Args:
            optimizer: Lightning's, around an Adam that has taken a step before (its state exists).
            minibatch: Tensors [B, ...], always of the same shapes.

        Raises:
            ConfigError: The graph cannot be compiled on this machine.
        """
        (group,) = optimizer.param_groups
        optimizer._on_before_step()  # Lightning's count of steps, which optimizer.step() keeps otherwise
        self._lr.fill_(group["lr"])
        state = [optimizer.optimizer.state[parameter] for parameter in self._params]
        exp_avgs, exp_avg_sqs, steps = ([entry[key] for entry in state] for key in ("exp_avg", "exp_avg_sq", "step"))
        constants = (*group["betas"], group["eps"])
        try:
            with torch.no_grad():
                metrics = self._graph(self._detached, exp_avgs, exp_avg_sqs, steps, self._lr, constants, minibatch)
        except torch._inductor.exc.InductorError as error:
            raise ConfigError(
                f"model.compile does not work here ({first_line(error)}): install g++, or leave model.compile off."
            ) from error
        optimizer._on_after_step()
        return metrics

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
    """Lets ``functional_call`` put other parameters into the agent while the loss is computed."""

    def __init__(self, agent: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.agent, self.loss = agent, loss

    def forward(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(minibatch)
