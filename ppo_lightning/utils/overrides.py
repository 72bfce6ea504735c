"""Overrides of hooks without ``super()``."""

import inspect
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from ppo_lightning.errors import ConfigError

# Prefixes of the methods in which this package's modules and data modules do something for the run
HOOKS = (
    "on_",
    "begin_",
    "end_",
    "setup",
    "teardown",
    "train_dataloader",
    "configure_callbacks",
    "configure_model",
)
# Lightning calls them in its own optimization only.
NEVER_CALLED = (
    "configure_gradient_clipping", "lr_scheduler_step", "on_before_zero_grad", "optimizer_step",
    "optimizer_zero_grad",
)  # fmt: skip


def warn_of_lost_hooks(instance: Any) -> None:
    """Name each method of a user's subclass that loses a hook of this package, or that is never called.

    Raises:
        ConfigError: The method is ``configure_model``, which makes the agent.
    """
    classes = type(instance).__mro__
    base = next(cls for cls in classes if cls.__module__.startswith("ppo_lightning."))
    for cls in classes[: classes.index(base)]:
        for name, method in vars(cls).items():
            if name in NEVER_CALLED:
                rank_zero_warn(
                    f"{cls.__qualname__}.{name} is never called, because training_step has the optimizer:"
                    " override update or configure_optimizers, see docs/iteration.md."
                )
            ours: Any = getattr(base, name, None)
            is_ours = getattr(ours, "__module__", "").startswith("ppo_lightning.")
            code = getattr(inspect.unwrap(method), "__code__", None)
            if not (name.startswith(HOOKS) and is_ours and code is not None):
                continue
            if inspect.unwrap(ours).__code__.co_names and name not in code.co_names:  # ours does something
                purpose = (ours.__doc__ or "").partition("\n")[0].replace("`", "")
                message = (
                    f"{cls.__qualname__}.{name} does not call super().{name}(), so that the run lacks what it"
                    f" does: {purpose}"
                )
                if name == "configure_model":  # no run goes on without an agent
                    raise ConfigError(message)
                rank_zero_warn(message)
