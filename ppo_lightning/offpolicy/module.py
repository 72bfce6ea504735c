"""Base LightningModule of the off-policy algorithms: storing, sampling, exploration, updates, logging."""

import copy
import inspect
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.adam import adam as guarded_adam
from torchrl.data import TensorSpec

from ppo_lightning.algorithms import checks
from ppo_lightning.algorithms.adam import adam_state, state_and_settings
from ppo_lightning.algorithms.agent_module import AgentModule
from ppo_lightning.algorithms.minibatches import Minibatch, mean_of
from ppo_lightning.checkpoints.file import BESIDE, read_beside
from ppo_lightning.errors import ConfigError
from ppo_lightning.models.actor import Actor
from ppo_lightning.offpolicy.agents import Critics, OffPolicyAgent
from ppo_lightning.offpolicy.buffer import SPARE, FrameBuffer, ReplayBuffer
from ppo_lightning.private import counted_step, set_hyperparameters, trace_gradients
from ppo_lightning.rollouts.storage import check_memory
from ppo_lightning.spaces.specs import stored
from ppo_lightning.utils import collectives
from ppo_lightning.utils.arguments import Range, check_arguments, is_left_out
from ppo_lightning.utils.compiler import compile_per_instance, of_arguments, replay
from ppo_lightning.utils.watch import end_request

AgentMaker = Callable[[TensorSpec, TensorSpec], Actor]
Metrics = dict[str, Tensor]  # scalars by name
LOG_EVERY = 100  # environment steps, as in CleanRL
adam: Any = inspect.unwrap(guarded_adam)  # the wrapper refuses to compile some states


class Delayed(NamedTuple):
    """What an update includes beside the critics: the policy and the target networks."""

    policy: bool = False
    target: bool = False


