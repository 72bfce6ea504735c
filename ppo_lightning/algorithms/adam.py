"""The state of Adam as tensors, for updates that are compiled."""

from typing import Any

import torch
from torch import Tensor

Tensors = list[Tensor]


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups that require gradients."""
    return [x for group in optimizer.param_groups for x in group["params"] if x.requires_grad]


def adam_state(optimizer: torch.optim.Adam) -> list[Tensors]:
    """Return parameters, moments, squares and step counts of an Adam, whose state may not exist yet."""
    group, parameters = optimizer.param_groups[0], trained_parameters(optimizer)
    for parameter in parameters:
        if parameter not in optimizer.state:
            device = parameter.device if group["fused"] or group["capturable"] else "cpu"
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            step = torch.zeros((), device=device, dtype=torch.float32)
            optimizer.state[parameter] = {"step": step} | moments
    states = [optimizer.state[parameter] for parameter in parameters]
    return [parameters, *([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))]


def state_and_settings(optimizer: torch.optim.Adam) -> tuple[Any, ...]:
    """Return :func:`adam_state` and the settings of this run for :meth:`minimize`."""
    settings = {key: optimizer.defaults[key] for key in ("lr", "eps", "weight_decay", "amsgrad", "maximize")}
    beta1, beta2 = optimizer.defaults["betas"]
    return *adam_state(optimizer), settings | {"beta1": beta1, "beta2": beta2}
