"""Off-policy runs through the Trainer: batches, resuming, ranks, refusals, graphs and learning."""

import functools
import math
import pickle
import shutil
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.nn.utils import parameters_to_vector
from torchrl.envs import GymEnv, TransformedEnv
from torchrl.envs.transforms import DTypeCastTransform, RewardScaling

from ppo_lightning import (
    C51,
    DDPG,
    DQN,
    SAC,
    TD3,
    AgentModule,
    ConfigError,
    DiscreteSAC,
    MLPAgent,
    RolloutDataModule,
    last_checkpoint,
)
from ppo_lightning.callbacks import Doctor
from ppo_lightning.checkpoints.agent import trained_agent
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.experiments.report import read_csv
from ppo_lightning.offpolicy import C51Agent, DeterministicAgent, QAgent, SACAgent
from ppo_lightning.offpolicy.agents import OffPolicyAgent
from ppo_lightning.offpolicy.buffer import FrameBuffer
from ppo_lightning.offpolicy.module import Delayed
from tests.conftest import train, trainers_in
from tests.environments import Rising
from tests.helpers import SaveAfter, require_same, run, weights

CARTPOLE = {"num_envs": 2, "num_steps": 10, "total_timesteps": 200}
PENDULUM = {"env_id": "Pendulum-v1", "num_envs": 1, "num_steps": 10, "total_timesteps": 100}
SMALL = {"batch_size": 16, "learning_starts": 40, "buffer_size": 100}
Q = SMALL | {"learning_rate": 1e-2, "target_network_frequency": 30, "train_frequency": 10}
ACTOR = SMALL | {"learning_starts": 20}
ACTOR |= {"agent": functools.partial(DeterministicAgent, hidden_sizes=(16, 16))}
SOFT = ACTOR | {"agent": functools.partial(SACAgent, hidden_sizes=(16, 16), norm_obs=True)}
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
    "SAC, tensors": (SAC, PENDULUM | {"backend": "torch"}, SOFT),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains a run once, and returns module and folder of the checkpoints."""

    @functools.cache
    def run(name):
        algorithm, data, model = RUNS[name]
        folder = tmp_path_factory.mktemp("run")
        saves = (("first", 4), ("second", 6), ("last", 4), ("last", 6))
        callbacks = [SaveAfter(folder / f"{stem}.ckpt", rollouts) for stem, rollouts in saves]
        options = {"ppo": algorithm, "callbacks": [*callbacks, Doctor(every=1)]}
        return train(trainers_in(folder), data, model | {"save_buffer": True}, **options), folder

    return run


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_its_buffer_resumes_to_the_bit(name, trained, fit, capsys, tmp_path):
    algorithm, data, model = RUNS[name]
    whole, folder = trained(name)
    capsys.readouterr()
    model = model | {"save_buffer": True}
    options = {"ckpt_path": folder / "first.ckpt", "callbacks": [SaveAfter(tmp_path / "later.ckpt", 6)]}
    resumed = fit(data, model, ppo=algorithm, **options)
    require_same(whole, resumed)
    assert "refill" not in capsys.readouterr().err
    assert len(resumed.buffer) == len(whole.buffer) > 0
    assert isinstance(whole.buffer, FrameBuffer) == ("pictures" in name)


def test_a_run_without_its_buffer_refills_it_before_it_learns(counted, fit, tmp_path):
    _, folder = counted
    assert not [*folder.glob("*.replay")]
    model, save = Q | {"save_buffer": True}, SaveAfter(tmp_path / "again.ckpt", 3)
    with pytest.warns(UserWarning, match="40 steps of its policy refill it"):
        resumed = fit(CARTPOLE, model, ppo=DQN, ckpt_path=folder / "middle.ckpt", callbacks=[save])
    again = fit(CARTPOLE, model, ppo=DQN, ckpt_path=save.path)
    for module in (resumed, again):
        assert module.due(0, 200) == range(90, 201, 10)
        assert len(module.buffer) == 100
    with pytest.raises(ConfigError, match=r"160 steps of its policy .* the run ends before: raise"):
        fit(CARTPOLE, model | {"learning_starts": 160}, ppo=DQN, ckpt_path=folder / "middle.ckpt")
    data, model = CARTPOLE | {"total_timesteps": 40}, Q | {"learning_starts": 35}
    ended = fit(data, model, ppo=Counted, ckpt_path=folder / "middle.ckpt")
    assert ended.env_steps == 40 and not ended.steps, "a run that is complete has nothing to refill"


def test_frames_of_another_number_of_environments_are_refilled(trained, fit):
    _, data, model = RUNS["DQN, pictures"]
    path = trained("DQN, pictures")[1] / "first.ckpt"
    with pytest.warns(UserWarning, match="no replay buffer of this size"):
        fit(data | {"num_envs": 1, "num_steps": 16}, model, ppo=DQN, ckpt_path=path)


def test_rollouts_of_transforms_hold_what_the_agent_stores(fit):
    module = fit(PENDULUM | {"transforms": [RewardScaling(0.0, 0.1)]}, SMALL, ppo=SAC)
    assert len(module.buffer) == 100


def pendulum_of_doubles():
    cast = DTypeCastTransform(torch.float32, torch.float64, in_keys_inv=["action"])
    return TransformedEnv(GymEnv("Pendulum-v1"), cast)


@pytest.mark.parametrize("name", ["TD3", "SAC"])
def test_actions_of_double_precision_are_learned(name, fit):
    algorithm, data, model = RUNS[name]
    assert pendulum_of_doubles().action_spec.dtype == torch.float64
    module = fit(data | {"env_id": pendulum_of_doubles}, model, ppo=algorithm)
    assert module.buffer.columns["action"].dtype == torch.float32
    assert "losses/actor_loss" in module.trainer.callback_metrics


def test_a_resumed_run_has_its_own_fixed_temperature(fit, tmp_path):
    save = SaveAfter(tmp_path / "middle.ckpt", 2)
    model = SOFT | {"autotune": False}
    fit(PENDULUM, model | {"alpha": 0.2}, ppo=SAC, callbacks=[save])
    resumed = fit(PENDULUM, model | {"alpha": 0.5}, ppo=SAC, ckpt_path=save.path)
    assert resumed.log_alpha.exp().item() == pytest.approx(0.5)


def test_a_resumed_run_shows_the_learning_rates_that_it_uses(fit, tmp_path):
    save = SaveAfter(tmp_path / "middle.ckpt", 4)
    fit(PENDULUM, SOFT, ppo=SAC, callbacks=[save])
    resumed = fit(PENDULUM, SOFT | {"q_lr": 1e-6, "save_buffer": True}, ppo=SAC, ckpt_path=save.path)
    shown = [optimizer.param_groups[0]["lr"] for optimizer in resumed.trainer.optimizers]
    assert shown == [state[-1]["lr"] for state in resumed._adams.values()] == [3e-4, 1e-6, 1e-6]


@pytest.mark.parametrize(
    ("name", "given", "setting"),
    [
        (
            "C51",
            {"v_max": 7.0},
            r"atoms was .101, -100.0, 100.0. in the run and is .101, -100.0, 7.0. now",
        ),
        ("DQN", {"agent": functools.partial(QAgent, hidden_sizes=(8,))}, "hidden_sizes was .* is .8. now"),
    ],
)
def test_a_loaded_agent_has_the_settings_of_its_run_or_is_refused(name, given, setting, trained):
    module, folder = trained(name)
    with pytest.raises(ConfigError, match=rf"^model.agent.{setting}: .* leave the setting out\.$"):
        type(module).load_from_checkpoint(folder / "first.ckpt", **given)


def test_heads_that_scale_actions_are_no_cause_for_a_warning_about_bounds(fit):
    wide = PENDULUM | {"env_id": "Reach-v0", "env_kwargs": {"low": -100.0, "high": 100.0}}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="environment: The bounds of the actions")
        fit(wide, SOFT, ppo=SAC)
    with pytest.warns(UserWarning, match="environment: The bounds of the actions"):
        fit(wide, {"num_minibatches": 1})


def test_a_limit_counts_batches(fit):
    with pytest.warns(UserWarning, match=r"\(3\) counts batches: it ended the run after 30 of 100 "):
        fit(PENDULUM, SOFT, ppo=SAC, max_steps=3)


class Masked(gym.Env):
    """Ten actions, two of which are allowed; the first one has the reward 1."""

    observation_space = gym.spaces.Dict(
        {"x": gym.spaces.Box(-1, 1, (2,), np.float32), "action_mask": gym.spaces.MultiBinary(10)}
    )
    action_space = gym.spaces.Discrete(10)
    now = {"x": np.zeros(2, np.float32), "action_mask": (np.arange(10) < 2).astype(np.int8)}  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.now, {}

    def step(self, action):
        self.time += 1
        return self.now, float(action == 0), self.time == 10, False, {}


def test_the_entropy_of_discrete_actions_is_that_of_the_allowed_ones(fit):
    data = {"env_id": Masked, "num_envs": 1, "num_steps": 10, "total_timesteps": 500}
    module = fit(data, SMALL | {"learning_starts": 100}, ppo=DiscreteSAC)
    rows = module.buffer.columns["observation"][:2]
    torch.testing.assert_close(module.desired_entropy(rows), torch.full((2, 1), 0.89 * math.log(2)))
    assert module.log_alpha.item() < 0  # with that of ten actions, it rises


class HalfFrozen(SAC):
    def add_networks(self, specs):
        super().add_networks(specs)
        self.critics[1].linear.requires_grad_(False)


def test_frozen_parameters_of_a_critic_stay_frozen(fit):
    critics = fit(PENDULUM, SOFT, ppo=HalfFrozen).critics
    targets = fit(PENDULUM, SOFT | {"learning_starts": 99}, ppo=HalfFrozen).critics  # as at the start
    assert torch.equal(critics[1].linear.weight, targets[1].linear.weight)
    assert not torch.equal(critics[1].body.layers[0].weight, targets[1].body.layers[0].weight)


class FrozenPolicy(TD3):
    """A critic of a policy that is given."""

    def add_networks(self, specs):
        self.agent.requires_grad_(False)
        super().add_networks(specs)


def test_a_whole_part_may_be_frozen(fit):
    options = {"batch_size": 8, "train_frequency": 1}
    trained, start = (fit(PENDULUM, options | {"learning_starts": n}, ppo=FrozenPolicy) for n in (16, 90))
    for part, is_equal in (("agent", True), ("critics", False)):
        one, other = (parameters_to_vector(getattr(x, part).parameters()) for x in (trained, start))
        assert torch.equal(one, other) == is_equal


def test_the_policy_is_delayed_by_updates():
    module = SAC(train_frequency=8, policy_frequency=2, target_network_frequency=24)
    policy, target = Delayed(policy=True), Delayed(target=True)
    assert [*map(module.delayed, (8, 16, 24))] == [Delayed(), policy, target]


def test_a_checkpoint_has_its_own_buffer_or_is_skipped(trained, fit, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(trained("DQN")[1], folder)
    (folder / "last.ckpt").unlink()
    first, second, last = (folder / f"{name}.replay" for name in ("first.80", "second.120", "last.120"))
    # The checkpoint that was written again has replaced its buffer.
    assert {first, second, last} == {*folder.glob("*.replay*")}
    assert last_checkpoint(folder) == str(folder / "second.ckpt")
    resume = functools.partial(fit, CARTPOLE, Q | {"save_buffer": True}, ppo=DQN)
    second.unlink()
    assert last_checkpoint(folder) == str(folder / "first.ckpt")
    content = first.read_bytes()
    row = torch.load(first)["buffers"][0]["rows"]["observation"][0].numpy().tobytes()
    for damaged in (content.replace(row, row[::-1]), content[:-100]):
        first.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"first\.80\.replay is damaged"):
            resume(ckpt_path=folder / "first.ckpt")
    other = torch.load(last) | {"checkpoint": [1.0, 80]}
    for stranger in (other, torch.load(last), [1], {"rows": 2}):
        torch.save(stranger, first)
        with pytest.raises(ConfigError, match=r"first\.80\.replay (belongs|is damaged)"):
            resume(ckpt_path=folder / "first.ckpt")
        assert last_checkpoint(folder) is None
    first.unlink()
    with pytest.raises(ConfigError, match="is missing"):
        resume(ckpt_path=folder / "first.ckpt")
    assert last_checkpoint(folder) is None


def test_weights_alone_are_saved_without_the_buffer(trained, tmp_path):
    module, _ = trained("DQN")
    module.trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.ckpt"]
    assert module.trainer.callback_metrics["step"] == module.env_steps, "for names of checkpoints"


def test_a_validated_checkpoint_is_saved_without_a_buffer(trained, make_trainer, tmp_path):
    module = AgentModule.load_from_checkpoint(trained("DQN")[1] / "last.ckpt")
    trainer = make_trainer(limit_val_batches=1)
    trainer.validate(module, RolloutDataModule(**CARTPOLE), verbose=False)
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    assert [path.name for path in tmp_path.glob("again*")] == ["again.ckpt"]


def test_a_checkpoint_has_the_whole_module(trained):
    for name in ("DQN", "C51", "DDPG", "TD3", "SAC"):
        module, folder = trained(name)
        loaded = AgentModule.load_from_checkpoint(folder / "last.ckpt")
        assert type(loaded) is type(module)
        assert loaded.state_dict().keys() == module.state_dict().keys()
        observation = np.full(module.observation_spec.shape, 0.1, np.float32)
        assert loaded.predict([observation] * 2).shape[:1] == (2,)
        numbers, bars = loaded.agent.explain(torch.from_numpy(observation)[None])
        assert numbers.shape == bars.shape == (1, 2 if name in ("DQN", "C51") else 1)
        played = loaded.agent.play(torch.from_numpy(observation)[None])
        assert ("state_value" in played) == (name in ("DQN", "C51"))
        if "state_value" in played:
            assert played["state_value"] == numbers.max()


def test_a_pickled_module_acts_without_its_buffer(trained):
    module, _ = trained("SAC")
    copied = pickle.loads(pickle.dumps(module))
    assert not hasattr(copied, "buffer") and len(module.buffer)
    observation = np.full((3, *module.observation_spec.shape), 0.1, np.float32)
    np.testing.assert_array_equal(copied.predict(observation), module.predict(observation))


class Counted(DQN):
    def on_train_start(self):
        super().on_train_start()
        self.steps, self.stored = [], []

    def delayed(self, step):
        self.steps.append((self.env_steps, step, len(self.buffer)))
        return super().delayed(step)

    def transitions(self, rollout):
        self.stored.append((rollout, super().transitions(rollout)))
        return self.stored[-1][1]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Train a run of :class:`Counted` without saving its buffer; return module and folder."""
    folder = tmp_path_factory.mktemp("counted")
    model = Q | {"learning_starts": 35, "exploration_fraction": 0.5, "end_e": 0.1}
    callbacks = [SaveAfter(folder / "middle.ckpt", 2)]
    data = CARTPOLE | {"total_timesteps": 100}
    return train(trainers_in(folder), data, model, ppo=Counted, callbacks=callbacks), folder


