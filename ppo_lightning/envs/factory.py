"""From an id, or a function, to N environments that step together."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import gymnasium
import torch
from torchrl.data import Categorical, Composite, TensorSpec
from torchrl.envs import Compose, EnvBase, SerialEnv, Transform, TransformedEnv

from ppo_lightning.envs.atari import ATARI_ID, check_options
from ppo_lightning.envs.batched import BatchedEnv
from ppo_lightning.errors import ConfigError
from ppo_lightning.spaces.specs import MASK, stored
from ppo_lightning.utils.seeding import Stream, derive_seed

Backend = Literal["gymnasium", "vectorized", "envpool", "ale", "procgen"]


class Adapter(NamedTuple):
    """Where the environments of a backend come from.

    Attributes:
        path: Module and class, imported when the backend is used (EnvPool's import alone takes a second).
        render: Backend whose environments of the same id have pictures for people.
        atari: Module and class of the Atari games; None: the backend has none.
    """

    path: str | None
    render: str
    atari: str | None = None


BACKENDS: dict[str, Adapter] = {
    "gymnasium": Adapter("gymnasium:GymnasiumEnv", "gymnasium", "atari_backends:GymnasiumAtari"),
    "vectorized": Adapter("cartpole:CartPoleEnv", "gymnasium"),
    "envpool": Adapter("envpool:EnvPoolEnv", "gymnasium", "atari_backends:EnvPoolAtari"),
    "ale": Adapter(None, "gymnasium", "atari_backends:AleAtari"),
    "procgen": Adapter("procgen:ProcgenEnv", "procgen"),
}


class Specs(NamedTuple):
    """Observations and actions of one environment, part by part."""

    observation: TensorSpec
    action: TensorSpec


@dataclass(frozen=True)
class EnvFactory:
    """Make environments for training, evaluation, video and export alike.

    Args:
        env_id: The environment's id as the backend spells it, or a function that makes a new Gymnasium or TorchRL
            environment at each call.
        backend: A key of ``BACKENDS``.
        env_kwargs: For the backend's own ``make``, ``max_episode_steps`` included. For Atari games, the options of
            :class:`~ppo_lightning.envs.atari.AtariEnv`. For a function, its arguments.
        transforms: TorchRL transforms, copied for each batch of environments.

    Example:
        >>> env = EnvFactory("CartPole-v1").make(num_envs=4, seed=1)
    """

    env_id: str | Callable[..., Any]
    backend: Backend = "gymnasium"
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    transforms: Sequence[Transform] = ()

    def make(
        self,
        num_envs: int = 1,
        seed: int = 1,
        first_env: int = 0,
        stream: Stream = "train",
        render: bool = False,
    ) -> EnvBase:
        """Make N environments as one TorchRL environment of batch size [N].

        Args:
            num_envs: N.
            seed: The run's seed; each environment gets a seed of its own, see
                :func:`~ppo_lightning.utils.seeding.derive_seed`.
            first_env: Global index of the first environment, for several ranks.
            stream: ``train`` or ``eval``: other episodes for the same seed.
            render: Whether the first environment must have pictures, see :meth:`BatchedEnv.render`.

        Raises:
            ConfigError: No such environment, a missing extra, or a function that makes something else.
        """
        seeds = [derive_seed(seed, stream, index) for index in range(first_env, first_env + num_envs)]
        if isinstance(self.env_id, str):
            env: EnvBase = self._registered(seeds, first_env, render)
        else:
            env = self._by_function(self.env_id, seeds, first_env, stream, render)
        return TransformedEnv(env, Compose(*(t.clone() for t in self.transforms))) if self.transforms else env

    def specs(self) -> Specs:
        """Return the specs of one environment, which is made for that and closed.

        Raises:
            ConfigError: As for :meth:`make`; or a part of the specs would be ignored.
        """
        env = self.make(stream="eval")
        try:
            return specs_of(env)
        finally:
            env.close()

    def _registered(self, seeds: list[int], first_env: int, render: bool) -> BatchedEnv:
        backend, env_kwargs = BACKENDS[self.backend], dict(self.env_kwargs)
        if render:
            backend = BACKENDS[backend.render]
        if self.backend == "ale" or ATARI_ID.fullmatch(self.env_id):  # type: ignore[arg-type]
            if backend.atari is None:
                raise ConfigError(
                    f"env_id {self.env_id!r} is an Atari game, which the backend {self.backend!r} does not have."
                )
            check_options(env_kwargs)
            return _adapter(backend.atari)(self.env_id, seeds, **env_kwargs)
        assert backend.path is not None
        adapter = _adapter(backend.path)
        if render:
            env_kwargs["render_mode"] = "rgb_array"
        if adapter.numbers_its_envs:
            return adapter(self.env_id, seeds, first_env, **env_kwargs)
        return adapter(self.env_id, seeds, **env_kwargs)

    def _by_function(
        self, function: Callable[..., Any], seeds: list[int], first_env: int, stream: Stream, render: bool
    ) -> EnvBase:
        if self.backend != "gymnasium":
            raise ConfigError(
                f"data.backend is {self.backend!r}, and env_id is a function: set data.backend to 'gymnasium'."
            )
        env_kwargs = dict(self.env_kwargs)
        if render and "render_mode" in _parameters(function):
            env_kwargs["render_mode"] = "rgb_array"
        make = functools.partial(_call, function, env_kwargs)
        env = make()
        if not isinstance(env, EnvBase):
            made = [env]  # only a call tells what the function makes
            return _adapter("gymnasium:GymnasiumEnv")(
                lambda: made.pop() if made else make(), seeds, first_env
            )
        num_envs = len(seeds)
        if env.batch_size == torch.Size([]):
            env.close()
            env = SerialEnv(num_envs, make)
        if stream == "train" and env.batch_size != torch.Size([num_envs]):
            sizes = f"{list(env.batch_size)}: it must be [] or [{num_envs}]"
            raise ConfigError(f"env_id makes an environment of batch size {sizes}.")
        env.set_seed(seeds[0])
        return env


def make_env(
    env_id: str | Callable[..., Any],
    num_envs: int = 1,
    backend: Backend = "gymnasium",
    seed: int = 1,
    first_env: int = 0,
    stream: Stream = "train",
    env_kwargs: Mapping[str, Any] | None = None,
) -> BatchedEnv:
    """Make N copies of a Gymnasium environment, see :class:`EnvFactory`.

    Returns:
        An environment with the keys ``observation``, ``action``, ``reward``, ``done``, ``terminated`` and ``truncated``.

    Raises:
        ConfigError: As for :meth:`EnvFactory.make`.

    Example:
        >>> env = make_env("Pendulum-v1", num_envs=2, env_kwargs={"max_episode_steps": 100})
    """
    env = EnvFactory(env_id, backend, env_kwargs or {}).make(num_envs, seed, first_env, stream)
    assert isinstance(env, BatchedEnv)
    return env


def specs_of(env: EnvBase) -> Specs:
    """Return the specs of one environment of a batch.

    Raises:
        ConfigError: The environment has no ``observation``, or transforms would hide a part of its spaces.
    """
    if isinstance(env, BatchedEnv):
        return Specs(*env.agent_specs)
    spec, base = env.observation_spec_unbatched, getattr(env, "base_env", None)
    several = False
    if isinstance(base, BatchedEnv):
        observations, actions = base.agent_specs
        several = stored(observations) is not observations or isinstance(actions, Composite)
    if several or MASK in spec or isinstance(spec.get("observation", None), Categorical | Composite):
        raise ConfigError(
            "Discrete observations, observations and actions of several parts and an action_mask are read from Gymnasium's"
            " environments without data.transforms: elsewhere they would be ignored."
        )
    if "observation" not in spec:
        keys = f"{list(spec.keys())}: it needs the key 'observation'"
        raise ConfigError(f"env_id makes an environment with the keys {keys}{how_to_join(spec)}")
    return Specs(spec["observation"], env.action_spec_unbatched)


def how_to_join(spec: Composite) -> str:
    """Return the end of a message: the transforms that join numbers and vectors of a spec as ``observation``."""
    leaves = {key: part for key, part in spec.items() if not isinstance(part, Composite)}
    floats = {key: part for key, part in leaves.items() if part.dtype.is_floating_point and part.ndim < 2}
    if not floats:
        return "."
    numbers = [key for key, part in floats.items() if part.ndim == 0]
    vectors = [f"{key}_1" if key in numbers else key for key in floats]
    lines = [
        f"UnsqueezeTransform(-1, in_keys={numbers}, out_keys={[f'{key}_1' for key in numbers]})"
        if numbers
        else "",
        f"CatTensors({vectors}, 'observation', del_keys=False)",
        "StepCounter(200)  # an episode's time limit",
    ]
    return ". These data.transforms make it:" + "".join(f"\n    {line}" for line in lines if line)


def require_maker(env_id: Any) -> None:
    """Check that ``data.env_id`` is an id or a function.

    Raises:
        ConfigError: It is an environment, or something else.
    """
    if isinstance(env_id, gymnasium.Env | gymnasium.vector.VectorEnv | EnvBase):
        give = "give a function that makes a new one at each call, as in env_id=lambda: gymnasium.make('CartPole-v1')"
        raise ConfigError(f"data.env_id is an environment ({type(env_id).__name__}): {give}.")
    if not (isinstance(env_id, str) or callable(env_id)):
        raise ConfigError(
            f"data.env_id is {env_id!r}: give an environment's id, or a function that makes an environment."
        )


def _adapter(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin
        return {}


def _call(function: Callable[..., Any], env_kwargs: dict[str, Any]) -> Any:
    try:
        return function(**env_kwargs)
    except TypeError as error:
        assert error.__traceback__ is not None
        if error.__traceback__.tb_next is not None:  # the function's own
            raise
        raise ConfigError(
            f"env_id must be callable with data.env_kwargs as its arguments: {error}."
        ) from error
    except SystemExit as error:
        raise RuntimeError(f"env_id, which makes the environment, raised {error!r}.") from error
