"""Base class of agents: policy, value function and their state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.core.mixins import HyperparametersMixin
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data import TensorSpec, Unbounded
from torchrl.envs.utils import ExplorationType, exploration_type

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.composite import make_head
from ppo_lightning.models.heads import Float32Linear, HeadChoice, Parameters
from ppo_lightning.models.init import orthogonal
from ppo_lightning.models.memory import MEMORIES, MemoryName
from ppo_lightning.models.normalizers import ObservationNormalizer
from ppo_lightning.spaces.entries import ChosenEntries
from ppo_lightning.spaces.specs import spec_to_plain

# Action [N, ...], log-probability [N] and value [N]. The last two are None if `evaluate` computes them later,
# for the whole rollout at once.
Acted = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]
# Function of normalized observation [N, ...], noise [N, ...] and hidden state [N, M], updated in place.
ArrayPolicy = Callable[[np.ndarray, np.ndarray | None, np.ndarray | None], Acted]

CONTRACT = (
    "a subclass of ppo_lightning.ActorCritic whose __init__(self, observation_spec, action_spec, ...) passes"
    " a body to super().__init__ and calls self.save_hyperparameters(ignore=['observation_spec',"
    " 'action_spec']), see docs/environments.md, 'Your own network' (other networks: model.actor and"
    " model.critic, see docs/torchrl.md)"
)


class Evaluation(NamedTuple):
    """Evaluation of given actions by the current weights.

    Attributes:
        log_prob: Log-probability of the action, [B].
        entropy: Entropy of the distribution, [B], in nats.
        value: Value of the observation, [B].
        features: Input of the head, [B, F].
        critic_features: Input of the last layer of the value function, [B, F]. The same tensor if policy and
            value share a body.
        parameters: Parameters of the distribution, each [B, ...], as the head's ``kl`` expects them.

    Example:
        >>> from torchrl.data import Categorical
        >>> from ppo_lightning.models import MLPAgent
        >>> agent = MLPAgent(Unbounded((4,)), Categorical(2, shape=()))
        >>> agent.evaluate(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)).entropy.shape
        torch.Size([3])
    """

    log_prob: Tensor
    entropy: Tensor
    value: Tensor
    features: Tensor
    critic_features: Tensor
    parameters: Parameters


class ActorCritic(TensorDictModuleBase, HyperparametersMixin):
    """A policy and a value function.

    Fast loops call :meth:`act` and :meth:`evaluate` on tensors, with observations from :meth:`normalize`. A
    rollout stores these normalized observations, because the running statistics change later. As a TensorDict
    module (``env.rollout(100, policy=agent)``), the agent reads raw observations under ``observation`` and
    writes ``action``, ``action_log_prob`` and ``state_value``.

    With a memory, :meth:`act` takes and returns the hidden state [B, M], which is zero at episode starts, and
    :meth:`evaluate` takes whole sequences. The value function shares body and memory of the policy, or
    (``shared=False``) reads each observation without memory.

    If the observations have an entry ``action_mask``, forbidden discrete actions have probability 0.

    A subclass passes a body and calls ``self.save_hyperparameters(ignore=["observation_spec",
    "action_spec"])`` with plain arguments, from which a checkpoint rebuilds the agent.

    Args:
        action_spec: Spec of the actions.
        body: Makes a module from observations [B, ...] to features [B, F]. The module has an attribute
            ``out_features`` = F and optionally ``microbatch_size``.
        shared: Use one body, and one memory, for policy and value instead of one body each.
        head: The action distribution. None: categorical for discrete actions, Gaussian for continuous ones.
        normalizer: Normalizes the observations. None: no normalization.
        memory: ``lstm`` or ``min_gru`` after the body. None: no memory.
        memory_size: Width H of the memory's output.
        mask: Columns of the action mask in a row of observations. None: no mask.
        critic_body: Makes the body of the value function, if it differs. None: ``body`` makes it.
        entries: Entries of the observation that policy and value read. None: they have no names.

    Raises:
        ConfigError: The size of the mask does not match the actions.

    Example:
        >>> from torchrl.data import Categorical
        >>> from ppo_lightning.models import MLP
        >>> agent = ActorCritic(Categorical(2, shape=()), lambda: MLP(4, [64]))
        >>> agent.mode(torch.zeros(3, 4)).shape
        torch.Size([3])
    """

    in_keys = ("observation",)
    out_keys = ("action", "action_log_prob", "state_value")
    default_head: HeadChoice = None  # of a subclass whose ``head`` is None
    has_features = True  # whether `evaluate` returns features, which variants build on
    has_value = True  # whether the critic's outputs are values
    reads = ""  # the observations in words, for the start line of a run

    def __init__(
        self,
        action_spec: TensorSpec,
        body: Callable[[], nn.Module],
        shared: bool = False,
        head: HeadChoice = None,
        normalizer: ObservationNormalizer | None = None,
        memory: MemoryName | None = None,
        memory_size: int = 128,
        mask: slice | None = None,
        critic_body: Callable[[], nn.Module] | None = None,
        entries: ChosenEntries | None = None,
    ) -> None:
        super().__init__()
        self.entries = entries
        self.normalizer = normalizer
        self.mask = mask
        self.actions = spec_to_plain(action_spec)
        # detail 13
        # detail 26
        self.actor_body = body()
        self.critic_body = None if shared else (critic_body or body)()
        features = getattr(self.actor_body, "out_features", None)
        if not isinstance(features, int):
            raise ConfigError(
                f"The body of {type(self).__name__} is a {type(self.actor_body).__name__} whose out_features"
                f" is {features!r}: it must be the number of features F that the body returns, [B, F]."
            )
        self.memory = None if memory is None else MEMORIES[memory](features, memory_size)
        width = features if memory is None else memory_size
        self.head = make_head(head or self.default_head, width, action_spec)
        if mask is not None and mask.stop - mask.start != self.head.num_choices:
            raise ConfigError(
                f"env_id has observations with an action_mask of {mask.stop - mask.start} entries, and"
                f" {self.head.num_choices} discrete actions: the mask needs one entry per action, with all"
                " components concatenated."
            )
        critic_width = width if self.critic_body is None else self.critic_body.out_features
        assert isinstance(critic_width, int)
        self.critic = orthogonal(Float32Linear(critic_width, 1), gain=1.0)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    @property
    def traceable(self) -> bool:
        """Whether a compiler can trace all of :meth:`evaluate`."""
        return self.memory is None or self.memory.traceable

    def rollout_keys(self, observation: TensorSpec, action: TensorSpec) -> dict[str, TensorSpec]:
        """Return what a step of a rollout stores for the update: the specs of one environment by key.

        Args:
            observation: Spec of the stored observations.
            action: Spec of the stored actions.
        """
        normalized = Unbounded(observation.shape, dtype=torch.float32)
        return {
            "observation": observation if self.normalizer is None else normalized,
            "action": action,
            "action_log_prob": Unbounded((), dtype=torch.float32),
            "state_value": Unbounded((1,), dtype=torch.float32),
        }

    @property
    def microbatch_size(self) -> int:
        """Number of rows for the fastest backpropagation on a CPU, whose cache holds their activations.

        The body may override the default.
        """
        return getattr(self.actor_body, "microbatch_size", 4096)

    def _features(self, observation: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the features of policy and value for observations [B, ...], and the next hidden state.

        Raises:
            ConfigError: The agent has a memory, and ``memory`` is None.
        """
        actor_features = self.actor_body(observation)
        if self.memory is not None:
            if memory is None:
                raise ConfigError(
                    "This agent has a memory: give act the hidden state [B, M], zero at episode starts."
                )
            actor_features, memory = self.memory.step(actor_features, memory)
        critic_features = actor_features if self.critic_body is None else self.critic_body(observation)
        return actor_features, critic_features, memory

    def _sequences(self, observation: Tensor, memory: Tensor, is_init: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of policy and value for sequences [n, T, ...], each [n, T, F]."""
        assert self.memory is not None
        flat = observation.flatten(0, 1)
        features = self.memory(self.actor_body(flat).unflatten(0, is_init.shape), memory, is_init)
        if self.critic_body is None:
            return features, features
        return features, self.critic_body(flat).unflatten(0, is_init.shape)

    def allowed(self, observation: Tensor) -> Tensor | None:
        """Return which discrete actions rows of observations allow, [B, A]; None without a mask."""
        return None if self.mask is None else observation[..., self.mask] > 0

    def initial_memory(self, num_envs: int) -> Tensor | None:
        """Return the hidden state of N environments at episode starts, [N, M], or None without a memory."""
        if self.memory is None:
            return None
        # detail 33
        return torch.zeros(num_envs, self.memory.state_size, device=self.device)

    def normalize(self, observation: Tensor) -> Tensor:
        """Convert raw observations [B, ...] to the input of the networks, with the current statistics.

        Floats become float32.
        """
        if self.normalizer is not None:
            return self.normalizer(observation)
        return observation.float() if observation.is_floating_point() else observation

    def mode(self, observation: Tensor) -> Tensor:
        """Return the most probable actions [B, ...] for raw observations, see :meth:`play`."""
        return self.play(observation)[0]

    def play(self, observation: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the most probable actions with values and hidden state.

        Args:
            observation: Raw observations, [B, ...].
            memory: Hidden state before the observations, [B, M], if the agent has a memory.

        Returns:
            Actions [B, ...] within the bounds of the environment, values [B] and the next hidden state.
        """
        action, _, value, memory = self.act(self.normalize(observation), memory=memory)
        return self.head.for_environment(action), value, memory

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw the noise [*batch_shape, ...] with which :meth:`act` samples actions, on the CPU."""
        return self.head.noise(batch_shape, generator)

    def act(
        self, observation: Tensor, noise: Tensor | None = None, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Choose actions.

        Args:
            observation: Normalized observations, [B, ...].
            noise: Noise from :meth:`noise`, [B, ...]. None: the mode of the distribution.
            memory: Hidden state before the observations, [B, M], if the agent has a memory.

        Returns:
            Actions [B, ...] before any clipping, log-probabilities [B], values [B] and the next hidden state.
        """
        actor_features, critic_features, memory = self._features(observation, memory)
        action, log_prob = self.head.sample(actor_features, noise, self.allowed(observation))
        return action, log_prob, self.critic(critic_features).squeeze(-1), memory

    def evaluate(
        self, observation: Tensor, action: Tensor, memory: Tensor | None = None, is_init: Tensor | None = None
    ) -> Evaluation:
        """Evaluate given actions with the current weights.

        Args:
            observation: Normalized observations, [B, ...]. With a memory: whole sequences, [n, T, ...].
            action: Actions, [B, ...] or [n, T, ...].
            memory: Hidden state before the first step of the sequences, [n, M].
            is_init: True at the first step of an episode, [n, T] bool.

        Returns:
            Inputs of the losses, with tensors [B, ...] or [n, T, ...].
        """
        if self.memory is None:
            actor_features, critic_features, _ = self._features(observation, None)
        else:
            assert memory is not None and is_init is not None
            actor_features, critic_features = self._sequences(observation, memory, is_init)
        log_prob, entropy, parameters = self.head.evaluate(actor_features, action, self.allowed(observation))
        value = self.critic(critic_features).squeeze(-1)
        return Evaluation(log_prob, entropy, value, actor_features, critic_features, parameters)

    def get_dist(self, tensordict: TensorDictBase) -> D.Distribution:
        """Return the distribution of the actions for raw observations, as TorchRL's losses ask for it."""
        observation = self.normalize(tensordict["observation"])
        features, *_ = self._features(observation, None)
        return _PolicyDistribution(self.head, features, self.allowed(observation))

    def explain(self, observation: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return values [B] and the numbers and bars of :meth:`Head.bars`, each [B, A], for videos.

        The arguments are those of :meth:`play`.
        """
        observation = self.normalize(observation)
        actor_features, critic_features, _ = self._features(observation, memory)
        value = self.critic(critic_features).squeeze(-1)
        return value, *self.head.bars(actor_features, self.allowed(observation))

    def value(self, observation: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return the values [B] of normalized observations [B, ...].

        ``memory`` is as in :meth:`act`. A value function with a body of its own does not use it.
        """
        if self.critic_body is None:
            return self.critic(self._features(observation, memory)[1]).squeeze(-1)
        return self.critic(self.critic_body(observation)).squeeze(-1)

    def array_policy(self) -> ArrayPolicy:
        """Return the function from arrays to arrays that the collector calls at each step of a rollout.

        The default wraps :meth:`act`. A subclass may return a faster function whose actions agree to float
        tolerance. The collector requests a new function for each rollout and calls it in inference mode.
        """
        device = self.device

        def policy(observation: np.ndarray, noise: np.ndarray | None, memory: np.ndarray | None) -> Acted:
            noise_tensor, state = (
                None if array is None else torch.from_numpy(array).to(device) for array in (noise, memory)
            )
            # The copy may be asynchronous, because this row of the rollout does not change.
            inputs = torch.from_numpy(observation).to(device, non_blocking=True)
            action, log_prob, value, state = self.act(inputs, noise_tensor, state)
            if memory is not None and state is not None:
                memory[:] = state.numpy(force=True)
            return action.numpy(force=True), log_prob.numpy(force=True), value.numpy(force=True)

        return policy

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act on a TensorDict of any batch size.

        The actions are deterministic under ``ExplorationType.DETERMINISTIC``. An agent with a memory reads
        its hidden state under ``memory`` and writes it under ``("next", "memory")``.

        Args:
            tensordict: Has raw observations under ``observation``.

        Returns:
            The same TensorDict, with ``action``, ``action_log_prob`` and ``state_value``.
        """
        observation = self.normalize(tensordict["observation"])
        observation = observation.reshape(-1, *observation.shape[tensordict.ndim :])
        noise = None
        if exploration_type() != ExplorationType.DETERMINISTIC:
            noise = self.noise((tensordict.numel(),)).to(observation.device)
        memory = tensordict.get("memory") if self.memory is not None else None
        flat = None if memory is None else memory.reshape(-1, memory.shape[-1])
        *outputs, next_memory = self.act(observation, noise, flat)
        outputs[2] = outputs[2].unsqueeze(-1)  # TorchRL's values have a trailing axis
        for key, output in zip(self.out_keys, outputs, strict=True):
            tensordict[key] = output.reshape(tensordict.shape + output.shape[1:])
        if memory is not None and next_memory is not None:
            tensordict["next", "memory"] = next_memory.view_as(memory)
        return tensordict


class _PolicyDistribution(D.Distribution):
    """Distribution of a head for given features, with what losses of other libraries use."""

    def __init__(self, *inputs: Any) -> None:
        super().__init__(validate_args=False)
        self.head, self.features, self.allowed = inputs

    @property
    def mode(self) -> Tensor:
        return self.head.sample(self.features, None, self.allowed)[0]

    def log_prob(self, value: Tensor) -> Tensor:
        return self.head.evaluate(self.features, value, self.allowed)[0]

    def entropy(self) -> Tensor:
        return self.head.evaluate(self.features, self.mode, self.allowed)[1]


def require_agent_maker(maker: Callable[..., Any]) -> None:
    """Check that ``model.agent`` makes an agent, as far as a class or an object shows.

    Raises:
        ConfigError: It is a network, or a class of other networks. The message names the contract.
    """
    made = getattr(maker, "func", maker)  # of functools.partial
    if isinstance(made, ActorCritic):
        raise ConfigError(
            f"model.agent is an agent, and each run makes its own: give the class, {type(made).__name__}, or"
            f" functools.partial({type(made).__name__}, ...) with arguments."
        )
    if isinstance(made, nn.Module) or (isinstance(made, type) and not issubclass(made, ActorCritic)):
        name = made.__name__ if isinstance(made, type) else f"an object of {type(made).__name__}"
        raise ConfigError(f"model.agent is {name}: it must be {CONTRACT}.")


def make_agent(
    maker: Callable[..., Any], observation_spec: TensorSpec, action_spec: TensorSpec
) -> ActorCritic:
    """Make an agent for the specs of one environment.

    Raises:
        ConfigError: The maker does not take the specs, or makes something else.
    """
    try:
        agent = maker(observation_spec, action_spec)
    except TypeError as error:
        assert error.__traceback__ is not None
        if error.__traceback__.tb_next is not None:  # raised inside the maker
            raise
        raise ConfigError(f"model.agent cannot be called ({error}): it must be {CONTRACT}.") from error
    if not isinstance(agent, ActorCritic):
        raise ConfigError(f"model.agent makes a {type(agent).__name__}: it must be or make {CONTRACT}.")
    return agent