def test_updates_are_due_by_environment_steps_after_the_transitions_are_stored(counted):
    module, _ = counted
    assert module.steps == [(40, 40, 40), *((n, s, n) for n in (60, 80, 100) for s in (n - 10, n))]


@pytest.mark.parametrize(
    ("algorithm", "steps", "start"),
    [(DQN, 5000, 250), (DQN, 10**6, 10_000), (TD3, 20_000, 1000), (TD3, 10**6, 25_000), (SAC, 10**6, 5000)],
)
def test_learning_starts_early_in_short_runs(algorithm, steps, start, fit, capsys):
    data = (CARTPOLE if algorithm is DQN else PENDULUM) | {"total_timesteps": steps, "num_steps": None}
    module = fit(data, {"buffer_size": 100}, ppo=algorithm, max_steps=1)
    assert module.hparams.learning_starts == start
    assert f"learning starts after {start} environment steps" in capsys.readouterr().out
    assert module.trainer.datamodule.num_steps == 10


def test_each_fit_of_a_module_derives_when_learning_starts(fit, make_trainer, tmp_path):
    """Not from what another fit derived, or from how its buffer was refilled."""
    module = DQN(buffer_size=100, batch_size=8)
    save = SaveAfter(tmp_path / "a.ckpt", 10)
    for steps in (200, 4000, 200):
        trainer = make_trainer(max_steps=10, callbacks=[save])
        trainer.fit(module, RolloutDataModule(**CARTPOLE | {"total_timesteps": steps}))
        assert module.hparams.learning_starts == steps // 20
    longer = RolloutDataModule(**CARTPOLE | {"total_timesteps": 400})
    with pytest.warns(UserWarning, match="no replay buffer"):
        make_trainer().fit(module, longer, ckpt_path=save.path)
    assert module.due(0, 400)[0] > 200
    make_trainer().fit(module, RolloutDataModule(**CARTPOLE))
    assert module.due(0, 200)[0] == 12
    module = DQN(buffer_size=100, batch_size=8)
    module.hparams.learning_starts = 30
    with pytest.warns(UserWarning, match="no replay buffer"):
        make_trainer().fit(module, longer, ckpt_path=save.path)
    assert module.hparams.learning_starts == 30


