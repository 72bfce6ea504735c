"""PPO for agents with a memory after the body: an LSTM, a GRU or a minGRU."""

from collections.abc import Iterator

from tensordict import TensorDictBase
from torch import Tensor

from ppo_lightning.algorithms.checks import check_minibatch_size
from ppo_lightning.algorithms.minibatches import Minibatch, deal_sequences, split_epoch, with_valid
from ppo_lightning.algorithms.ppo import PPO
from ppo_lightning.errors import ConfigError
from ppo_lightning.rollouts.storage import episode_starts


class RecurrentPPO(PPO):
    """PPO for agents with a memory, with minibatches of whole sequences.

    The update recomputes the hidden states of each sequence from the stored state of the first step.

    The hyperparameters are those of :class:`~ppo_lightning.PPO`. ``num_minibatches`` must divide the number
    of environments of a rank. With ``compile``, the networks before and after an LSTM or a GRU are compiled,
    and the memory uses PyTorch's kernel. With a minGRU, the whole update is one graph, as without a memory.

    Raises:
        ConfigError: The agent has no memory, or the environments cannot be split into minibatches.

    Example:
        >>> agent = functools.partial(MLPAgent, memory="lstm", shared=True)
        >>> module = RecurrentPPO(agent=agent, num_minibatches=2)
    """

    takes_memory = True

    def check_split(self) -> None:
        """Check that the environments can be split into minibatches.

        Raises:
            ConfigError: Names the fields and what to change.
        """
        num_envs = self.data.num_envs // self.trainer.world_size
        count = self.hparams.num_minibatches
        if num_envs % count:
            raise ConfigError(
                f"data.num_envs gives each rank {num_envs} environments, whose whole sequences cannot be"
                f" split into model.num_minibatches = {count} minibatches: change one of the two."
            )
        check_minibatch_size(self.hparams, num_envs // count * self.data.num_steps)

    def minibatches(self, rollout: TensorDictBase) -> Iterator[Minibatch]:
        """Yield the sequences in random minibatches [n, T, ...], with normalized advantages.

        The minibatches of N ranks together are the minibatch of one rank.
        """
        count = self.hparams.num_minibatches
        # detail 35
        order = deal_sequences(self.uniform("shuffle", rollout.batch_size[0]), count).to(
            rollout["action"].device
        )
        sequences = {key: rollout[key] for key in with_valid(rollout, self.minibatch_keys)}
        # detail 36
        sequences |= {"memory": rollout["memory"][:, 0], "is_init": episode_starts(rollout)}
        epoch = {key: tensor[order] for key, tensor in sequences.items()}
        yield from split_epoch(epoch, count, self.hparams.norm_adv)

    def loss(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of whole sequences, see :meth:`PPO.loss`."""
        keys = ("observation", "action", "memory", "is_init")
        return self.loss_of(minibatch, self.agent.evaluate(*(minibatch[key] for key in keys)))

    def log_probs_again(self, rollout: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the first sequences, see :meth:`PPO.log_probs_again`."""
        count = max(1, self.agent.rows_in_cache // rollout.batch_size[1])
        first = rollout[:count]
        again = self.agent.evaluate(
            first["observation"], first["action"], first["memory"][:, 0], episode_starts(first)
        )
        return again.log_prob.flatten(), first["action_log_prob"].flatten()

    @property
    def rows_at_once(self) -> int | None:
        """Number of sequences that are differentiated at once. None: all of a minibatch."""
        rows = super().rows_at_once
        return None if rows is None else max(1, rows // self.data.num_steps)
