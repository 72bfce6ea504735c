"""The rollout collector for environments that are functions of tensors: a rollout is one graph."""

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch._higher_order_ops.scan import scan

from ppo_lightning.envs.state import Row
from ppo_lightning.envs.tensor_env import State, TensorEnv
from ppo_lightning.rollouts.tensor_collector import TensorCollector
from ppo_lightning.utils.compiler import compile_per_instance

Carry = tuple[State, Tensor]  # states of the environments, observations to act on


class ScanCollector(TensorCollector):
    """Collector of rollouts [N, T] from a :class:`TensorEnv` with a ``transition``.

    The steps of a rollout are a scan. Compiled, the loop over the steps is inside the graph: the graph is
    compiled for one step, and its guards are paid once a rollout. There is no transfer between devices and no
    synchronization within a rollout.

    Args:
        *args: As for :class:`TensorCollector`. The agent has neither a memory nor running statistics of
            observations.
        compile: Compile the scan.
        **kwargs: As for :class:`TensorCollector`.
    """

    env: TensorEnv
    can_resume = True

    def __init__(self, *args: Any, compile: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scan: Any = compile_per_instance(self._steps) if compile else self._steps_in_python

    @torch.no_grad()
    def rollout(self) -> TensorDictBase:
        """Collect one rollout [N, T], see :meth:`TensorCollector.rollout`."""
        env, device = self.env, self.agent.device
        if self._observation is None:
            self._observation = env.rows(env.reset_tensors(None))
        noise = self.agent.noise((self.num_steps, self._total_envs), self._generator)[:, self._rows]
        if self.deterministic:
            noise.zero_()  # zero noise selects the mode
        with self.precision():
            (env.state, self._observation), steps = self._scan(
                (env.state, self._observation), noise.to(device)
            )
        following = {
            "observation": steps["following"],
            "reward": steps["reward"].unsqueeze(-1),
            "terminated": steps["terminated"].unsqueeze(-1),
            "truncated": steps["truncated"].unsqueeze(-1),
        }
        following["done"] = following["terminated"] | following["truncated"]
        keys = {key: steps[key] for key in ("observation", "action", "action_log_prob")}
        keys["state_value"] = steps["state_value"].unsqueeze(-1)
        shape = (self._observation.shape[0], self.num_steps)
        rollout = TensorDict(
            {key: x.transpose(0, 1) for key, x in keys.items()}
            | {"next": TensorDict({k: x.transpose(0, 1) for k, x in following.items()}, shape)},
            shape,
            device=device,
        )
        self._carrier = TensorDict({"observation": self._observation})
        self._require_finite(rollout)
        self._add_episodes(rollout["next"])
        self._frames += self.requested_frames_per_batch
        return rollout

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the action noise and the environments, which start afresh; return the next free seed."""
        self._observation = None
        return super().set_seed(seed, static_seed)

    def running(self) -> list[Row] | None:
        """Return the states of the N running episodes; None before the first rollout."""
        if self._observation is None:
            return None
        sums = {"discounted": self._discounted, **self._episode}
        tensors = {"state": self.env.state, "observation": (self._observation,)}
        return [
            {key: tuple(x[i].cpu() for x in values) for key, values in tensors.items()}
            | {name: float(values[i]) for name, values in sums.items()}
            for i in range(self._observation.shape[0])
        ]

    def resume(self, rows: list[Row]) -> None:
        """Resume the episodes that :meth:`running` returned."""
        columns = {
            key: tuple(torch.stack(tensors) for tensors in zip(*(row[key] for row in rows), strict=True))
            for key in ("state", "observation")
        }
        self.env.state = tuple(x.to(self.env.device) for x in columns["state"])
        self._observation = columns["observation"][0].to(self.agent.device)
        for name, sums in {"discounted": self._discounted, **self._episode}.items():
            sums.copy_(torch.tensor([row[name] for row in rows], dtype=sums.dtype))

    def _step(self, carry: Carry, noise: Tensor) -> tuple[Carry, dict[str, Tensor]]:
        """Act and step once."""
        state, observation = carry
        action, log_prob, value, _ = self.agent.act(observation, noise)
        state, step, begun = self.env.transition(state, self._for_environment(action))
        output = {
            "observation": observation.clone(),
            "action": action,
            "action_log_prob": log_prob,
            "state_value": value,
            "following": self.env.rows(step.observation).clone(),
            "reward": step.reward,
            "terminated": step.terminated,
            "truncated": step.truncated,
        }
        return (tuple(x.clone() for x in state), self.env.rows(begun).clone()), output

    def _steps(self, carry: Carry, noise: Tensor) -> tuple[Carry, dict[str, Tensor]]:
        return scan(self._step, carry, noise)

    def _steps_in_python(self, carry: Carry, noise: Tensor) -> tuple[Carry, dict[str, Tensor]]:
        outputs = []
        for row in noise:
            carry, output = self._step(carry, row)
            outputs.append(output)
        return carry, {key: torch.stack([output[key] for output in outputs]) for key in outputs[0]}