def test_a_longer_resumed_run_keeps_the_start_of_learning(fit, tmp_path):
    save = SaveAfter(tmp_path / "short.ckpt", 5)
    model = {"buffer_size": 100, "batch_size": 8}
    fit(CARTPOLE, model, ppo=DQN, callbacks=[save])
    longer = fit(CARTPOLE | {"total_timesteps": 800}, model, ppo=DQN, ckpt_path=save.path)
    loaded = DQN.load_from_checkpoint(save.path)
    assert longer.hparams.learning_starts == 10 == loaded.hparams.learning_starts
    longer.trainer.fit(loaded, RolloutDataModule(**CARTPOLE | {"total_timesteps": 400}))
    assert loaded.hparams.learning_starts == 20, "a new run"


def test_the_target_network_is_due_in_the_first_update_after_each_multiple():
    module = DQN(train_frequency=10, target_network_frequency=25)
    assert [step for step in range(10, 101, 10) if module.delayed(step).target] == [30, 50, 80, 100]


def test_updates_need_no_batches_that_their_number_of_steps_divides(fit):
    module = fit(CARTPOLE | {"total_timesteps": 80}, Q | {"train_frequency": 7}, ppo=Counted)
    assert module.steps == [*((60, n, 60) for n in (42, 49, 56)), *((80, n, 80) for n in (63, 70, 77))]


