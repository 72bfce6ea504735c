"""Data parallel training in real processes (gloo): N ranks train as one rank with all environments does."""

import contextlib
import functools
import json
import os
import re
import signal
import sys
import time

import pytest
import torch

from tests.helpers import Forked, command_line, difference, finish, launch, left_of, port, run, start

pytestmark = pytest.mark.integration
# All running statistics, and environments whose episodes end soon and at different steps.
HOPPER = {
    "data": {"env_id": "Hopper-v5"},
    "agent": {"norm_obs": True},
    "model": {"norm_reward": True, "target_kl": 0.01, "adv_eps": 0.03},
    "check_every": 1,
}


INVALID = [[2, 14], [3, 12]]  # environment and its number of invalid steps


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a function that trains one rank with all environments, once for equal options."""

    @functools.cache
    def train(options):
        (result,) = run(tmp_path_factory.mktemp("one"), 1, **json.loads(options))
        return result

    def one(options, parts=2):
        eager = {name: value for name, value in options.get("model", {}).items() if name != "compile"}
        options = {key: options[key] for key in options if key != "nccl"} | {"model": eager, "parts": parts}
        return train(json.dumps(options))

    return one


def require_same_end(ranks, one, tolerance=0.01, metrics=1e-3, statistics=1e-4):
    """Require the same end of all ranks, and that of one rank with all environments to tolerance."""
    assert difference(ranks, one, "first") < 0.001
    assert difference(ranks, one) < tolerance
    for rank in ranks:
        assert torch.equal(rank["weights"], ranks[0]["weights"])
        assert rank["env_steps"] == one["env_steps"]
        assert rank["kl_factor"] == one["kl_factor"]
        assert rank["returns"] == pytest.approx(one["returns"], rel=1e-4)
        assert rank["metrics"] == pytest.approx(one["metrics"], rel=metrics, abs=metrics / 10)
        for name, value in one["statistics"].items():
            assert torch.equal(rank["statistics"][name], ranks[0]["statistics"][name]), name
            torch.testing.assert_close(rank["statistics"][name], value, rtol=statistics, atol=1e-5)


@pytest.mark.detail("A2")
@pytest.mark.parametrize(("devices", "compiled"), [(2, False), (2, True), (4, False)])
def test_ranks_do_what_one_rank_with_all_environments_does(tmp_path, alone, devices, compiled):
    options = HOPPER | {"model": HOPPER["model"] | {"compile": compiled}}
    several = run(tmp_path / "several", devices, **options)
    one = alone(HOPPER, parts=devices)
    require_same_end(several, one)
    torch.testing.assert_close(
        torch.cat([rank["observation"] for rank in several]), one["observation"], atol=1e-3, rtol=1e-3
    )


def overlapped(**options):
    """The threads exchange statistics in a group of their own, while the gradients are exchanged."""
    return HOPPER | {"data": HOPPER["data"] | {"overlap": True}, "validations": 1} | options


def with_memory(memory, **model):
    """The learning rate, which follows the KL divergence, is the same on all ranks."""
    agent = {"memory": memory, "memory_size": 16, "shared": True}
    model = {"num_minibatches": 2, "anneal_lr": False, "desired_kl": 1e-3} | model
    return HOPPER | {"algorithm": "RecurrentPPO", "agent": agent, "model": model}


def invalid(algorithm, memory=None, **model):
    """One rank has 32 valid steps and the other 6; every step weighs the same in gradients and metrics."""
    agent = HOPPER["agent"] | ({"memory": memory, "memory_size": 8, "shared": True} if memory else {})
    model = {"norm_reward": True, "num_minibatches": 1, "target_kl": 0.1} | model
    return HOPPER | {"algorithm": algorithm, "agent": agent, "model": model, "invalid": INVALID}


def partly_observed(algorithm, memory=None):
    agent = {"norm_obs": True, "memory": memory, "actor_keys": ["action", "time"]}
    options = {"algorithm": algorithm, "agent": agent, "model": {"num_minibatches": 2}}
    return HOPPER | options | {"data": {"env_id": "Reach-v0"}}


def on_tensors(**model):
    data = {"env_id": "CartPole-v1", "backend": "torch"}
    return {"data": data, "model": {"norm_reward": True} | model, "rollouts": 12, "check_every": 1}


VARIANTS = {
    "transforms": HOPPER | {"transforms": True, "agent": {}},
    # On several GPUs the default process group exchanges no tensors of the CPU.
    "GPUs": HOPPER | {"nccl": True, "validations": 1, "timeout": 77},
    "overlap": overlapped(),
    "overlap on GPUs": overlapped(nccl=True),
    # All ranks count the same steps, whichever of them only reset environments.
    "resets at the next step": HOPPER
    | {"data": {"env_id": "tests.environments.NextStepVector", "env_kwargs": {"env_id": "Hopper-v5"}}},
    "lstm": with_memory("lstm"),
    "min_gru": with_memory("min_gru"),
    "min_gru, compiled": with_memory("min_gru", compile=True),
    "invalid steps": invalid("PPO"),
    "invalid steps, lstm": invalid("RecurrentPPO", "lstm"),
    "invalid steps, min_gru": invalid("RecurrentPPO", "min_gru"),
    "invalid steps, RND": invalid("RND", update_proportion=0.5),
    "an actor that sees less": partly_observed("PPO"),
    "an actor that sees less, lstm": partly_observed("RecurrentPPO", "lstm"),
    "a minibatch of 8 rows in parts": HOPPER | {"model": HOPPER["model"] | {"microbatch_size": 2}},
    "tensors": on_tensors(),
    "tensors, compiled": on_tensors(compile=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_of_a_variant_do_what_one_rank_does(tmp_path, alone, variant):
    one = alone(VARIANTS[variant])
    two = run(tmp_path / "two", 2, **VARIANTS[variant])
    require_same_end(two, one)
    assert [rank["timeout"] for rank in two] == [VARIANTS[variant].get("timeout", 100)] * 2
    assert len(one["returns"]) > 2
    if "desired_kl" in VARIANTS[variant]["model"]:
        assert one["kl_factor"] != 1


POOLED = {
    "arrays": HOPPER,
    "one environment on each rank": HOPPER | {"data": HOPPER["data"] | {"num_envs": 2}},
    "overlap": HOPPER | {"data": HOPPER["data"] | {"overlap": True}},
    "transforms": HOPPER | {"transforms": True},
    "tensors": on_tensors() | {"agent": {"norm_obs": True}},
}


@pytest.mark.parametrize("name", POOLED)
def test_after_a_rollout_all_ranks_have_the_moments_of_all_data(tmp_path, name):
    ranks = run(tmp_path / "two", 2, **POOLED[name] | {"rollouts": 12, "record": True})
    data = torch.cat([rank["rows"] for rank in ranks])
    num_envs = POOLED[name]["data"].get("num_envs", 4)
    assert len(data) > num_envs * (12 * 16 + 1), "environments were reset"
    variance, mean = torch.var_mean(data, dim=0, correction=0)
    for rank in ranks:
        count, *moments = (rank["statistics"][f"agent.normalizer.{key}"] for key in ("count", "mean", "m2"))
        assert count == len(data)
        torch.testing.assert_close(moments, [mean, variance * count], rtol=1e-9, atol=1e-12)
        assert torch.equal(rank["weights"], ranks[0]["weights"])


def test_the_statistics_of_tensors_are_those_of_the_scan_on_ranks(tmp_path):
    options = on_tensors() | {"agent": {"norm_obs": True}}
    eager, compiled = (
        run(tmp_path / str(on), 2, **options | {"model": options["model"] | {"compile": on}})
        for on in (False, True)
    )
    require_same_end(compiled, eager[0])


@pytest.mark.parametrize("microbatch_size", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_compiled_loss_that_drifts_on_one_rank_ends_it_on_all(tmp_path, alone, microbatch_size):
    """One rank in the eager update and one in the compiled update would wait for each other."""
    model = HOPPER["model"] | {"compile": True, "microbatch_size": microbatch_size}
    ranks = run(tmp_path / "run", 2, **HOPPER | {"model": model, "drift_on": 1})
    assert ranks[0]["drift"] == ranks[1]["drift"] > 1e-3
    require_same_end(ranks, alone(HOPPER))


# Openings are those of each game, and the ranks share the games of the ratings.
TICTACTOE = {"env_id": "TicTacToe-v1", "backend": "envpool", "env_kwargs": {"opening_moves": 2}}
RATED = {"rating_games": 20, "rating_opponents": ["minimax:1"]}
SELF_PLAY = {"algorithm": "SelfPlay", "model": RATED, "rollouts": 24, "validations": 1}
SELF_PLAY |= {"data": TICTACTOE | {"num_envs": 8}}
# Random steps, statistics, counts and the predictor's steps are those of all ranks, past rollout 10.
CURIOUS = {"algorithm": "RND", "model": {"num_iterations_obs_norm_init": 3}, "rollouts": 12}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("options", "metric"), [(SELF_PLAY, "charts/elo"), (CURIOUS, "charts/episode_curiosity_reward")]
)
def test_ranks_of_an_algorithm_do_what_one_rank_does(tmp_path, alone, options, metric, compiled):
    options = options | {"model": options["model"] | {"compile": compiled}, "check_every": 1}
    one = alone(options)
    require_same_end(run(tmp_path / "two", 2, **options), one, metrics=1e-2, statistics=1e-3)
    assert metric in one["metrics"]


def group(env_id, backend="gymnasium", algorithm="PPO", agent=(), **model):
    """Return a run on the environment of a group of recipes, with statistics."""
    data = {"env_id": env_id, "backend": backend}
    agent, model = {"norm_obs": True} | dict(agent), {"norm_reward": True} | model
    return {"data": data, "algorithm": algorithm, "agent": agent, "model": model}


GROUPS = {
    "classic": group("CartPole-v1") | {"video": True},
    "mujoco": group("Hopper-v5"),  # whose states hold uint64, which plain pickles cannot read
    "classic, continuous": group("Pendulum-v1"),
    "mujoco, envpool": group("Hopper-v4", "envpool"),
    "atari": group("ALE/Breakout-v5", "envpool") | {"agent_class": "CNNAgent", "agent": {}},
    "tensors": group("CartPole-v1", "torch", agent={"norm_obs": False}),
    "tensors, continuous": group("Pendulum-v1", "torch", agent={"norm_obs": False}),
    "self-play": SELF_PLAY,
    "ppg": group("CartPole-v1", algorithm="PPG", n_iteration=4, e_auxiliary=2, num_aux_rollouts=2),
    "rnd": group("MountainCar-v0", algorithm="RND", num_iterations_obs_norm_init=3),
    "rpo": group("Pendulum-v1", algorithm="RPO"),
    "lstm": group("CartPole-v1", algorithm="RecurrentPPO", agent={"memory": "lstm"}, num_minibatches=2),
}
FRESH = ("mujoco, envpool", "atari", "self-play")  # episodes after a resume


FAST, SLOW = list(GROUPS)[:2], list(GROUPS)[2:]


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_ranks_on_a_group_of_recipes_save_and_resume(tmp_path, alone, name):
    options = {"rollouts": 12, "check_every": 1} | GROUPS[name]
    one, two = alone(options), run(tmp_path / "two", 2, **options, save_after=6)
    assert difference(two, one, "first") < 0.001
    if name != "atari":  # where the rounding of convolutions changes an action within twelve rollouts
        require_same_end(two, one, tolerance=0.05, metrics=1e-2, statistics=1e-3)
    checkpoint = str(tmp_path / "two" / "middle.ckpt")
    resumed = run(tmp_path / "resumed", 2, **options, ckpt_path=checkpoint)
    assert resumed[0]["env_steps"] == one["env_steps"]
    assert torch.equal(resumed[0]["weights"], resumed[1]["weights"])
    if name in FRESH:
        return
    later = run(tmp_path / "alone", 1, **options, ckpt_path=checkpoint, parts=2)
    require_same_end(two, one)
    assert max(difference(two, one), difference(later, one)) < 0.001
    for rank, again in zip(two, resumed, strict=True):
        assert torch.equal(again["weights"], rank["weights"])
        assert again["returns"] == rank["returns"]
        assert again["env_steps"] == one["env_steps"]


def test_ranks_have_random_numbers_of_their_own(tmp_path):
    ranks = run(tmp_path, 2, data={"env_id": "tests.environments:Drawn-v0"})
    assert not (ranks[0]["observation"] == ranks[1]["observation"]).any()


def test_ranks_with_overlap_are_equal_past_rollout_10(tmp_path):
    """The ranks compare all their buffers while the threads exchange statistics."""
    options = overlapped(validations=0, timeout=60, model={"norm_reward": True, "num_minibatches": 2})
    options |= {"algorithm": "RecurrentPPO", "agent": HOPPER["agent"] | {"memory": "lstm", "shared": True}}
    ranks = run(tmp_path / "run", 2, **options | {"rollouts": 23, "check_every": 10})
    for name, value in ranks[0]["statistics"].items():
        assert torch.equal(value, ranks[1]["statistics"][name]), name
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    assert ranks[0]["env_steps"] == ranks[1]["env_steps"] == 23 * 64


@pytest.mark.parametrize("compiled", [False, True])
def test_ranks_with_auxiliary_phases_do_what_one_rank_does(tmp_path, alone, compiled):
    """Sequences are dealt out for all ranks, past the third phase and rollout 10. Some steps are invalid."""
    model = {"n_iteration": 3, "e_auxiliary": 2, "num_aux_rollouts": 2, "compile": compiled}
    options = HOPPER | {"algorithm": "PPG", "model": model, "rollouts": 11, "invalid": INVALID}
    one, two = alone(options), run(tmp_path / "two", 2, **options)
    assert difference(two, one, "first") < 0.001
    assert difference(two, one) < 0.05
    assert torch.equal(two[0]["weights"], two[1]["weights"])
    auxiliary = {name: value for name, value in one["metrics"].items() if name.startswith("losses/aux/")}
    assert auxiliary["losses/aux/kl_loss"] > 0
    assert {name: two[0]["metrics"][name] for name in auxiliary} == pytest.approx(auxiliary, rel=0.02)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_collectives_of_an_iteration(tmp_path, compiled):
    """A minibatch in parts is one exchange of its gradients."""
    model = {"norm_reward": True, "update_epochs": 3, "microbatch_size": 2, "compile": compiled}
    ranks = run(tmp_path / "run", 2, **HOPPER | {"model": model, "record": True, "check_every": 100})
    rollout = ["observations", "rewards", "number of episodes", "episodes"]
    end = ["explained variance", "metrics", "signals"]
    gathers = {"all_gather": len(rollout) + model["update_epochs"] + len(end)}
    others = {"all_reduce": model["update_epochs"] * 4, "broadcast": 1}  # Lightning tells of signals
    for rank in ranks:
        assert rank["collectives"] == gathers | others


def test_ranks_exchange_tensors_of_every_dtype(tmp_path):
    """Gloo refuses uint16, and a plain pickle of uint16 to uint64 or float8 cannot be read."""
    run(tmp_path / "run", 2, exchanges=True)


@pytest.mark.detail("A3")
@pytest.mark.parametrize(("target_kl", "epochs"), [(0.4, 1), pytest.param(0.6, 4, marks=pytest.mark.slow)])
def test_ranks_agree_on_the_early_stop(tmp_path, target_kl, epochs):
    """Only rank 1 has left its old policy: the mean KL, 0.5, decides for both ranks, and no rank waits."""
    ranks = run(tmp_path / "run", 2, model={"target_kl": target_kl}, kl_of_ranks=[0.0, 1.0])
    assert [rank["global_step"] for rank in ranks] == [3 * epochs * 4] * 2
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])


def test_ranks_that_diverge_are_stopped(tmp_path):
    code, errors = finish(start(tmp_path / "run", 2, spoil=1, check_every=1, rollouts=4))
    assert code != 0
    assert "agent.critic.bias of rank 1 is not that of rank 0 after 128 steps" in errors


def test_processes_started_by_fork_or_spawn_train_as_ddp_does(tmp_path):
    results = []
    for strategy in ("ddp", "ddp_spawn", "ddp_notebook"):
        folder = tmp_path / strategy
        folder.mkdir()
        model = {"norm_reward": True, "anneal_lr": False, "desired_kl": 1e-3}
        options = {"strategy": strategy, "folder": str(folder), "timesteps": 64 * 12, "model": model}
        # Once TorchRL has counted the GPUs, PyTorch for CUDA admits no rank forked from a forked process.
        anew = ["-u"] if strategy == "ddp_notebook" else []
        code, errors = finish(launch([*anew, "tests/stories/spawned_run.py"], options), timeout=300)
        assert code == 0, errors
        results.append(torch.load(folder / "result.pt"))
        assert results[-1]["validated"].items() <= results[-1]["fitted"].items()
        progress = results[-1]["progress"]
        assert (progress["env_steps"], progress["extra_steps"]) == (64 * 14, 64 * 2)
        assert len(progress["episode_lengths"]) == len(progress["episode_returns"]) > 20
        assert progress.pop("begun") > 0 and progress.pop("metrics")["charts/SPS"] > 0  # the time
    for result in results[1:]:
        assert result["progress"] == results[0]["progress"]
        assert result["weights"].keys() == results[0]["weights"].keys()
        for name, value in result["weights"].items():
            assert torch.equal(value, results[0]["weights"][name]), name


SLOW_RANKS = """
trainer: {accelerator: cpu, devices: 2, logger: false, enable_checkpointing: false,
  enable_progress_bar: false, limit_val_batches: 0,
  strategy: {class_path: DDPStrategy, init_args: {timeout: "0:00:20"}}}