class OffPolicyModule(AgentModule):
    """Base LightningModule of the off-policy algorithms.

    A Lightning batch is a rollout of ``num_envs * num_steps`` fresh transitions. ``training_step`` stores
    them and makes the updates that are due: one for ``train_frequency`` environment steps. So the acting
    policy is at most one batch old. All minibatches of a batch are sampled before its first update. Delays
    depend on the environment step of an update, so that they count across batches and resumed runs.

    A subclass declares ``head`` and ``learning_rates``, and implements ``delayed`` and ``update``.

    Args:
        gamma: Discount of future rewards.
        buffer_size: Largest number of transitions in the replay buffer, of all ranks together.
        batch_size: Transitions in a minibatch, on each rank.
        learning_starts: Environment steps before the first update. DDPG, TD3 and SAC act uniformly at random
            until then. None: CleanRL's number, 25 000 (SAC 5 000, DQN and C51 10 000), at most a twentieth of
            the run. A resumed run keeps its number.
        train_frequency: Environment steps, of all environments together, between two updates.
        save_buffer: Write the replay buffer beside each checkpoint, so that a resumed run is equal to an
            uninterrupted one to the bit. A preempted run always writes it.
        compile: Compile losses, gradients, Adam and target networks into one graph.
        agent: Makes the agent from the specs of observations and actions.
    """

    head: ClassVar[type]  # of the agent
    learning_rates: ClassVar[dict[str, str]]  # attribute -> setting: what is trained, by an Adam each
    adam_eps = 1e-8
    default_num_envs = 1  # as in CleanRL
    default_num_steps = 10  # the policy acts with weights that are at most one batch old
    steps_per_rollout = 1  # `trainer.global_step` counts batches
    longest_start = 25_000  # default of `learning_starts` in long runs
    agent: Any
    critics: Critics  # of algorithms for continuous actions

    def __init__(
        self,
        gamma: Annotated[float, Range(0, 1)] = 0.99,
        buffer_size: Annotated[int, Range(1)] = 1_000_000,
        batch_size: Annotated[int, Range(1)] = 256,
        learning_starts: Annotated[int | None, Range(0)] = None,
        train_frequency: Annotated[int, Range(1)] = 1,
        save_buffer: bool = False,
        compile: bool = False,
        agent: AgentMaker = OffPolicyAgent,
    ) -> None:
        check_arguments(OffPolicyModule.__init__, locals(), "model")
        super().__init__(agent)
        self.save_hyperparameters(ignore=["agent"])
        self.automatic_optimization = False
        self.left_out: dict[str, int | None] = {"learning_starts": None} if learning_starts is None else {}
        self._compiled: Any = None  # the graph of `update`, during a fit
        self._refilled_at = 0  # environment step from which a resumed run without its buffer learns again

    def training_step(self, rollout: TensorDictBase, batch_idx: int) -> None:
        """Store a rollout [N, T] and make the updates that are due."""
        profile = self.trainer.profiler.profile  # type: ignore[attr-defined]
        with profile("store"):
            self.buffer.add(self.transitions(rollout))
        with profile("update"):
            steps = self.due(self.env_steps - self.data.frames_per_rollout, self.env_steps)
            update = self._compiled or self.update
            metrics = [
                update(minibatch, self.delayed(step))
                for minibatch, step in zip(self.minibatches(len(steps)), steps, strict=True)
            ]
            if not steps and self.env_steps <= self.learning_starts:
                self.progress.learn_from_here()
            optimizer: Any = self.optimizers()
            with counted_step(optimizer[0] if isinstance(optimizer, list) else optimizer):
                pass  # callbacks save only if `trainer.global_step` has grown
        with profile("log"):
            self.log_batch(metrics)
        self.agent.head.exploration = self.exploration(self.env_steps)

    def transitions(self, rollout: TensorDictBase) -> Minibatch:
        """Return the transitions of a rollout [N, T] that count, in the order of time, tensors [K, ...]."""
        following = rollout["next"]
        columns = {
            "observation": rollout["observation"],
            "action": rollout["action"],
            "reward": following["reward"].squeeze(-1),
            "next_observation": following["observation"],  # at episode ends the final observation
            "terminated": following["terminated"].squeeze(-1).float(),
        }
        weight = rollout.get("weight", None)
        rows: Any = slice(None) if weight is None else weight.T.flatten() > 0
        return {key: column.transpose(0, 1).flatten(0, 1)[rows] for key, column in columns.items()}

    @property
    def learning_starts(self) -> int:
        """Environment steps before the first update."""
        given = self.hparams.learning_starts
        return min(self.longest_start, self.data.plan.num_frames // 20) if given is None else given

    def due(self, before: int, after: int) -> range:
        """Return the environment steps of the updates that are due between two numbers of steps."""
        frequency = self.hparams.train_frequency
        start = max(before, self.learning_starts, self._refilled_at)
        return range((start // frequency + 1) * frequency, after + 1, frequency)

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Shape of the normal noise of a row of a minibatch."""
        return (0,)

    @abstractmethod
    def delayed(self, step: int) -> Delayed:
        """Return what is due, beside the critics, in the update at an environment step."""

    def is_due(self, step: int, period: int) -> bool:
        """Return whether a multiple of a period lies in the steps of the update at an environment step."""
        return step // period > (step - self.hparams.train_frequency) // period

    def minibatches(self, count: int) -> Iterator[Minibatch]:
        """Sample minibatches from the buffer, which depend on the seed, the rank and the rollout alone."""
        if not count:
            return
        size, shard = self.hparams.batch_size, self.data.shard
        generator = shard.generator("replay", self.rollouts_done - 1, shard.first)
        indices = torch.randint(max(1, len(self.buffer)), (count, size), generator=generator).to(self.device)
        noises = torch.randn(count, size, *self.noise_shape, generator=generator, dtype=torch.float32)
        noises = noises.to(self.device)
        for rows, noise in zip(indices, noises, strict=True):
            yield self.gather(rows, generator) | {"noise": noise}

    def gather(self, rows: Tensor, generator: torch.Generator) -> Minibatch:
        """Return the transitions at rows [B] of the buffer. A variant relabels or weights them."""
        return self.buffer.gather(rows)

    @abstractmethod
    def update(self, minibatch: Minibatch, due: Delayed) -> Metrics:
        """Update the weights with transitions and ``noise`` [B, ...], and what is due with them.

        A compiled update is one graph for each combination of what is due.
        """

    def update_critics(self, minibatch: Minibatch, next_value: Tensor) -> Metrics:
        """Move all ``critics`` towards the rewards and the discounted values [B] of the next observations."""
        reward, terminated = minibatch["reward"], minibatch["terminated"]
        target = td_target(reward, terminated, next_value, self.hparams.gamma)
        values = self.critics(minibatch["observation"], minibatch["action"])
        losses = [F.mse_loss(row, target) for row in values]
        loss = torch.stack(losses).sum()
        self.minimize("critics", loss)
        metrics = {f"losses/qf{i}_loss": part.detach() for i, part in enumerate(losses, 1)}
        metrics |= {f"losses/qf{i}_values": row.detach().mean() for i, row in enumerate(values, 1)}
        return metrics | {"losses/qf_loss": loss.detach() / len(losses)}

    def minimize(self, name: str, loss: Tensor) -> None:
        """Take a step of the Adam of ``name`` as operations of a graph, on the state that Lightning saves."""
        if name not in self._adams:  # of frozen parameters
            return
        parameters, *state, settings = self._adams[name]
        grads: Any = torch.autograd.grad(loss, parameters, allow_unused=True)
        used = [grad is not None for grad in grads]  # as Adam skips parameters without a gradient
        parameters, grads, *state = (
            list(itertools.compress(tensors, used)) for tensors in (parameters, grads, *state)
        )
        if collectives.world_size() > 1:
            grads = collectives.averaged(grads)  # each rank has minibatches of its own
        fused = not torch.compiler.is_compiling()
        with torch.no_grad():
            adam(parameters, grads, *state[:2], [], state[2], foreach=False, fused=fused, **settings)

    def move_target(self, online: nn.Module, target: nn.Module) -> None:
        """Move the weights of a target network by the share ``tau`` towards those of the online network."""
        with torch.no_grad():
            for old, new in zip(target.parameters(), online.parameters(), strict=True):
                old.lerp_(new, self.hparams.tau)
            for kept, statistic in zip(target.buffers(), online.buffers(), strict=True):
                kept.copy_(statistic)

    def exploration(self, step: int) -> float | None:
        """Return the scale of the noise at an environment step; None for random actions."""
        return None if step < self.learning_starts else self.hparams.get("exploration_noise", 1.0)

    def log_batch(self, metrics: list[Metrics]) -> None:
        """Log the metrics of a batch: of the first, the last and one for every hundred environment steps."""
        before = self.env_steps - self.data.frames_per_rollout
        is_between = self.progress.steps_before < before and self.env_steps < self.data.plan.num_frames
        if is_between and before // LOG_EVERY == self.env_steps // LOG_EVERY:
            return
        values: dict[str, Any] = {"charts/SPS": self.progress.steps_per_second()}
        if metrics:  # of a delayed policy, those of the updates that include it
            size = max(map(len, metrics))
            values |= mean_of([part for part in metrics if len(part) == size])
        self.run_log.log(values)

    # Lightning's hooks

    def refusals(self) -> Iterator[str]:
        """Yield settings and agents with which an off-policy algorithm cannot train."""
        yield from checks.of_memory(self)
        yield from checks.of_replay(self)
        yield from checks.of_turns(self)

    def configure_callbacks(self) -> list[L.Callback]:
        """Forget what another fit derived from its length and its checkpoint."""
        if self.fitting:
            self._refilled_at = 0
            if is_left_out(self, "learning_starts"):
                self.hparams.learning_starts = None
        return super().configure_callbacks()

    def configure_model(self) -> None:
        """Build the agent and, for a fit, the buffer."""
        super().configure_model()
        if self.fitting:
            if self.hparams.learning_starts is None:
                self._derive_start(self.learning_starts)
            self.buffer = self.make_buffer()

    def _derive_start(self, number: int) -> None:
        self.left_out = {"learning_starts": number}
        set_hyperparameters(self, self.left_out)

    def make_buffer(self) -> ReplayBuffer:
        """Make this rank's share of the buffer, which must fit into memory."""
        row, capacity = stored(self.data.specs.observation), self.hparams.buffer_size
        size = row.shape.numel() * row.dtype.itemsize
        stacks_frames = row.ndim == 3 and getattr(self.data.env, "frame_stack", 1) == row.shape[0] > 1
        bytes_per_step = int(SPARE * size / row.shape[0]) + 80 if stacks_frames else 2 * size + 16
        ranks, device = self.trainer.world_size, self.trainer.strategy.root_device
        memories = ranks if device.type == "cuda" else 1
        check_memory(capacity, bytes_per_step // memories, "model.buffer_size", device)
        capacity //= ranks
        if stacks_frames:
            return FrameBuffer(capacity, self.data.shard.count, row.shape[0])
        return ReplayBuffer(capacity)

    def trained(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of each of ``learning_rates``, without those that are frozen."""
        named = [(key.split(".")[0], x) for key, x in self.named_parameters() if x.requires_grad]
        parts = {name: [x for part, x in named if part == name] for name in self.learning_rates}
        return {name: parameters for name, parameters in parts.items() if parameters}

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of all optimizers."""
        return itertools.chain.from_iterable(self.trained().values())

    def configure_optimizers(self) -> list[torch.optim.Adam]:
        """Return an Adam for each part that is trained, with zero moments, from which a graph can start."""
        optimizers = []
        for name, parameters in self.trained().items():
            lr = self.hparams[self.learning_rates[name]]
            optimizers.append(torch.optim.Adam(parameters, lr=lr, eps=self.adam_eps, fused=True))
            adam_state(optimizers[-1])
        return optimizers

    def on_train_start(self) -> None:
        """Prepare the optimizers, the graph, the buffer and the exploration."""
        super().on_train_start()
        optimizers: Any = self.trainer.optimizers
        states = [{*x.state} for x in optimizers if type(x) is torch.optim.Adam and not x.defaults["amsgrad"]]
        is_ours = states == [{*part} for part in self.trained().values()]
        assert is_ours and not self.trainer.lr_scheduler_configs, (
            "configure_optimizers must return the Adams of OffPolicyModule and no schedule"
        )
        for optimizer in optimizers:  # a checkpoint restores the rate of its run, which monitors would log
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"]
        self._adams = dict(zip(self.trained(), map(state_and_settings, optimizers), strict=True))
        if self.hparams.compile:
            trace_gradients()
            vectors = all(parameter.ndim < 3 for parameter in self.trainable_parameters())
            options: Any = {"guard_filter_fn": of_arguments}
            if self.device.type == "cuda" and vectors and self.trainer.world_size == 1:
                moments = (tensor for *parts, _ in self._adams.values() for part in parts for tensor in part)
                self._compiled = replay(self.update, [*self.parameters(), *moments], options)
            else:
                options["cpp_wrapper"] = vectors and self.device.type == "cpu"
                self._compiled = compile_per_instance(self.update, options=options)
        self.agent.head.exploration = self.exploration(self.env_steps)

    def release(self) -> None:
        """Release the graph."""
        self._compiled = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the buffer out of a copy and of a pickled module, whose next fit makes another one."""
        return {key: x for key, x in super().__getstate__().items() if key not in ("buffer", "_adams")}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the buffers of all ranks, if the settings say so or after a signal. This is a collective."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["exploration"] = self.agent.head.exploration
        if not checkpoint.get("optimizer_states"):  # weights only, or no fit
            return
        if self.hparams.save_buffer or collectives.largest(end_request.number):
            buffers = collectives.chain([self.buffer.state_dict()])
            checkpoint[BESIDE] = {"refilled_at": self._refilled_at, "buffers": buffers}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the buffer, or say how many steps refill it, to resume a run."""
        saved = checkpoint["hyper_parameters"].get("learning_starts")
        if self.fitting and saved is not None and is_left_out(self, "learning_starts"):
            self._derive_start(saved)
        super().on_load_checkpoint(checkpoint)
        if "exploration" in checkpoint:  # agents of older ones act greedily
            self.agent.head.exploration = checkpoint["exploration"]
        if not self.fitting:
            return
        assert self.trainer.ckpt_path is not None
        beside = read_beside(checkpoint, self.trainer.ckpt_path)
        buffers = beside["buffers"] if beside else []
        if [buffer.get("sizes") for buffer in buffers] == [self.buffer.sizes] * self.trainer.world_size:
            self._refilled_at = beside.get("refilled_at", 0)
            device = self.trainer.strategy.root_device
            self.buffer.load_state_dict(buffers[self.trainer.global_rank], device)
        elif 0 < self.env_steps < self.data.plan.num_frames:
            self._refilled_at = self.env_steps + self.learning_starts
            steps = f"{self.learning_starts} steps of its policy refill it"
            problem = f"The checkpoint has no replay buffer of this size: {steps} before learning resumes"
            if not self.due(self.env_steps, self.data.plan.num_frames):
                raise ConfigError(f"{problem}, and the run ends before: raise data.total_timesteps.")
            rank_zero_warn(f"{problem} (model.save_buffer saves it).")

    @property
    def minibatch_size(self) -> int:
        """Number of transitions of a minibatch on this rank, all of which are differentiated at once."""
        return self.hparams.batch_size

    microbatch_size = minibatch_size


def td_target(reward: Tensor, terminated: Tensor, next_value: Tensor, gamma: float) -> Tensor:
    """Return the TD target, [B]. Only a termination (1) stops the bootstrap: a time limit does not."""
    # y = r + gamma * (1 - terminated) * V(s')
    return reward + gamma * (1 - terminated) * next_value


def frozen(network: nn.Module) -> Any:
    """Return a copy of a network as its target network, which never trains."""
    return copy.deepcopy(network).requires_grad_(False).eval()
