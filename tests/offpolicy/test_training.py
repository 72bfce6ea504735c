"""Off-policy runs through the Trainer: batches, resuming, ranks, refusals, graphs and learning."""

import functools
import shutil

import gymnasium as gym
import numpy as np
import pytest
import torch

from ppo_lightning import C51, DDPG, DQN, SAC, TD3, ConfigError, DiscreteSAC, MLPAgent, last_checkpoint
from ppo_lightning.offpolicy import C51Agent, DeterministicAgent, SACAgent
from ppo_lightning.offpolicy.buffer import FrameBuffer
from tests.helpers import SaveAfter, weights

CARTPOLE = {"num_envs": 2, "num_steps": 10, "total_timesteps": 200}
PENDULUM = {"env_id": "Pendulum-v1", "num_envs": 1, "num_steps": 10, "total_timesteps": 100}
SMALL = {"batch_size": 16, "learning_starts": 40, "buffer_size": 100}
Q = SMALL | {"learning_rate": 1e-2, "target_network_frequency": 30}
ACTOR = SMALL | {"agent": functools.partial(DeterministicAgent, hidden_sizes=(16, 16))}
SOFT = SMALL | {"agent": functools.partial(SACAgent, hidden_sizes=(16, 16), norm_obs=True)}
ATARI = {"env_id": "ALE/Breakout-v5", "num_envs": 2, "num_steps": 8, "total_timesteps": 112}
ATARI |= {"env_kwargs": {"screen_size": 36}}
RUNS = {
    "DQN": (DQN, CARTPOLE, Q),
    "C51": (C51, CARTPOLE, Q),
    "DDPG": (DDPG, PENDULUM, ACTOR),
    "TD3": (TD3, PENDULUM, ACTOR),
    "SAC": (SAC, PENDULUM, SOFT),
    "DiscreteSAC": (DiscreteSAC, CARTPOLE, SMALL | {"train_frequency": 10}),
    "DQN, pictures": (DQN, ATARI, Q | {"train_frequency": 16}),
    "workers": (DQN, CARTPOLE | {"num_workers": 2}, Q),
    "tensors": (DQN, CARTPOLE | {"backend": "torch"}, Q),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_its_buffer_resumes_to_the_bit(name, fit_and_resume, capsys):
    algorithm, data, model = RUNS[name]
    whole, resumed = fit_and_resume(4, data, model | {"save_buffer": True}, ppo=algorithm)
    assert "refill" not in capsys.readouterr().err
    assert len(resumed.buffer) == len(whole.buffer) > 0
    assert isinstance(whole.buffer, FrameBuffer) == ("pictures" in name)
    assert any(key.startswith("losses/") for key in whole.trainer.callback_metrics)


def test_a_run_without_its_buffer_refills_it_before_it_learns(fit, tmp_path):
    fit(CARTPOLE, Q, ppo=DQN, callbacks=[SaveAfter(tmp_path / "middle.ckpt", 5)])
    assert not [*tmp_path.glob("*.replay")]
    with pytest.warns(UserWarning, match="40 steps of the trained policy refill it"):
        resumed = fit(CARTPOLE, Q, ppo=DQN, ckpt_path=tmp_path / "middle.ckpt")
    assert resumed.due(0, 200) == range(150, 201, 10)
    assert len(resumed.buffer) == 100


def test_a_checkpoint_has_its_own_buffer_or_is_skipped(fit, tmp_path):
    save = [SaveAfter(tmp_path / "a.ckpt", 4), SaveAfter(tmp_path / "b.ckpt", 6)]
    model = Q | {"save_buffer": True}
    fit(CARTPOLE, model, ppo=DQN, callbacks=save)
    first, second = tmp_path / "a.80.replay", tmp_path / "b.120.replay"
    assert {first, second} == {*tmp_path.glob("*.replay")}
    assert last_checkpoint(tmp_path) == str(tmp_path / "b.ckpt")
    shutil.copy(first, second)  # a pair of two steps
    assert last_checkpoint(tmp_path) == str(tmp_path / "a.ckpt")
    with pytest.raises(ConfigError, match="of step 120, and the buffer beside it of step 80"):
        fit(CARTPOLE, model, ppo=DQN, ckpt_path=tmp_path / "b.ckpt")
    first.write_bytes(first.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"a\.80\.replay is damaged"):
        fit(CARTPOLE, model, ppo=DQN, ckpt_path=tmp_path / "a.ckpt")
    first.unlink()
    with pytest.raises(ConfigError, match="is missing"):
        fit(CARTPOLE, model, ppo=DQN, ckpt_path=tmp_path / "a.ckpt")
    assert last_checkpoint(tmp_path) is None


def test_a_checkpoint_that_is_written_again_replaces_its_buffer(fit, tmp_path):
    save = [SaveAfter(tmp_path / "last.ckpt", rollouts) for rollouts in (4, 6)]
    fit(CARTPOLE, Q | {"save_buffer": True}, ppo=DQN, callbacks=save)
    assert [path.name for path in tmp_path.glob("*.replay*")] == ["last.120.replay"]


class Counted(DQN):
    """DQN that records the updates and the transitions of a run."""

    def on_train_start(self):
        super().on_train_start()
        self.steps, self.stored = [], []

    def delayed(self, step):
        self.steps.append((self.env_steps, step, len(self.buffer)))
        return super().delayed(step)

    def transitions(self, rollout):
        self.stored.append((rollout, super().transitions(rollout)))
        return self.stored[-1][1]


def test_updates_are_due_by_environment_steps_after_the_transitions_are_stored(fit):
    module = fit(CARTPOLE | {"total_timesteps": 100}, Q | {"learning_starts": 35}, ppo=Counted)
    assert module.steps == [(40, 40, 40), *((n, s, n) for n in (60, 80, 100) for s in (n - 10, n))]


def test_the_buffer_holds_final_observations_and_a_time_limit_is_no_termination(fit):
    data = CARTPOLE | {"env_kwargs": {"max_episode_steps": 7}, "num_envs": 1}
    module = fit(data, Q | {"learning_starts": 190}, ppo=Counted)
    rows = module.buffer.gather(torch.arange(len(module.buffer)))
    moved = (rows["next_observation"] - rows["observation"]).abs().amax(1)
    assert moved.max() < 0.7, "no observation of a new episode follows"
    begins = (rows["observation"][1:] != rows["next_observation"][:-1]).any(1)
    assert 13 <= begins.sum() <= 16
    assert not rows["terminated"].any()


def test_invalid_steps_are_not_stored(fit):
    module = fit(CARTPOLE | {"total_timesteps": 100}, Q, ppo=Counted)
    rollout, all_rows = module.stored[-1]
    rollout = rollout.clone()
    rollout["valid"] = torch.ones(2, 10, dtype=torch.bool)
    rollout["valid"][1, 3:] = False
    rows = module.transitions(rollout)
    assert len(rows["reward"]) == 13
    kept = [2 * t + n for t in range(10) for n in range(2) if n == 0 or t < 3]
    for key, column in rows.items():
        assert torch.equal(column, all_rows[key][kept])


def test_exploration_follows_the_environment_steps(fit):
    module = fit(CARTPOLE, Q | {"exploration_fraction": 0.5, "end_e": 0.1}, ppo=DQN)
    assert [*map(module.exploration, (0, 50, 100, 150))] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert module.agent.head.exploration == pytest.approx(0.1)
    soft = fit(PENDULUM, SOFT, ppo=SAC)
    assert [*map(soft.exploration, (39, 40))] == [float("inf"), 1.0]


MEMORY = functools.partial(MLPAgent, memory="gru", shared=True)


def unbounded():
    space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    return gym.wrappers.TransformAction(gym.make("Pendulum-v1"), lambda action: action, space)


REFUSED = {
    "MLPAgent, which DQN cannot train": (DQN, CARTPOLE, {"agent": MLPAgent}),
    "a memory, which DQN cannot train": (DQN, CARTPOLE, {"agent": MEMORY}),
    "whose head is a SoftmaxHead": (DiscreteSAC, CARTPOLE, {"agent": C51Agent}),
    "use SAC, TD3 or DDPG for continuous actions": (DQN, PENDULUM, {}),
    "use DQN, C51 or DiscreteSAC for discrete actions": (TD3, CARTPOLE, {}),
    "must be below model.v_max": (C51, CARTPOLE, {"v_min": 3.0, "v_max": 3.0}),
    "not divisible by model.train_frequency = 7": (DQN, CARTPOLE, {"train_frequency": 7}),
    "less than one batch": (DQN, CARTPOLE, {"buffer_size": 19}),
    r"must be below data.total_timesteps \(200\)": (DQN, CARTPOLE, {"learning_starts": 200}),
    "set it to false": (DQN, CARTPOLE | {"overlap": True}, {}),
    "GB of memory": (DQN, CARTPOLE, {"buffer_size": 10**13}),
    "without finite bounds": (SAC, PENDULUM | {"env_id": unbounded}, {}),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_does_not_fit_ends_in_a_sentence(sentence, fit):
    algorithm, data, model = REFUSED[sentence]
    with pytest.raises(ConfigError, match=sentence):
        fit(data, {"learning_starts": 0, "train_frequency": 10, "buffer_size": 100} | model, ppo=algorithm)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["DQN", "C51", "TD3", "SAC"])
def test_a_compiled_run_is_the_eager_run_to_tolerance(name, fit):
    algorithm, data, model = RUNS[name]
    data = data | {"total_timesteps": 70}
    eager, compiled = (fit(data, model | {"compile": on}, ppo=algorithm) for on in (False, True))
    start = fit(data, model | {"learning_starts": 69, "train_frequency": 10}, ppo=algorithm)
    moved = (weights(eager) - weights(start)).abs().max()
    assert moved > 1e-3
    assert (weights(eager) - weights(compiled)).abs().max() < 0.01 * moved
    assert "update_critics" not in vars(compiled), "graphs are released"


class Follow(gym.Env):
    """Episodes of one step, whose reward is largest for the action 1 + observation."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 3, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.target = 1 + self.np_random.choice([-1, 1])
        return np.array([self.target - 1], np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), -((action[0] - self.target) ** 2), True, False, {}


QUICK = {"learning_starts": 100, "train_frequency": 2, "batch_size": 32, "buffer_size": 1000}
SLOW_ACTOR = QUICK | {"tau": 0.05}
PROBES = {
    DQN: ("Probe-v0", QUICK | {"learning_rate": 1e-2}, [0, 1]),
    C51: ("Probe-v0", QUICK | {"learning_rate": 1e-2, "v_min": -2.0, "v_max": 2.0, "n_atoms": 11}, [0, 1]),
    DDPG: (Follow, SLOW_ACTOR | {"learning_rate": 3e-3}, [0, 2]),
    TD3: (Follow, SLOW_ACTOR | {"learning_rate": 3e-3}, [0, 2]),
    SAC: (Follow, SLOW_ACTOR | {"policy_lr": 3e-3, "q_lr": 3e-3}, [0, 2]),
    DiscreteSAC: ("Probe-v0", SLOW_ACTOR | {"policy_lr": 3e-3, "q_lr": 1e-2}, [0, 1]),
}


@pytest.mark.parametrize("algorithm", PROBES)
def test_learns_the_best_action_of_a_probe(algorithm, fit):
    env_id, model, best = PROBES[algorithm]
    maker = algorithm().make_agent
    agent = functools.partial(getattr(maker, "func", maker), hidden_sizes=(32, 32))
    data = {"env_id": env_id, "num_envs": 2, "num_steps": 5, "total_timesteps": 900}
    data |= {"env_kwargs": {"kind": "both"}} if env_id == "Probe-v0" else {}
    module = fit(data, model | {"agent": agent}, ppo=algorithm)
    actions = [np.asarray(module.predict([observation])).item() for observation in (-1.0, 1.0)]
    assert actions == pytest.approx(best, abs=0.25)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("algorithm", "data", "model", "least"),
    [
        (DQN, {"num_envs": 1, "num_steps": 10, "total_timesteps": 20_000}, {"learning_starts": 1000}, 60),
        (SAC, PENDULUM | {"total_timesteps": 5000}, {"learning_starts": 1000, "batch_size": 128}, -900),
    ],
)
def test_learns(algorithm, data, model, least, fit):
    module = fit(data, model, ppo=algorithm)
    returns = [*module.episode_returns][-10:]
    assert sum(returns) / 10 > least


@pytest.mark.integration
def test_two_ranks_have_equal_weights_and_buffers_of_their_own(tmp_path):
    from tests.helpers import finish, launch

    process = launch(["tests/offpolicy/ranks.py"], {"folder": str(tmp_path)})
    code, errors = finish(process)
    assert code == 0, errors
    one, other = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert torch.equal(one["weights"], other["weights"])
    assert not torch.equal(one["weights"], one["initial"])
    assert not torch.equal(one["observation"], other["observation"])
    assert one["length"] == other["length"] == 50
    for result in (one, other):  # the run was resumed from a checkpoint in its middle
        assert torch.equal(result["weights"], result["resumed"])


def test_metrics_have_the_names_of_cleanrl(fit):
    expected = {
        "DQN": {"td_loss", "q_values"},
        "C51": {"loss", "q_values"},
        "DDPG": {"qf1_loss", "qf1_values", "actor_loss"},
        "SAC": {"qf1_loss", "qf2_loss", "qf_loss", "qf1_values", "actor_loss", "alpha", "alpha_loss"},
    }
    for name, names in expected.items():
        algorithm, data, model = RUNS[name]
        metrics = fit(data, model, ppo=algorithm).trainer.callback_metrics
        assert names <= {key.removeprefix("losses/") for key in metrics}