data: {total_timesteps: 100000000}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_rank_ends_the_run_after_the_timeout(tmp_path):
    """docs/long_runs.md promises this. The stopped process ends, too."""
    (tmp_path / "slow.yaml").write_text(SLOW_RANKS)
    process = Forked(tmp_path, command_line, "fit", "--config", "slow.yaml")
    try:
        process.wait_for("parameters")  # it is about to train
        (other,) = left_of(process.pid).keys() - {process.pid}
        os.kill(other, signal.SIGSTOP)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 1
        # Gloo names the wait that timed out, or the pair that the timeout of another wait closed.
        assert re.search("Timed out waiting 20000ms|Application timeout", errors), errors
        time.sleep(1)
        assert not left_of(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_two_machines_started_by_torchrun_are_two_ranks(tmp_path, alone):
    """Two launchers with different node ranks meet at an address, as on two hosts."""
    master_port = str(port())
    nodes = []
    for node in "01":
        flags = ["--nnodes", "2", "--nproc_per_node", "1", "--node_rank", node]
        flags += ["--master_addr", "127.0.0.1", "--master_port", master_port]
        launcher = ["-m", "torch.distributed.run", *flags]
        nodes.append(start(tmp_path / "run", 1, launcher, nodes=2, **HOPPER))
    for node in nodes:
        code, errors = finish(node)
        assert code == 0, errors
    ranks = [torch.load(tmp_path / "run" / f"rank{rank}.pt") for rank in range(2)]
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    assert difference(ranks, alone(HOPPER)) < 0.01
