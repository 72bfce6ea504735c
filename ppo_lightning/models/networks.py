"""Agents made of an actor and a critic as they are: modules of TorchRL, or two plain networks."""

import functools
import json
import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data import Bounded, Categorical, Composite, TensorSpec
from torchrl.modules.distributions.utils import has_analytic_entropy

from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.models.actor import Actor
from ppo_lightning.models.agent import ActorCritic
from ppo_lightning.models.composite import make_head
from ppo_lightning.models.default import DefaultAgent, changed
from ppo_lightning.models.heads import Head, Parameters
from ppo_lightning.spaces.specs import choice_counts, columns, is_mask, mask_columns, spec_to_plain, stored

Network = Callable[[TensorSpec, TensorSpec], nn.Module] | nn.Module  # what makes a module, or a module
PAIR = (
    "give TorchRL's ProbabilisticActor and ValueOperator, an ActorValueOperator alone, or two networks that"
    " return logits (for continuous actions mean and log std) and values, see docs/torchrl.md"
)


class NetworkAgent(ActorCritic):
    """An agent made of an actor and a critic of TorchRL, or of two plain networks.

    Modules of TorchRL read the entries of an observation by name, and an observation without entries under
    any name. A plain network takes the observation, or a dictionary of its entries.

    Args:
        observation_spec: Spec of one environment.
        action_spec: Spec of the actions.
        actor: A ``ProbabilisticActor``, an ``ActorValueOperator``, or a network from observations [B, ...] to
            logits [B, A]; for continuous actions to mean and log standard deviation, [B, A] each, or [B, 2A].
            Or a class or a function that makes one from the two specs.
        critic: The same for values, [B, 1] or [B]. None: an ``ActorValueOperator`` has a critic.

    Raises:
        ConfigError: The modules do not make an agent for the specs.

    Example:
        >>> from torchrl.data import Unbounded
        >>> specs = Unbounded((4,)), Categorical(2, shape=())
        >>> agent = NetworkAgent(*specs, actor=nn.Linear(4, 2), critic=nn.Linear(4, 1))
        >>> agent.mode(torch.zeros(3, 4)).shape
        torch.Size([3])
    """

    def __init__(
        self,
        observation_spec: TensorSpec,
        action_spec: TensorSpec,
        actor: Network | Any,
        critic: Network | Any,
    ) -> None:
        super(Actor, self).__init__()  # the networks are the user's
        self.entries = self.normalizer = self.memory = self.mask = None
        self.actor_body: Any = None
        self.critic_body = None
        self.critic: Any = nn.Identity()
        self.actions = spec_to_plain(action_spec)
        try:
            self._build(actor, critic, observation_spec, action_spec)
        except Exception as error:  # modules of a user may raise anything
            raise ConfigError(
                f"model.actor and model.critic make no agent for data.env_id ({first_line(error)}): {PAIR}."
            ) from error
        plain = _to_plain(actor), _to_plain(critic)
        # A checkpoint stores both, or none.
        actor, critic = (None, None) if critic is not None and plain[1] is None else plain
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])

    def _build(self, actor: Any, critic: Any, observation_spec: TensorSpec, action_spec: TensorSpec) -> None:
        """Keep the modules, and act once, which gives lazy layers their sizes."""
        actor, critic = (
            network if isinstance(network, nn.Module | None) else network(observation_spec, action_spec)
            for network in (actor, critic)
        )
        self.body = None
        if hasattr(actor, "get_policy_head"):  # its body runs once
            *body, actor, value = actor.module
            self.body, critic = body[0] if body else None, critic or value
        if isinstance(action_spec, Composite):
            raise TypeError("it has actions of several entries")
        is_torchrl = isinstance(actor, ProbabilisticTensorDictSequential)
        if not is_torchrl and isinstance(actor, TensorDictModuleBase):
            raise TypeError(f"{type(actor).__name__} has no distribution")
        self.actor_network, self.critic_network = actor, critic
        self._parts = list(columns(observation_spec))
        self._keys: list[Any] = [tuple(name.split(".")) if "." in name else name for name, *_ in self._parts]
        if self._keys == [""]:
            readers = (actor, critic) if self.body is None else (self.body,)
            asked = {key for module in readers for key in getattr(module, "in_keys", ())}
            self._keys = [*asked] if len(asked) == 1 else ["observation"]
        if is_torchrl and mask_columns(observation_spec):
            read = {key for module in (actor, self.body) for key in getattr(module, "in_keys", ())}
            if not any(is_mask(key if isinstance(key, str) else ".".join(key)) for key in read):
                raise ValueError("the actor does not read the observation's action_mask")
        if is_torchrl or action_spec.dtype.is_floating_point:
            self.head: Any = _DistributionHead(action_spec)  # type: ignore[abstract]
        else:
            self.mask = mask_columns(observation_spec)
            self.head = make_head(None, 1, action_spec)
            self.head.linear = nn.Identity()
        spec = stored(observation_spec)
        rows = torch.zeros(2, *spec.shape, dtype=spec.dtype)
        self.eval()
        with torch.no_grad():
            action, log_prob, value, _ = self.act(rows, self.noise((2,)))
            self.evaluate(rows, action)
            features, _ = self.features(rows)
        self.train()
        shapes = [[*tensor.shape] for tensor in (action, log_prob, value.squeeze(-1))]
        if shapes != [[2, *action_spec.shape], [2], [2]]:
            raise ValueError(f"actions, log-probabilities and values have the shapes {shapes} for two rows")
        self._estimates_entropy = not isinstance(features, Tensor) and not has_analytic_entropy(features)

    def _inputs(self, observation: Tensor) -> dict[Any, Tensor]:
        """Return observations [B, ...] by name, and the output of a shared body."""
        inputs = {self._keys[0]: observation}
        if self._parts[0][0] or isinstance(self._parts[0][1], Categorical):
            rows = observation.flatten(1)
            for key, (name, part, place) in zip(self._keys, self._parts, strict=True):
                values = rows[:, place].reshape(-1, *part.shape)
                inputs[key] = values > 0 if is_mask(name) else values.to(part.dtype)
        return inputs if self.body is None else dict(self.body(TensorDict(inputs)).items())

    def _call(self, network: nn.Module, inputs: Any) -> Any:
        """Return the output of a module; that of TorchRL's modules is a TensorDict."""
        if isinstance(network, TensorDictModuleBase):
            return network(TensorDict(inputs))
        return network(inputs if self._parts[0][0] else inputs[self._keys[0]])

    @property
    def traceable(self) -> bool:
        """Whether a compiler can trace the distribution: an estimate of its entropy cannot be traced."""
        return not self._estimates_entropy

    def features(self, observation: Tensor, memory: Tensor | None = None) -> tuple[Any, None]:
        """Return the distribution of actions, or its logits, in the place of features."""
        return self._distribution(self._inputs(observation)), None

    def both_features(self, observation: Tensor, memory: Tensor | None) -> tuple[Any, Tensor, None]:
        """Return the distribution, and the values [B, 1]."""
        inputs = self._inputs(observation)
        return self._distribution(inputs), self._value(inputs), None

    def _distribution(self, inputs: dict[Any, Tensor]) -> Any:
        if isinstance(self.actor_network, ProbabilisticTensorDictSequential):
            output = self.actor_network.get_dist_params(TensorDict(inputs))
            precise = output.apply(lambda x: x.float() if x.is_floating_point() else x)
            return _joint(self.actor_network.build_dist_from_params(precise))
        outputs = self._call(self.actor_network, inputs)
        if not isinstance(self.head, _DistributionHead):
            return outputs.float()
        mean, log_std = outputs if isinstance(outputs, tuple) else outputs.chunk(2, dim=-1)
        return _joint(D.Normal(mean.float(), log_std.float().exp().expand_as(mean)))

    def _value(self, inputs: Any) -> Tensor:
        values = self._call(self.critic_network, inputs)
        if not isinstance(values, Tensor):
            values = values[self.critic_network.out_keys[-1]]
        return values.float().reshape(-1, 1)

    def value(self, observation: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return the values [B] of observations [B, ...]."""
        return self._value(self._inputs(observation)).squeeze(-1)


class _DistributionHead(Head):
    """Head that gets a distribution of :mod:`torch.distributions` in the place of features."""

    bounds: Tensor | None

    def __init__(self, action_spec: TensorSpec) -> None:
        nn.Module.__init__(self)
        self.noise_shape = action_spec.shape
        bounds = None
        if isinstance(action_spec, Categorical):
            self.largest_entropy = sum(map(math.log, choice_counts(action_spec)))
        elif isinstance(action_spec, Bounded):
            bounds = torch.stack([action_spec.space.low, action_spec.space.high])
        self.register_buffer("bounds", bounds, persistent=False)

    def noise(self, batch_shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        noise = torch.rand(*batch_shape, *self.noise_shape, generator=generator, dtype=torch.float32)
        return noise.clamp(1e-6, 1 - 1e-6)  # an inverse CDF may be infinite at the ends

    def sample(self, features: Any, noise: Tensor | None, mask: Any = None) -> tuple[Tensor, Tensor]:
        action = _draw(features, noise)
        return action, features.log_prob(action)

    def evaluate(self, features: Any, action: Tensor, mask: Any = None) -> tuple[Tensor, Tensor, Parameters]:
        if has_analytic_entropy(features):
            entropy = features.entropy()
        else:  # one sample a row, by the same noise each time: a resumed run is equal to the bit
            noise = self.noise(action.shape[:1], torch.Generator().manual_seed(0)).to(action.device)
            log_prob = features.log_prob(_draw(features, noise))
            if not features.has_rsample:  # the score function has the gradient, where samples have none
                log_prob = log_prob + log_prob.detach() * (log_prob - log_prob.detach())
            entropy = -log_prob
        return features.log_prob(action), entropy, ()

    def bars(self, features: Any, mask: Any = None) -> tuple[Tensor, Tensor]:
        if isinstance(features, D.Categorical):
            return features.probs, features.probs
        action = self.for_environment(_draw(features, None))
        low, high = (0, 1) if self.bounds is None else self.bounds
        return action, (action - low) / (high - low)

    def for_environment(self, action: Tensor) -> Tensor:
        return action if self.bounds is None else action.clamp(*self.bounds)


def _joint(distribution: Any) -> D.Distribution:
    """Return the distribution of whole actions, with indices in the place of one-hot vectors."""
    if isinstance(distribution, D.Categorical | D.OneHotCategorical):
        distribution = D.Categorical(logits=distribution.logits)
    components = len(distribution.batch_shape) - 1
    return D.Independent(distribution, components) if components > 0 else distribution


def _draw(distribution: Any, noise: Tensor | None) -> Tensor:
    """Return the sample that uniform noise selects; without noise, the most probable action.

    Discrete and normal actions of a row depend on the noise of the row alone. Other distributions draw from
    PyTorch's generator, with a seed from the noise.
    """
    if noise is None:
        # TorchRL's own distributions have this attribute, PyTorch's the mode.
        has_sample = hasattr(distribution, "deterministic_sample")
        return distribution.deterministic_sample if has_sample else distribution.mode
    base = distribution.base_dist if isinstance(distribution, D.Independent) else distribution
    if isinstance(base, D.Categorical):
        cumulative = base.probs.cumsum(-1)
        return (cumulative <= noise.unsqueeze(-1) * cumulative[..., -1:]).sum(-1)
    if isinstance(base, D.Normal):
        return base.icdf(noise)
    with torch.random.fork_rng([noise.device] if noise.is_cuda else []):
        torch.manual_seed(zlib.crc32(noise.numpy(force=True).tobytes()))
        return distribution.rsample() if distribution.has_rsample else distribution.sample()


# What makes the modules


def choose_agent(agent: Callable[..., Any], actor: Any, critic: Any) -> Callable[..., Any]:
    """Return what makes the agent: ``agent``, or the actor and the critic if they are given."""
    if actor is None and critic is None:
        return agent
    if class_of(agent) is not DefaultAgent or changed(getattr(agent, "keywords", {})):
        raise ConfigError("model.agent and model.actor are both given: remove one of them.")
    return functools.partial(NetworkAgent, actor=actor, critic=critic)


def class_of(maker: Any) -> type | None:
    """Return the class that is made, also of ``functools.partial``, to which the command line passes it."""
    parts = (maker.func, *maker.args) if isinstance(maker, functools.partial) else (maker,)
    return next((part for part in parts if isinstance(part, type)), None)


def _to_plain(network: Any) -> dict[str, Any] | None:
    """Describe a class and its arguments in plain types; None if a checkpoint cannot rebuild the network."""
    if (made := class_of(network)) is None:
        return None
    try:
        arguments = json.loads(json.dumps(getattr(network, "keywords", {})))
    except TypeError:
        return None
    return {"class_path": f"{made.__module__}.{made.__qualname__}", "init_args": arguments}
