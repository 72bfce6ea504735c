"""The auxiliary phase of Phasic Policy Gradient: stored rollouts, and passes over their sequences."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import TensorSpec

from ppo_lightning.algorithms.minibatches import Minibatch, deal_sequences, mean_of, with_valid
from ppo_lightning.algorithms.update import CompiledUpdate, EagerUpdate
from ppo_lightning.callbacks.preemption import Preemption
from ppo_lightning.spaces.specs import stored
from ppo_lightning.utils import collectives

STORED = ("observation", "action", "value_target")
POLICY = "policy_"  # prefix of the keys of the policy's parameters before the phase


def bytes_per_step(observation: TensorSpec) -> int:
    """Return the size of a stored step with one discrete action, without the parameters of the policy."""
    row = stored(observation)
    return row.shape.numel() * row.dtype.itemsize + torch.int64.itemsize + torch.float32.itemsize


class AuxiliaryPhase:
    """Passes over the rollouts of a policy phase, which are copied to main memory.

    A sequence is one environment in one rollout. That of environment n in rollout r of R has the index
    n * R + r, so that ranks, which have consecutive environments, have consecutive sequences.

    Args:
        module: A PPG module.

    Attributes:
        rollouts: Entries of the stored rollouts, tensors [N, T, ...] by key.
        epochs_done: Passes that a preempted phase completed. 0 outside of the phase.

    Example:
        >>> phase = AuxiliaryPhase(PPG())
        >>> phase.store(TensorDict({key: torch.zeros(4, 8) for key in STORED}, [4, 8]))
        >>> phase.sequences([0, 3])["action"].shape
        torch.Size([16])
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.rollouts: list[Minibatch] = []
        self.epochs_done = 0
        self.optimize: EagerUpdate | CompiledUpdate | None = None

    def clear(self) -> None:
        """Forget the rollouts."""
        self.rollouts.clear()
        self.epochs_done = 0

    def store(self, rollout: TensorDictBase) -> None:
        """Store a copy of the entries of a rollout [N, T] that the phase needs."""
        keys = with_valid(rollout, STORED)
        self.rollouts.append({key: rollout[key].to("cpu", copy=True) for key in keys})

    def run(self) -> dict[str, Tensor]:
        """Train on all sequences ``e_auxiliary`` times, and forget the rollouts.

        Between two passes, a preempted run saves a checkpoint and ends.

        Returns:
            Means of the losses, over the passes since the start or the resume of the phase.
        """
        module = self.module
        assert self.optimize is not None
        if not self.epochs_done:
            self.store_policy()
        metrics = []
        while self.epochs_done < module.hparams.e_auxiliary:
            if self.epochs_done:
                for callback in module.trainer.callbacks:
                    if isinstance(callback, Preemption):
                        callback.end_if_requested(module.trainer, module)
            for minibatch in self.minibatches():  # one at a time: all of them may not fit into memory
                metrics += self.optimize([minibatch])
            self.epochs_done += 1
        self.clear()
        return mean_of(metrics)

    @torch.no_grad()
    def store_policy(self) -> None:
        """Store the parameters of the policy at each step."""
        device = self.module.device
        for rollout in self.rollouts:
            inputs = zip(rollout["observation"], rollout["action"], strict=True)  # one sequence at a time
            parameters = [
                self.module.agent.evaluate(*(x.to(device) for x in pair)).parameters for pair in inputs
            ]
            for number, tensors in enumerate(zip(*parameters, strict=True)):
                rollout[f"{POLICY}{number}"] = torch.stack(tensors).cpu()

    def minibatches(self) -> Iterator[Minibatch]:
        """Yield all sequences once, in random minibatches of whole sequences, tensors [B, ...]."""
        module = self.module
        num_sequences = len(self.rollouts) * len(self.rollouts[0]["action"])
        count = num_sequences * module.trainer.world_size // module.hparams.num_aux_rollouts
        keys = module.uniform("auxiliary", num_sequences, draw=self.epochs_done)
        for indices in deal_sequences(keys, count).chunk(count):
            minibatch = self.sequences(indices.tolist())
            if "valid" in minibatch:
                valid = minibatch["valid"].float()
                minibatch["valid"] = valid / collectives.gather(valid.mean()).mean().clamp(min=1e-8)
            yield {key: tensor.to(module.device) for key, tensor in minibatch.items()}

    def sequences(self, indices: Sequence[int]) -> Minibatch:
        """Return the steps of m sequences, one sequence after the other, tensors [m * T, ...].

        Args:
            indices: Indices of the sequences, m integers.
        """
        count = len(self.rollouts)
        chosen = [(self.rollouts[index % count], index // count) for index in indices]
        return {key: torch.cat([rollout[key][n] for rollout, n in chosen]) for key in self.rollouts[0]}

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the rollouts of all ranks, on rank 0, and the position. This is a collective."""
        rollouts = []
        for rollout in self.rollouts:
            gathered = {key: collectives.gather(tensor).flatten(0, 1) for key, tensor in rollout.items()}
            rollouts.append(gathered if self.module.trainer.is_global_zero else {})
        return {"rollouts": rollouts, "epochs_done": self.epochs_done}

    def load_state_dict(self, state: dict[str, Any], rows: slice) -> None:
        """Restore the rollouts and the position.

        Args:
            state: From :meth:`state_dict`.
            rows: Environments of this rank.
        """
        self.rollouts = [
            {key: x[rows].clone() for key, x in rollout.items()} for rollout in state["rollouts"]
        ]
        self.epochs_done = state["epochs_done"]
