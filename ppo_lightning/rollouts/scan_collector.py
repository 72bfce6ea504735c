"""The rollout collector for environments that are functions of tensors: a rollout is one graph."""

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from ppo_lightning.envs.state import Row
from ppo_lightning.envs.tensor_env import State, TensorEnv
from ppo_lightning.models import ActorCritic
from ppo_lightning.models.normalizers import deviation, merged, summary_of
from ppo_lightning.private import tree_map
from ppo_lightning.rollouts.storage import in_parts, without_autocast
from ppo_lightning.rollouts.tensor_collector import TensorCollector
from ppo_lightning.utils import collectives
from ppo_lightning.utils.compiler import compile_scan, scan

# States of the environments, observations to act on, and if the agent has them its memory and statistics.
Carry = tuple[State, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]
Step = tuple[Carry, dict[str, Any]]


class ScanCollector(TensorCollector):
    """Collector of rollouts [N, T] from a :class:`TensorEnv` with a ``transition``.

    The steps of a rollout are a scan. Compiled, the loop over the steps is inside the graph: the graph is
    compiled for one step, and its guards are paid once a rollout. There is no transfer between devices and no
    synchronization within a rollout.

    The arguments are those of :class:`TensorCollector`, and ``compile``: compile the scan, if the agent's
    memory can be compiled.
    """

    env: TensorEnv
    can_resume = True

    def __init__(self, *args: Any, compile: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scan: Any = self._steps
        self._evaluates_last = False
        agent = self.agent
        if compile and agent.traceable:
            self._scan = compile_scan(self._steps, self._device.type == "cpu")
            # One large batch costs less than a small one at each step.
            self._evaluates_last = isinstance(agent, ActorCritic) and agent.critic_body is not None

    @torch.no_grad()
    def rollout(self) -> TensorDictBase:
        """Collect one rollout [N, T], see :meth:`TensorCollector.rollout`."""
        env = self.env
        statistics: tuple[Tensor, ...] = ()
        if self.agent.normalizer is not None and not self.deterministic:
            statistics = (self.agent.normalizer.summary,)
            if collectives.world_size() > 1:  # those of this rank and rollout alone, too
                statistics += (torch.zeros_like(statistics[0]),)
        if self.observation is None:
            first = env.rows(env.reset_tensors(None))
            statistics = _with_rows(statistics, first)
            self.observation = self._normalized(first, statistics)
        noise = self.draw_noise()
        memory = () if self._memory is None else (self._memory,)
        with self.precision():
            (env.state, self.observation, memory, statistics), steps = self._scan(
                (env.state, self.observation, memory, statistics), noise.to(self.agent.device)
            )
            steps = tree_map(lambda values: values.transpose(0, 1), steps)
            if self._evaluates_last:
                agent: Any = self.agent
                values = in_parts(agent.value, agent.microbatch_size, steps["observation"])
                steps["state_value"] = values.unsqueeze(-1)
        self._memory = memory[0] if memory else None
        normalized = steps.pop("normalized", None)
        steps["next"]["done"] = steps["next"]["terminated"] | steps["next"]["truncated"]
        rollout = TensorDict(steps, (env.num_envs, self.num_steps), device=self.agent.device)
        self._require_finite(rollout, self.observation)
        if normalized is not None:
            rollout["next", "observation"] = normalized
        if self.agent.normalizer is not None and statistics:
            total, *increment = statistics
            self.agent.normalizer.merge(*increment) if increment else self.agent.normalizer.store(total)
        self._add_episodes(rollout["next"])
        self.rollouts_done += 1
        return rollout

    def _states(self) -> list[Row]:
        memory = () if self._memory is None else (self._memory,)
        tensors = {"state": self.env.state, "observation": (self.observation,), "memory": memory}
        return [
            {key: tuple(x[i].cpu() for x in values) for key, values in tensors.items()}
            for i in range(self.shard.count)
        ]

    def _restore(self, rows: list[Row]) -> None:
        state, observation, memory = (
            tuple(torch.stack(tensors) for tensors in zip(*(row[key] for row in rows), strict=True))
            for key in ("state", "observation", "memory")
        )
        self.env.state = tuple(x.to(self.env.device) for x in state)
        self.observation = observation[0].to(self.agent.device)
        self._memory = memory[0].to(self.agent.device) if memory else None

    def _step(self, carry: Carry, noise: Tensor) -> Step:
        """Act and step once."""
        agent = self.agent
        state, observation, memory, statistics = carry
        *outputs, next_memory = agent.act(observation, None if self.deterministic else noise, *memory)
        output: dict[str, Any] = dict(zip(agent.out_keys, outputs, strict=True))
        with without_autocast(self.env.device.type):
            state, step, after = self.env.transition(state, self._for_environment(output["action"]))
        if self._evaluates_last:
            del output["state_value"]
        terminated, truncated = step.terminated.bool(), step.truncated.bool()
        done = terminated | truncated
        raw, begun = self.env.final_rows(step, done), self.env.rows(after)
        following: dict[str, Tensor] = {
            "reward": step.reward.float().unsqueeze(-1),
            "terminated": terminated.unsqueeze(-1),
            "truncated": truncated.unsqueeze(-1),
            "observation": raw.to(torch.float32 if raw.is_floating_point() else raw.dtype, copy=True),
        }
        output |= {"observation": observation.clone(), "next": following}
        # First the statistics of all observations, then of those after resets, as in `TensorCollector`.
        statistics = _with_rows(statistics, raw)
        acted_on = self._normalized(raw, statistics)
        if agent.normalizer is not None:
            output["normalized"] = acted_on
        statistics = _with_rows(statistics, begun, done)
        reset = done.reshape(-1, *[1] * (begun.ndim - 1))
        acted_on = torch.where(reset, self._normalized(begun, statistics), acted_on)
        if next_memory is not None:
            output["memory"] = memory[0].clone()
            following["memory"] = next_memory
            memory = (next_memory.masked_fill(done[:, None], 0),)
        return (tuple(x.clone() for x in state), acted_on, memory, statistics), output

    def _normalized(self, observation: Tensor, statistics: tuple[Tensor, ...]) -> Tensor:
        """Normalize raw observations [N, ...] by a summary, or without one by the agent's statistics."""
        if not statistics or self.agent.normalizer is None:
            return self.agent.normalize(observation)
        count, mean, m2 = statistics[0].unbind()
        return self.agent.normalizer.normalize_by(mean, deviation(count, m2), observation)

    def _steps(self, carry: Carry, noise: Tensor) -> Step:
        return scan(self._step, carry, noise)


def _with_rows(summaries: tuple[Tensor, ...], rows: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
    if not summaries:
        return ()
    summary = summary_of(rows, mask)
    return tuple(merged(old, summary) for old in summaries)