def test_the_buffer_holds_final_observations_and_a_time_limit_is_no_termination(fit):
    data = CARTPOLE | {"env_kwargs": {"max_episode_steps": 7}, "num_envs": 1}
    module = fit(data, Q | {"learning_starts": 190}, ppo=Counted)
    rows = module.buffer.gather(torch.arange(len(module.buffer)))
    moved = (rows["next_observation"] - rows["observation"]).abs().amax(1)
    assert moved.max() < 0.7, "no observation of a new episode follows"
    begins = (rows["observation"][1:] != rows["next_observation"][:-1]).any(1)
    assert 13 <= begins.sum() <= 16
    assert not rows["terminated"].any()


def test_invalid_steps_are_not_stored(counted):
    module, _ = counted
    rollout, all_rows = module.stored[-1]
    rollout = rollout.clone()
    rollout["weight"] = torch.ones(2, 10)
    rollout["weight"][1, 3:] = 0
    rows = module.transitions(rollout)
    assert len(rows["reward"]) == 13
    kept = [2 * t + n for t in range(10) for n in range(2) if n == 0 or t < 3]
    for key, column in rows.items():
        assert torch.equal(column, all_rows[key][kept])


def test_exploration_follows_the_environment_steps(counted, trained):
    module, _ = counted
    assert [*map(module.exploration, (0, 25, 50, 75))] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert module.agent.head.exploration == pytest.approx(0.1)
    soft, _ = trained("SAC")
    assert [*map(soft.exploration, (19, 20))] == [None, 1.0]


