"""Evaluation: whole episodes with the deterministic policy."""

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from tensordict import TensorDict, TensorDictBase

from ppo_lightning.envs.contract import SUCCESS
from ppo_lightning.envs.factory import EnvFactory
from ppo_lightning.envs.torchrl import AnyEnv
from ppo_lightning.models import Actor
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.utils import collectives
from ppo_lightning.utils.seeding import Shard, isolated
from ppo_lightning.utils.watch import Interrupted, end_request

MAX_EPISODE_STEPS = 30_000
STEPS_AT_ONCE = 64


@isolated()
def evaluate(
    agent: Actor, env: AnyEnv, num_steps: int = STEPS_AT_ONCE, step_timeout: float | None = None
) -> TensorDictBase:
    """Play one whole episode in each environment with the most probable actions.

    Every environment counts once, so that short episodes are not over-represented. The agent and the global
    random number generators do not change. An episode that has not ended after 30 000 steps counts with the
    return and the length so far, with a warning.

    Args:
        agent: The agent.
        env: N fresh environments, batch size [N]; the caller closes them.
        num_steps: Steps collected at a time.
        step_timeout: As for :class:`~ppo_lightning.RolloutCollector`.

    Returns:
        ``episode_reward``, ``step_count`` and, if infos have numbers, ``info`` of the N episodes, [N].
    """
    collector = make_collector(env, agent, num_steps, deterministic=True, step_timeout=step_timeout)
    episodes = no_episodes(env.batch_size[0])
    playing = torch.ones(env.batch_size, dtype=torch.bool)
    for played, rollout in enumerate(collector, start=1):
        if (info := rollout["next"].get("info", None)) is not None:
            episodes.setdefault("info", torch.full_like(info[:, 0], torch.nan, device="cpu"))
        following = rollout["next"].select("episode_done", *episodes.keys(), strict=False).cpu()
        done = following["episode_done"].squeeze(-1)
        last = range(len(done)), done.int().argmax(dim=1)  # the first step that ended an episode
        ended = playing & done.any(dim=1)
        for key in episodes.keys() & following.keys():
            result = episodes[key]
            result[ended] = following[key][last].reshape(result.shape)[ended]
        playing &= ~ended
        if not playing.any():
            break
        if played * num_steps >= MAX_EPISODE_STEPS:
            for key in ("episode_reward", "step_count"):
                episodes[key][playing] = following[key][playing, -1, 0]
            warnings.warn(
                f"{int(playing.sum())} episodes of the evaluation have not ended within"
                f" {played * num_steps} steps: set data.env_kwargs.max_episode_steps, or use TimeLimit.",
                stacklevel=2,
            )
            break
    return episodes


def pooled_statistics(prefix: str, episodes: TensorDictBase, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the metrics of the episodes of all ranks, of which this one has ``episodes`` [E]; a collective.

    There are none if no rank has an episode. ``names`` are those of the infos [E, names].
    """
    no_info = episodes["episode_reward"].new_full((len(episodes), len(names)), torch.nan)
    episodes.setdefault("info", no_info)  # the same keys on all ranks
    played = {key: collectives.concatenate(value) for key, value in episodes.items()}
    if not len(played["episode_reward"]):
        return {}
    results = episode_statistics(prefix, played)  # on the CPU: MPS has no float64
    return results | info_means(prefix, played["info"], names, results)


def episode_statistics(prefix: str, episodes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return mean, standard deviation, min and max of return and length of episodes [E], float64 on the CPU.

    The keys are ``prefix/episodic_return``, ``prefix/episodic_return_std`` and so on.
    """
    results = {}
    for name, key in (("episodic_return", "episode_reward"), ("episodic_length", "step_count")):
        values = episodes[key].cpu().double()
        results[f"{prefix}/{name}"] = values.mean()
        results[f"{prefix}/{name}_std"] = values.std() if len(values) > 1 else torch.zeros_like(values.sum())
        results[f"{prefix}/{name}_min"] = values.min()
        results[f"{prefix}/{name}_max"] = values.max()
    return results


def info_means(
    prefix: str, numbers: torch.Tensor, names: Sequence[str], taken: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return the means of numbers of infos [E, names], without NaN, as ``prefix/NAME``.

    A metric whose name is ``taken`` is ``prefix/info_NAME``.
    """
    labels: list[str] = []
    for name in names:
        label = f"{prefix}/{'success_rate' if name == SUCCESS else name}"
        labels.append(f"{prefix}/info_{name}" if label in (*taken, *labels) else label)
    means = zip(labels, numbers.nanmean(dim=0), strict=True)
    return {label: mean for label, mean in means if not mean.isnan()}


@dataclass(eq=False)
class EvaluationLoader:
    """Loader of one batch for ``validate`` and ``test``: the episodes of :func:`evaluate`.

    ``wait`` is called first: it lets a pending rollout finish, which would draw from the same generators.
    """

    factory: EnvFactory
    agent: Actor
    shard: Shard  # the episodes of this rank, one in each environment
    profiler: Profiler = field(default_factory=PassThroughProfiler)  # records `evaluate`
    wait: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[TensorDictBase]:
        self.wait()
        episodes: TensorDictBase = no_episodes(0)
        # A signal leaves this rank without episodes. Environments are made isolated, too.
        with contextlib.suppress(Interrupted), end_request.may_cut(lambda: True), isolated():
            if self.shard.count:
                episodes = self._play()
        yield episodes  # Lightning takes no further batch, and would leave the environments open

    def _play(self) -> TensorDictBase:
        shard = self.shard
        try:
            env = self.factory.make(shard.count, shard.seed, shard.first, stream="eval")
        except Exception as error:
            error.add_note(
                f"An evaluation makes {shard.count} environments beside those of training"
                " (data.eval_episodes; trainer.limit_val_batches 0 for none)."
            )
            raise
        try:
            with self.profiler.profile("evaluate"):
                return evaluate(self.agent, env, step_timeout=self.factory.step_timeout)
        finally:
            if not env.is_closed:
                env.close()


def no_episodes(count: int) -> TensorDict:
    """Return zero returns and lengths of episodes, batch size [count]."""
    kinds = {"episode_reward": torch.float32, "step_count": torch.int64}
    results = {key: torch.zeros(count, dtype=kind) for key, kind in kinds.items()}
    return TensorDict(results, batch_size=[count])
