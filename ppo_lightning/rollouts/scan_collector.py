"""The rollout collector for environments that are functions of tensors: a rollout is one graph."""

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch._higher_order_ops.scan import scan

from ppo_lightning.envs.tensor_env import State, TensorEnv
from ppo_lightning.rollouts.tensor_collector import TensorCollector

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

    def __init__(self, *args: Any, compile: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scan: Any = torch.compile(self._steps, fullgraph=True) if compile else self._steps_in_python

    @torch.no_grad()
    def rollout(self) -> TensorDictBase:
        """Collect one rollout [N, T], see :meth:`TensorCollector.rollout`."""
        env, device = self.env, self.agent.device
        if self._observation is None:
            self._observation = env.reset_tensors(None)
        noise = self.agent.noise((self.num_steps, self._total_envs), self._generator)[:, self._rows]
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
            "following": step.observation.clone(),
            "reward": step.reward,
            "terminated": step.terminated,
            "truncated": step.truncated,
        }
        return (tuple(x.clone() for x in state), begun.clone()), output

    def _steps(self, carry: Carry, noise: Tensor) -> tuple[Carry, dict[str, Tensor]]:
        return scan(self._step, carry, noise)

    def _steps_in_python(self, carry: Carry, noise: Tensor) -> tuple[Carry, dict[str, Tensor]]:
        outputs = []
        for row in noise:
            carry, output = self._step(carry, row)
            outputs.append(output)
        return carry, {key: torch.stack([output[key] for output in outputs]) for key in outputs[0]}