@pytest.mark.parametrize(
    ("ppo", "change", "lowest"),
    [
        (DQN, {}, 0.05),
        (C51, {}, 0.05),
        (DQN, {"exploration_fraction": 1.0}, 0.05),
        (DQN, {"end_e": 0.2}, 0.2),
    ],
)
def test_exploration_of_a_longer_resumed_run_does_not_rise(fit, tmp_path, ppo, change, lowest):
    """Unless ``end_e`` says so. The second resume is of a run that was longer already."""

    class Spy(ppo):
        def training_step(self, rollout, batch_idx):
            seen.append(self.agent.head.exploration)
            return super().training_step(rollout, batch_idx)

    seen, paths = [], [None, tmp_path / "first.ckpt", tmp_path / "second.ckpt", None]
    for i, total in enumerate((100, 400, 800)):
        save = [SaveAfter(paths[i + 1], total // 20)] if i < 2 else []
        options = {"ckpt_path": paths[i], "callbacks": save}
        data = CARTPOLE | {"total_timesteps": total}
        fit(data, Q | {"end_e": 0.05} | (change if i else {}), ppo=Spy, **options)
        if i == 0:
            assert seen[0] > 0.5 and seen[-1] == pytest.approx(0.05)
            seen.clear()
    assert seen == pytest.approx([lowest] * len(seen))


@pytest.mark.parametrize("name", ["DQN", "DDPG", "SAC", "DiscreteSAC"])
def test_a_loaded_agent_explores_as_the_trained_one(name, trained, tmp_path):
    module, _ = trained(name)
    module.trainer.save_checkpoint(tmp_path / "new.ckpt", weights_only=True)
    observation = np.full((200, *module.observation_spec.shape), 0.1, np.float32)
    loaded = AgentModule.load_from_checkpoint(tmp_path / "new.ckpt")
    old = torch.load(tmp_path / "new.ckpt")
    del old["exploration"]  # of version 0.2.0
    torch.save(old, tmp_path / "old.ckpt")
    older = AgentModule.load_from_checkpoint(tmp_path / "old.ckpt")

    def actions(of):
        torch.manual_seed(1)
        return of.predict(observation, deterministic=False)

    np.testing.assert_array_equal(actions(loaded), actions(module))
    played = trained_agent(read_checkpoint(tmp_path / "new.ckpt"))  # as in games and tournaments
    assert played.head.exploration == module.agent.head.exploration
    assert len(np.unique(actions(loaded))) > 1, "it explores"
    assert actions(older).shape == actions(module).shape


MEMORY = functools.partial(MLPAgent, memory="lstm", shared=True)


class Scheduled(DQN):
    def configure_optimizers(self):
        adams = super().configure_optimizers()
        return adams, [torch.optim.lr_scheduler.ConstantLR(adams[0])]


class Other(DQN):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.trainable_parameters())


TICTACTOE = CARTPOLE | {"env_id": "pettingzoo.classic.tictactoe_v3", "backend": "pettingzoo"}
UNBOUNDED = PENDULUM | {"env_id": "Reach-v0", "env_kwargs": {"low": -np.inf, "high": np.inf}}
PARTED = PENDULUM | {"env_id": "tests.environments:Parts-v0"}
NAMED = type("NamedHead", (MLPAgent,), {"default_head": "categorical"})
REFUSED = {
    "take turns, and the targets of DQN do not change sides": (DQN, TICTACTOE, {}),
    "a memory, which DQN cannot train": (DQN, CARTPOLE, {"agent": MEMORY}),
    "whose head is a SoftmaxHead": (DiscreteSAC, CARTPOLE, {"agent": C51Agent}),
    "model.agent is OffPolicyAgent, which DQN cannot": (DQN, CARTPOLE, {"agent": OffPolicyAgent}),
    "model.agent is NamedHead, which DQN cannot": (DQN, CARTPOLE, {"agent": NAMED}),
    "norm_obs is for vectors": (DQN, ATARI, {"agent": functools.partial(QAgent, norm_obs=True)}),
    "must be below model.v_max": (C51, CARTPOLE, {"v_min": 3.0, "v_max": 3.0}),
    "less than one batch": (DQN, CARTPOLE, {"buffer_size": 19}),
    "ends after 200 steps without an update": (DQN, CARTPOLE, {"learning_starts": 200}),
    "ends after 200 steps without": (DQN, CARTPOLE | {"total_timesteps": 219}, {"learning_starts": 205}),
    "hidden_sizes is for vectors": (DQN, ATARI, {"agent": functools.partial(QAgent, hidden_sizes=(8,))}),
    "set it to false": (DQN, CARTPOLE | {"overlap": True}, {}),
    "GB of memory": (DQN, CARTPOLE, {"buffer_size": 10**13}),
    "has Composite actions, not vectors": (SAC, PARTED, {}),
    "has Composite actions, not one choice": (C51, PARTED, {}),
    "without finite bounds": (SAC, UNBOUNDED, {}),
    "SAC takes '32-true'": (SAC, PENDULUM, {}, {"precision": "bf16-mixed"}),
    "does not act on SAC's minibatches: leave it out": (SAC, PENDULUM, {}, {"gradient_clip_val": 1.0}),
    "raise model.batch_size instead": (DQN, CARTPOLE, {}, {"accumulate_grad_batches": 2}),
}


@pytest.mark.parametrize("algorithm", [Scheduled, Other])
def test_other_optimizers_are_an_error_of_the_subclass(fit, algorithm):
    with pytest.raises(AssertionError, match="must return the Adams of OffPolicyModule and no schedule"):
        fit(CARTPOLE, {"learning_starts": 0}, ppo=algorithm)


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_does_not_fit_ends_in_a_sentence(sentence, fit):
    algorithm, data, model, *options = REFUSED[sentence]
    model = {"learning_starts": 0, "train_frequency": 10, "buffer_size": 100} | model
    with pytest.raises(ConfigError, match=sentence):
        fit(data, model, ppo=algorithm, **dict(*options))


@pytest.mark.integration
@pytest.mark.parametrize("name", ["DQN", "C51", "TD3", "SAC"])
def test_a_compiled_run_is_the_eager_run_to_tolerance(name, fit):
    algorithm, data, model = RUNS[name]
    data = data | {"total_timesteps": 70}
    eager, compiled = (fit(data, model | {"compile": on}, ppo=algorithm) for on in (False, True))
    start = fit(data, model, ppo=algorithm, max_steps=1)  # a batch, before the first update
    moved = (weights(eager) - weights(start)).abs().max()
    assert moved > 1e-3
    assert (weights(eager) - weights(compiled)).abs().max() < 0.01 * moved
    assert "update_critics" not in vars(compiled), "graphs are released"


QUICK = {"learning_starts": 100, "train_frequency": 2, "batch_size": 32, "buffer_size": 1000}
SLOW_ACTOR = QUICK | {"tau": 0.05}
PROBES = {
    DQN: QUICK | {"learning_rate": 1e-2},
    C51: QUICK | {"learning_rate": 1e-2, "v_min": -2.0, "v_max": 2.0, "n_atoms": 11},
    DDPG: SLOW_ACTOR | {"learning_rate": 3e-3},
    TD3: SLOW_ACTOR | {"learning_rate": 3e-3},
    SAC: SLOW_ACTOR | {"policy_lr": 3e-3, "q_lr": 3e-3},
    DiscreteSAC: SLOW_ACTOR | {"policy_lr": 3e-3, "q_lr": 1e-2},
}


@pytest.mark.parametrize("algorithm", PROBES)
def test_learns_the_best_action_of_a_probe(algorithm, fit):
    is_continuous = algorithm in (DDPG, TD3, SAC)
    maker = algorithm().make_agent
    agent = functools.partial(getattr(maker, "func", maker), hidden_sizes=(32, 32))
    data = {"env_id": "Match-v0", "num_envs": 2, "num_steps": 5, "total_timesteps": 900}
    data |= {"env_kwargs": {"continuous": is_continuous}}
    module = fit(data, PROBES[algorithm] | {"agent": agent}, ppo=algorithm)
    actions = [np.asarray(module.predict([observation])).item() for observation in (-1.0, 1.0)]
    assert actions == pytest.approx([-0.5, 0.5] if is_continuous else [0, 1], abs=0.25)


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
def test_two_ranks_have_equal_states_and_buffers_of_their_own(tmp_path):
    model = {"batch_size": 16, "learning_starts": 40, "buffer_size": 200, "save_buffer": True}
    data = {"env_id": "Pendulum-v1", "num_envs": 2, "num_steps": 10, "total_timesteps": 100}
    options = {"algorithm": "SAC", "model": model, "data": data, "check_every": 1}
    options |= {"agent_class": "offpolicy.SACAgent", "agent": {"norm_obs": True}}
    one, other = run(tmp_path, 2, **options, save_after=3)
    for key in ("weights", "state", "optimizers", "returns"):  # with target networks and statistics
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=0)
    assert one["state"]["agent.normalizer.count"] > 0
    assert not torch.equal(one["weights"], one["initial"])
    assert not torch.equal(one["observation"], other["observation"])
    assert one["buffer"] == other["buffer"] == 50
    for rank in run(tmp_path, 2, **options, ckpt_path=str(tmp_path / "middle.ckpt")):
        assert torch.equal(rank["weights"], one["weights"])
    for rank in run(tmp_path, 2, **options | {"model": model | {"compile": True}}):
        moved = one["weights"] - one["initial"]
        assert (rank["weights"] - one["weights"]).norm() < 0.01 * moved.norm()  # Adam enlarges rounding


