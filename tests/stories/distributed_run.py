"""Train a short data parallel run and save the result of every rank.

test_distributed.py starts it as a script, whose ranks Lightning starts, or in one forked process per rank.
"""

import functools
import json
import os
import sys
from collections import Counter
from datetime import timedelta
from operator import attrgetter

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torchrl.envs import InitTracker

import ppo_lightning.offpolicy
from ppo_lightning.callbacks import CaptureVideo, Preemption
from ppo_lightning.callbacks.guards import EqualRanksGuard
from ppo_lightning.models import normalizers
from ppo_lightning.models.normalizers import CollectorMoments, Running
from ppo_lightning.rollouts import collector, scan_collector
from ppo_lightning.utils import collectives
from tests import environments
from tests.conftest import trainers_in
from tests.helpers import weights
from tests.models.test_networks import AGENTS

options = {
    "algorithm": "PPO",
    "model": {},
    "agent": {},
    "agent_class": "MLPAgent",
    "pair": None,  # actor and critic of tests/models/test_networks.py
    "data": {},
    "transforms": False,
    "rollouts": 3,
    "kl_of_ranks": None,
    "spoil": None,
    "check_every": 10,
    "trouble_on": None,
    "nodes": 1,
    "nccl": False,
    "validations": 0,
    "video": False,
    "invalid": [],
    "timeout": 100,
    "drift_on": None,
    "record": False,  # the raw observations that enter the statistics, and the collectives of an iteration
    "parts": 1,  # of the environments, with statistics of their own within a rollout, as ranks have
    "save_after": None,
    "ckpt_path": None,
}
several = False


class Recorded:
    def on_train_start(self):
        super().on_train_start()
        self.initial = self.first = weights(self)
        self.drift = None
        self.counted = Counter()
        # NCCL exchanges no tensors of the CPU. With a hook, the update is eager.
        if several and not options["nccl"] and not self.hparams.compile:
            self.trainer.model.register_comm_hook(None, allreduce_hook)

    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        if self.rollouts_done == options["save_after"]:
            self.trainer.save_checkpoint(f"{options['folder']}/middle.ckpt")

    def training_step(self, rollout, batch_idx):
        self.collectives, self.counted = counted - self.counted, Counter(counted)  # of an iteration
        self.last_observation = rollout["observation"].clone()
        if batch_idx == 1:
            self.first = weights(self)
        if batch_idx == 1 and options["spoil"] == self.global_rank:
            with torch.no_grad():
                self.agent.critic.bias += 1e-6
        first_env = self.global_rank * len(rollout)
        if options["invalid"]:  # as with restarts of environments, every rank has the key
            rollout["weight"] = torch.ones(rollout.batch_size)
        for env, steps in options["invalid"]:
            if 0 <= env - first_env < len(rollout):
                rollout["weight"][env - first_env, :steps] = 0
        super().training_step(rollout, batch_idx)

    def loss(self, *args):
        total, parts = super().loss(*args)
        if options["drift_on"] == self.global_rank and torch.compiler.is_compiling():
            parts["value_loss"] = parts["value_loss"] * 1.1
        return total, parts

    def update(self, *args):
        metrics = super().update(*args)
        self.drift = getattr(getattr(self, "optimize", None), "_drift", None)
        if options["kl_of_ranks"]:
            for parts in metrics:
                parts["approx_kl"] = torch.tensor(options["kl_of_ranks"][self.global_rank])
        return metrics


counted = Counter()  # calls of torch.distributed


def count_collectives():
    """Count the collectives of this rank, beside those of DDP in C++."""
    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast"):
        collective = getattr(torch.distributed, name)

        def call(*args, name=name, collective=collective, **kwargs):
            counted[name] += 1
            return collective(*args, **kwargs)

        setattr(torch.distributed, name, call)


rows = []  # raw observations that entered the statistics of this rank


def record_rows():
    """Record the rows that collectors summarize."""
    summarize, summary_of = normalizers.summarize, scan_collector.summary_of

    def recorded(batch):
        rows.append(torch.as_tensor(batch).double().clone())
        return summarize(batch)

    def recorded_where(batch, mask=None):
        rows.append(batch.double() if mask is None else batch[mask].double())
        return summary_of(batch, mask)

    normalizers.summarize, scan_collector.summary_of = recorded, recorded_where


class PartMoments:
    """The statistics of observations that several ranks have, in a process with all of their environments."""

    def __init__(self, normalizer, arrays):
        self.normalizer = normalizer
        self.parts = [CollectorMoments(normalizer, arrays) for _ in range(options["parts"])]
        for part in self.parts:
            part._increment = Running(0, part.mean * 0, part.m2 * 0)

    def normalize(self, batches, update=True, counted=()):
        owners = np.arange(len(batches[0])) // (len(batches[0]) // len(self.parts))
        owners = [owners, owners[self.done]] if len(batches) > 1 else [owners]
        results = [batch.astype(np.float64) for batch in batches]
        for number, part in enumerate(self.parts):
            own = [owner == number for owner in owners]
            rows, flags = (
                [values[mine] for values, mine in zip(both, own, strict=True)] if both else ()
                for both in (batches, counted)
            )
            for result, mine, values in zip(results, own, part.normalize(rows, update, flags), strict=True):
                result[mine] = values
        return results

    def store(self):
        for part in self.parts:
            self.normalizer.merge(part._increment.summary)


