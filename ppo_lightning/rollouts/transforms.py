"""The agent's statistics as TorchRL transforms, for environments that go through TorchRL's own collector."""

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import Categorical, Composite, TensorSpec, Unbounded
from torchrl.envs import Transform

from ppo_lightning.models.normalizers import ObservationNormalizer, RewardScaler
from ppo_lightning.utils.finite import require_finite


class RequireFinite(Transform):
    """Raises where an observation or a reward is not finite.

    Args:
        first_env: Global index of the first environment, when several ranks share the run.
    """

    def __init__(self, first_env: int = 0) -> None:
        super().__init__()
        self._first_env, self._steps = first_env, 0

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for key in ("observation", "reward"):
            require_finite(key, next_tensordict[key].numpy(force=True), self._steps, self._first_env)
        self._steps += 1
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        require_finite(
            "observation", tensordict_reset["observation"].numpy(force=True), self._steps, self._first_env
        )
        return tensordict_reset


class EpisodeDone(Transform):
    """Writes ``episode_done``, which here is ``done``: only environments with lives tell the two apart."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        next_tensordict["episode_done"] = next_tensordict["done"].clone()
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        tensordict_reset["episode_done"] = tensordict_reset["done"].clone()
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """Adds the key."""
        assert isinstance(observation_spec, Composite)
        observation_spec["episode_done"] = Categorical(
            2, shape=(*observation_spec.shape, 1), dtype=torch.bool
        )
        return observation_spec


class ClipAction(Transform):
    """Clip the action that the environment gets to its bounds; the rollout keeps the drawn action.

    Args:
        low: Lower bounds, [A].
        high: Upper bounds, [A]. (TorchRL's ``ClipTransform`` takes one number for all.)
    """

    def __init__(self, low: torch.Tensor, high: torch.Tensor) -> None:
        super().__init__(in_keys_inv=["action"], out_keys_inv=["action"])
        self._low, self._high = low, high

    def _inv_apply_transform(self, state: torch.Tensor) -> torch.Tensor:
        return state.clamp(self._low.to(state), self._high.to(state))


class NormalizeObservation(Transform):
    """Normalises ``observation`` by an agent's statistics.

    Args:
        normalizer: The agent's; it is shared, not copied.
        update: Let it see the observations, of steps and of resets.
    """

    def __init__(self, normalizer: ObservationNormalizer, update: bool = True) -> None:
        super().__init__(in_keys=["observation"], out_keys=["observation"])
        self._shared = (normalizer,)  # a tuple, so that its buffers do not become the environment's
        self._update = update

    def _normalize(self, observation: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        (normalizer,) = self._shared
        moments, raw = normalizer.arrays(), observation.numpy(force=True)
        if self._update and rows is not None:
            moments.update(raw[rows.numpy(force=True)])
        (normalized,) = normalizer.normalize_arrays(moments, [raw], update=self._update and rows is None)
        if self._update:
            normalizer.store(moments)
        return torch.from_numpy(normalized.astype(np.float32)).to(observation.device)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        next_tensordict["observation"] = self._normalize(next_tensordict["observation"])
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        rows = None if mask is None else mask.reshape(tensordict_reset.batch_size)
        tensordict_reset["observation"] = self._normalize(tensordict_reset["observation"], rows)
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """Drops the bounds."""
        assert isinstance(observation_spec, Composite)
        observation_spec["observation"] = Unbounded(
            shape=observation_spec["observation"].shape, dtype=torch.float32
        )
        return observation_spec


class ScaleReward(Transform):
    """Scale ``reward`` by a module's running statistics.

    Place the transform after ``RewardSum``, which then sums the raw rewards.

    Args:
        scaler: The module's; it is shared, not copied.
    """

    def __init__(self, scaler: RewardScaler) -> None:
        super().__init__(in_keys=["reward"], out_keys=["reward"])
        self._shared = (scaler,)
        self._discounted: np.ndarray | None = None

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        (scaler,) = self._shared
        reward, done = (next_tensordict[key].flatten().numpy(force=True) for key in ("reward", "done"))
        if self._discounted is None:
            self._discounted = np.zeros(len(reward))
        moments = scaler.arrays()
        scaled = scaler.scale_array(moments, reward[None], done[None], self._discounted)[0]
        scaler.store(moments)
        raw = next_tensordict["reward"]
        next_tensordict["reward"] = torch.from_numpy(scaled).to(raw).reshape(raw.shape)
        return next_tensordict