def test_a_point_of_the_return_has_all_episodes_since_the_last_one(fit, tmp_path):
    data = {"env_id": Rising, "num_envs": 1, "num_steps": 10, "total_timesteps": 330}
    fit(data, SMALL | {"learning_starts": 290}, ppo=DQN, logger=CSVLogger(tmp_path))
    (path,) = tmp_path.rglob("metrics.csv")
    returns = [float(row["charts/episodic_return"]) for row in read_csv(path)]
    assert returns == pytest.approx([1.5, 11.5, 30.5, 50.5, 63.5])  # episodes 1, 2; to 20, 40, 60; to the end


def test_metrics_have_the_names_of_cleanrl(trained):
    expected = {
        "DQN": {"td_loss", "q_values"},
        "C51": {"loss", "q_values"},
        "DDPG": {"qf1_loss", "qf1_values", "actor_loss"},
        "SAC": {"qf1_loss", "qf2_loss", "qf_loss", "qf1_values", "actor_loss", "alpha", "alpha_loss"},
    }
    for name, names in expected.items():
        metrics = trained(name)[0].trainer.callback_metrics
        assert names <= {key.removeprefix("losses/") for key in metrics}


class Relabelled(DQN):
    def gather(self, rows, generator):
        minibatch = super().gather(rows, generator)
        return minibatch | {"reward": torch.full_like(minibatch["reward"], 7.0)}

    def update(self, minibatch, due):
        assert set(minibatch["reward"].tolist()) == {7.0}
        return super().update(minibatch, due)


def test_a_variant_relabels_what_is_sampled(fit):
    module = fit(CARTPOLE, {"learning_starts": 0, "train_frequency": 10, "buffer_size": 100}, ppo=Relabelled)
    assert module.trainer.callback_metrics["losses/td_loss"] > 0
