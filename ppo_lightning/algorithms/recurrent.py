"""PPO for agents with a memory: an LSTM or a GRU between body and heads."""

from collections.abc import Iterator

import torch
from tensordict import TensorDictBase
from torch import Tensor

from ppo_lightning.algorithms import losses
from ppo_lightning.algorithms.checks import check_minibatch_size
from ppo_lightning.algorithms.minibatches import Minibatch, weight_of_rank
from ppo_lightning.algorithms.ppo import PPO
from ppo_lightning.errors import ConfigError
from ppo_lightning.rollouts.storage import episode_starts
from ppo_lightning.utils import collectives

OF_STEPS = ("action_log_prob", "state_value", "advantage", "value_target")


class RecurrentPPO(PPO):
    """PPO whose minibatches are whole sequences, through which the memory goes again from where it was at their first step.

    The hyperparameters are those of :class:`~ppo_lightning.PPO`; ``num_minibatches`` must divide the environments of a
    rank. With ``compile`` the networks before and after the memory are compiled, and the memory is PyTorch's own kernel.

    Raises:
        ConfigError: The agent has no memory, or the environments cannot be split into minibatches.
    """

    takes_memory = True
    whole_graph = False

    def check_split(self) -> None:
        """See :meth:`PPO.check_split`.

        Raises:
            ConfigError: Names the fields and what to change.
        """
        num_envs, count = self.data.num_envs // self.trainer.world_size, self.hparams.num_minibatches
        if num_envs % count:
            raise ConfigError(
                f"data.num_envs gives each rank {num_envs} environments, whose whole sequences cannot be split into"
                f" model.num_minibatches = {count} minibatches: change one of the two."
            )
        check_minibatch_size(self.hparams, num_envs // count * self.data.num_steps)

    def minibatches(self, rollout: TensorDictBase) -> Iterator[Minibatch]:
        """Yields the sequences in random minibatches [n, T, ...], their advantages normalised; each sequence once.

        Of every ``num_minibatches`` neighbouring environments each minibatch gets one, so that, split over ranks, it is the
        union of their minibatches.
        """
        num_envs, count = rollout.batch_size[0], self.hparams.num_minibatches
        # detail 35
        groups = self.uniform(num_envs).view(-1, count).argsort(dim=1) + torch.arange(0, num_envs, count)[:, None]
        order = groups.T.to(rollout["action"].device)  # [count, n]
        epoch = {key: rollout[key] for key in ("observation", "action", *OF_STEPS)}
        epoch |= {"memory": rollout["memory"][:, 0], "is_init": episode_starts(rollout)}
        if masked := "valid" in rollout.keys():  # noqa: SIM118  (a TensorDict)
            epoch["valid"] = rollout["valid"]
        elif self.hparams.norm_adv:
            advantage = epoch["advantage"][order]  # [count, n, T, 1]
            of_all_ranks = collectives.gather(advantage.flatten(1)).transpose(0, 1).flatten(1)
            normalized = torch.empty_like(epoch["advantage"])
            normalized[order.flatten()] = losses.normalize(advantage.flatten(1), of_all_ranks).view_as(advantage).flatten(0, 1)
            epoch["advantage"] = normalized
        for sequences in order:
            minibatch = {key: tensor[sequences] for key, tensor in epoch.items()}
            if masked:
                valid = minibatch["valid"]
                weight = weight_of_rank(valid)
                if weight is None:
                    continue
                if self.hparams.norm_adv:
                    of_all_ranks = collectives.concatenate(minibatch["advantage"][valid].squeeze(-1))
                    minibatch["advantage"] = losses.normalize(minibatch["advantage"].squeeze(-1), of_all_ranks).unsqueeze(-1)
                if collectives.world_size() > 1:
                    minibatch["weight"] = weight
            yield minibatch

    def loss(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """See :meth:`PPO.loss`; steps that are not valid go through the memory, and into no mean."""
        keys = ("observation", "action", "memory", "is_init")
        log_prob, entropy, value = self.agent.evaluate(*(minibatch[key] for key in keys))
        steps = {key: minibatch[key] for key in OF_STEPS}
        if "valid" in minibatch:
            valid = minibatch["valid"]
            steps = {key: tensor[valid] for key, tensor in steps.items()}
            log_prob, entropy, value = log_prob[valid], entropy[valid], value[valid]
        return self.loss_of(steps, log_prob, entropy, value)

    def log_probs_again(self, rollout: TensorDictBase) -> tuple[Tensor, Tensor]:
        """See :meth:`AgentModule.log_probs_again`: of the first sequences."""
        few = max(1, self.agent.rows_in_cache // rollout.batch_size[1])
        some = rollout[:few]
        again, _, _ = self.agent.evaluate(some["observation"], some["action"], some["memory"][:, 0], episode_starts(some))
        return again.flatten(), some["action_log_prob"].flatten()

    @property
    def rows_at_once(self) -> int | None:
        """How many sequences are differentiated at once; None: all of a minibatch."""
        rows = super().rows_at_once
        return None if rows is None else max(1, rows // self.data.num_steps)