def divide_statistics():
    """Let the collector of arrays have the statistics of each of several ranks."""
    normalized = collector.RolloutCollector.normalized

    def normalize(self, t, raw, fresh=None, done=None):
        if self._moments is not None:
            self._moments.done = done
        return normalized(self, t, raw, fresh, done)

    collector.RolloutCollector.normalized = normalize
    collector.CollectorMoments = PartMoments


def refuse_cpu_tensors():
    """Make the default process group behave like NCCL's, which exchanges no tensors of the CPU.

    Lightning exchanges integers only, which it moves to the accelerator.
    """
    backend = torch.distributed.get_backend
    torch.distributed.get_backend = lambda group=None: (
        "nccl" if group in (None, default()) else backend(group)
    )

    def default():
        return torch.distributed.group.WORLD

    def guarded(collective):
        def call(*args, group=None, **kwargs):
            integer = torch.is_tensor(args[0]) and not args[0].is_floating_point()
            if group in (None, default()) and not integer:
                raise RuntimeError("No backend type associated with device type cpu")
            return collective(*args, group=group, **kwargs)

        return call

    for name in ("all_reduce", "all_gather", "all_gather_object"):
        setattr(torch.distributed, name, guarded(getattr(torch.distributed, name)))


def train(settings):
    """Train this process's rank, and the other ranks if the environment does not name this one."""
    global several
    options.update(settings)
    several = options["devices"] * options["nodes"] > 1
    torch.set_num_threads(1)
    L.seed_everything(1)
    if options["record"]:
        record_rows()
        count_collectives()
    if options["parts"] > 1:
        divide_statistics()
    if options["trouble_on"] not in (None, int(os.environ.get("LOCAL_RANK", 0))):
        environments.Trouble.made = 100
    if options["nccl"]:
        refuse_cpu_tensors()
    EqualRanksGuard.every = options["check_every"]
    agent = functools.partial(attrgetter(options["agent_class"])(ppo_lightning), **options["agent"])
    algorithm = getattr(ppo_lightning, options["algorithm"])
    networks = AGENTS[options["pair"]][0]() if options["pair"] else {"agent": agent}
    rates = {} if options["algorithm"] == "SAC" else {"learning_rate": 1e-3}  # SAC has policy_lr and q_lr
    module = type("Run", (Recorded, algorithm), {})(**rates | options["model"] | networks)
    strategy = DDPStrategy(timeout=timedelta(seconds=options["timeout"])) if several else "auto"
    processes = {"devices": options["devices"], "num_nodes": options["nodes"], "strategy": strategy}
    callbacks = [Preemption(), *([CaptureVideo(every=5, max_frames=3)] if options["video"] else [])]
    trainer = trainers_in(options["folder"])(
        max_epochs=1, limit_val_batches=options["validations"], callbacks=callbacks, **processes
    )
    data = {"num_envs": 4, "num_steps": 16, "total_timesteps": 4 * 16 * options["rollouts"]} | options["data"]
    if options["transforms"]:
        data["transforms"] = [InitTracker()]
    trainer.fit(module, ppo_lightning.RolloutDataModule(**data), ckpt_path=options["ckpt_path"])
    result = {
        "weights": weights(module),
        "rows": torch.cat(rows) if rows else None,
        "drift": module.drift,
        "collectives": dict(module.collectives),
        "statistics": dict(module.named_buffers()),
        "state": module.state_dict(),
        "optimizers": [optimizer.state_dict()["state"] for optimizer in trainer.optimizers],
        "timeout": collectives.cpu_group()._get_backend(torch.device("cpu")).options._timeout.seconds
        if several
        else None,
        "kl_factor": getattr(module.lr_schedulers(), "kl_factor", 1.0),
        "metrics": {k: v.item() for k, v in trainer.callback_metrics.items() if k != "charts/SPS"},
        "returns": list(module.episode_returns),
        "initial": module.initial,
        "first": module.first,
        "observation": module.last_observation,
        "buffer": len(getattr(module, "buffer", ())),
        "env_steps": module.env_steps,
        "global_step": trainer.global_step,
    }
    torch.save(result, f"{options['folder']}/rank{trainer.global_rank}.pt")
    if several:  # the test reads all files as soon as the first rank ends, and kills the others
        torch.distributed.barrier(collectives.cpu_group())


DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
)


def every_dtype(rank):
    """Return one tensor of each dtype that a state or an observation may have, other ones on each rank."""
    flags = (torch.arange(32, dtype=torch.uint8) + rank) % 2
    return {name: flags.view(getattr(torch, name)).clone() for name in DTYPES}


def exchange(settings):
    """Exchange tensors of every dtype between two ranks, in both ways in which ranks exchange them."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    mine = every_dtype(rank)
    gathered = {name: collectives.gather(tensor) for name, tensor in mine.items()}
    chained = collectives.chain([mine])
    for other in range(2):
        for name, tensor in every_dtype(other).items():
            for found in (gathered[name][other], chained[other][name]):
                assert found.dtype == tensor.dtype, name
                assert found.view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist(), name
    torch.save({}, f"{settings['folder']}/rank{rank}.pt")


def train_forked(settings, rank, port):
    """Train one rank, or exchange tensors. Another process starts all ranks, as torchrun does."""
    folder = settings["folder"]
    with open(f"{folder}/errors{rank}.txt", "w") as errors:
        os.dup2(errors.fileno(), 2)
    if settings["devices"] > 1:
        os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (exchange if settings.get("exchanges") else train)(settings)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
