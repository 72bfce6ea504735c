"""Batched environments as environments of TorchRL."""

from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, GymLikeEnv, SerialEnv, TransformedEnv

from ppo_lightning import private
from ppo_lightning.envs.batched import BatchedEnv, has_itself, set_attribute
from ppo_lightning.utils.seeding import derive_seed


class TorchRLEnv(EnvBase):
    """View of batched environments as one environment of TorchRL, batch size [N].

    The keys are ``observation``, ``action``, ``reward``, ``done``, ``terminated`` and ``truncated``. If not
    all steps count, ``("next", "weight")`` [N] is 0 where one does not, see :class:`BatchedEnv`. Public
    attributes of the environments below can be read from the view, too; set them on ``arrays``. Closing a
    view closes them, dropping it does not.

    Args:
        arrays: The environments.

    Example:
        >>> from ppo_lightning.envs import make_env
        >>> env = make_env("CartPole-v1", num_envs=2, seed=1)
        >>> env.rollout(3)["next", "reward"].shape
        torch.Size([2, 3, 1])
        >>> env.arrays.reset_arrays().shape
        (2, 4)
    """

    def __init__(self, arrays: BatchedEnv) -> None:
        super().__init__(device="cpu", batch_size=arrays.batch_size)
        self.arrays = arrays
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        observation_spec = arrays.observation_spec_unbatched.clone()
        if arrays.valid is not None:
            observation_spec["weight"] = Unbounded(())
        self.observation_spec_unbatched = observation_spec
        self.action_spec_unbatched = arrays.action_spec_unbatched.clone()
        self.reward_spec_unbatched = Unbounded(shape=(1,), dtype=torch.float32)
        self.done_spec_unbatched = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "arrays":
            return super().__getattr__(name)
        return getattr(self.arrays, name)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is not None:
            mask = mask.reshape(self.arrays.num_envs).numpy()
        observation = torch.tensor(self.arrays.reset_arrays(mask), dtype=self.arrays.format.tensor_dtype)
        begun = TensorDict({"observation": observation, **self.full_done_spec.zero()}, self.batch_size)
        return begun if self.arrays.valid is None else begun.set("weight", torch.ones(self.batch_size))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        step = self.arrays.step_arrays(tensordict["action"].numpy(force=True))
        columns = {
            "reward": torch.tensor(step.reward, dtype=torch.float32),
            "terminated": torch.tensor(step.terminated),
            "truncated": torch.tensor(step.truncated),
            "done": torch.tensor(step.terminated | step.truncated),
        }
        following = {key: values.unsqueeze(-1) for key, values in columns.items()}
        if self.arrays.valid is not None:
            following["weight"] = torch.tensor(self.arrays.valid, dtype=torch.float32)
        following["observation"] = torch.tensor(step.observation, dtype=self.arrays.format.tensor_dtype)
        return TensorDict(following, batch_size=self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.arrays.reseed([derive_seed(seed, "train", index) for index in range(self.arrays.num_envs)])

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the environments and stop their threads."""
        self.arrays.close()

    @property
    def is_closed(self) -> bool:
        """Whether the environments are closed."""
        return self.arrays.is_closed

    @is_closed.setter
    def is_closed(self, value: bool) -> None:
        """Ignore what TorchRL sets, which would hide that they are open."""

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Restore the episodes. TorchRL has another method of this name."""
        self.arrays.set_state(states)


AnyEnv: TypeAlias = BatchedEnv | EnvBase


def as_torchrl(env: AnyEnv) -> EnvBase:
    """Return environments as an environment of TorchRL."""
    return TorchRLEnv(env) if isinstance(env, BatchedEnv) else env


def untransformed(env: Any) -> Any:
    """Return the environments below TorchRL's transforms, and below the view of a :class:`TorchRLEnv`."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env.arrays if isinstance(env, TorchRLEnv) else env


def set_everywhere(env: Any, name: str, value: Any) -> None:
    """Set an attribute of each environment of a batch, see :func:`set_attribute`."""
    base = untransformed(env)
    if isinstance(base, SerialEnv):
        for one in private.copies_in(base):
            set_everywhere(one, name, value)
    elif isinstance(base, BatchedEnv):
        base.set_attr(name, value)
    elif isinstance(base, GymLikeEnv) and not has_itself(base, name):
        set_attribute(private.wrapped(base), name, value)
    else:
        set_attribute(base, name, value)
