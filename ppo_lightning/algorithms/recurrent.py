"""PPO for agents with a memory after the body: an LSTM or a minGRU."""

from tensordict import TensorDictBase

from ppo_lightning.algorithms.defaults import CLEANRL
from ppo_lightning.algorithms.minibatches import Minibatch, deal_sequences, with_weight
from ppo_lightning.algorithms.ppo import PPO
from ppo_lightning.models import Evaluation
from ppo_lightning.rollouts.datamodule import DEFAULT_NUM_ENVS
from ppo_lightning.rollouts.storage import episode_starts


class RecurrentPPO(PPO):
    """PPO for agents with a memory, with minibatches of whole sequences.

    The update recomputes the hidden states of each sequence from the stored state of the first step.

    The hyperparameters are those of :class:`~ppo_lightning.PPO`. ``num_minibatches`` must divide the number
    of environments of a rank. With ``compile``, the networks before and after an LSTM are compiled, and
    the memory uses PyTorch's kernel. With a minGRU, the whole update is one graph, as without a memory.

    Raises:
        ConfigError: The agent has no memory, or the environments cannot be split into minibatches.

    Example:
        >>> agent = functools.partial(MLPAgent, memory="lstm")
        >>> module = RecurrentPPO(agent=agent, num_minibatches=2)
    """

    defaults = CLEANRL
    default_num_envs = DEFAULT_NUM_ENVS
    splits_sequences = True

    def shuffled(self, rollout: TensorDictBase) -> Minibatch:
        """Return the sequences of the rollout in the order of the minibatches, tensors [N, T, ...].

        The minibatches of N ranks together are the minibatch of one rank.
        """
        # detail 35
        order = deal_sequences(self.uniform("shuffle", rollout.batch_size[0]), self.hparams.num_minibatches)
        sequences = {key: rollout[key] for key in with_weight(rollout, self.minibatch_keys)}
        # detail 36
        sequences |= {"memory": rollout["memory"][:, 0], "is_init": episode_starts(rollout)}
        return {key: tensor[order.to(tensor.device)] for key, tensor in sequences.items()}

    def evaluate(self, minibatch: Minibatch) -> Evaluation:
        """Evaluate the actions of whole sequences."""
        keys = ("observation", "action", "memory", "is_init")
        return self.agent.evaluate(*(minibatch[key] for key in keys))

    @property
    def microbatch_size(self) -> int:
        """Maximum number of sequences of a minibatch that are differentiated at once."""
        return max(1, super().microbatch_size // self.data.num_steps)
