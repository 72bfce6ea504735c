"""Networks of users: what is no agent ends in one sentence that names the contract."""

import functools

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributions as D
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Unbounded
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppo_lightning import (
    DQN,
    PPG,
    PPO,
    RND,
    Actor,
    ActorCritic,
    ConfigError,
    MLPAgent,
    RecurrentPPO,
    RolloutDataModule,
)
from ppo_lightning.envs import EnvFactory
from ppo_lightning.games.players import agent_player
from ppo_lightning.models import MLP, makers
from ppo_lightning.models.networks import NetworkAgent
from ppo_lightning.offpolicy import QAgent
from ppo_lightning.spaces.specs import mask_columns, stored
from ppo_lightning.video.record import record_video
from tests.environments import Counter
from tests.spaces.test_spaces import Any

CONTRACT = makers.CONTRACT.format("ActorCritic")


class Net(nn.Module):
    def __init__(self, observation_spec=None, action_spec=None):
        super().__init__()
        self.policy, self.value = nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, observation):
        return self.policy(observation), self.value(observation)


class TakesNothing(ActorCritic):
    def __init__(self):
        raise AssertionError("is not called")


class Made(ActorCritic):
    """An agent of a user with one thing that is wrong."""

    def __init__(self, observation_spec, action_spec, wrong):
        body = nn.Sequential(nn.Linear(4, 8)) if wrong == "body" else MLP(4, [8])
        super().__init__(action_spec, lambda: body)
        if wrong != "settings":
            self.save_hyperparameters(ignore=["observation_spec", "action_spec"])
        if wrong == "buffer":
            self.register_buffer("causal", torch.full((3, 3), -torch.inf).triu(1))


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (Net, f"model.agent is Net: it must be {CONTRACT}."),
        (functools.partial(Net, None), f"model.agent is Net: it must be {CONTRACT}."),
        (Net(), f"model.agent is an object of Net: it must be {CONTRACT}."),
        (Actor, f"model.agent is Actor: it must be {CONTRACT}."),
        (MLPAgent(Unbounded((4,)), Bounded(-1, 1, (1,))), "give its class, or functools.partial(MLPAgent"),
        ("net.MyAgent", "it must be a class or a function, such as functools.partial(MyAgent, width=64)."),
        ({"class_path": "net.MyAgent"}, "it must be a class or a function, such as functools.partial("),
    ],
)
def test_what_makes_no_agent_is_refused_at_once(agent, message):
    with pytest.raises(ConfigError) as raised:
        PPO(agent=agent)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (lambda observation, action: (Net(), Net()), f"makes a tuple: it must be or make {CONTRACT}."),
        (lambda observation, action: nn.Sequential(), f"makes a Sequential: it must be or make {CONTRACT}."),
        (lambda: None, f"2 were given): it must be {CONTRACT}."),
        (TakesNothing, f"3 were given): it must be {CONTRACT}."),
        (functools.partial(Made, wrong="settings"), "Made.__init__ must call self.save_hyperparameters("),
        (functools.partial(Made, wrong="buffer"), "Made has the infinite buffer or weight causal"),
        (functools.partial(Made, wrong="body"), "The body of Made is a Sequential whose out_features"),
    ],
)
def test_what_is_made_is_refused_before_the_first_rollout(agent, message, make_trainer):
    with pytest.raises(ConfigError) as raised:
        make_trainer().fit(PPO(agent=agent), RolloutDataModule())
    assert message in str(raised.value)


class OfRows(ActorCritic):
    def __init__(self, observation_spec, action_spec, masked=True, memory=None):
        size = stored(observation_spec).shape[0]
        mask = mask_columns(observation_spec) if masked else None
        super().__init__(action_spec, lambda: MLP(size, [8]), mask=mask, memory=memory)
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])


def test_an_own_agent_reads_the_action_mask_or_is_refused(fit, tmp_path):
    env_id = functools.partial(Any, spaces.Box(-1, 1, (4,)), masked=True, entry="observation")
    data = {"env_id": env_id, "total_timesteps": 1024}
    for algorithm, memory in ((PPO, None), (RecurrentPPO, "lstm")):
        agent = functools.partial(OfRows, masked=False, memory=memory)
        with pytest.raises(ConfigError, match=r"OfRows, which would ignore the action_mask .*: pass mask="):
            fit(data, {"agent": agent}, ppo=algorithm)
    fit(data, {"agent": OfRows}).trainer.save_checkpoint(tmp_path / "last.ckpt")
    module = PPO.load_from_checkpoint(tmp_path / "last.ckpt")
    assert module.agent.mask == slice(0, 3)


class Scaled(MLPAgent):
    def normalize(self, observation):
        return super().normalize(observation) / 100


def test_a_normalization_that_rollouts_would_ignore_is_refused(fit):
    with pytest.raises(ConfigError, match="Scaled overrides normalize, which rollouts do not call"):
        fit({"total_timesteps": 512}, {"agent": Scaled})


class Normed(nn.Module):
    """Body that takes no empty batch, with batch normalization, dropout, a lazy and an unused layer."""

    out_features = 8

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.unused = nn.LazyLinear(8), nn.BatchNorm1d(8), nn.Linear(1, 1)

    def forward(self, rows):
        return nn.functional.dropout(self.norm(self.linear(rows.view(len(rows), -1))), 0.5, self.training)


class NormedActorCritic(ActorCritic):
    def __init__(self, observation_spec, action_spec):
        super().__init__(action_spec, Normed)
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])


class NormedQ(QAgent):
    def __init__(self, observation_spec, action_spec):
        super().__init__(observation_spec, action_spec)
        self.actor_body, self.head = Normed(), type(self.head)(8, action_spec)
        self.save_hyperparameters(ignore=["observation_spec", "action_spec"])


class RecordsStatistics(L.Callback):
    """Callback that counts the batches in the statistics of the network around updates."""

    def __init__(self):
        self.counts = []

    def on_train_batch_start(self, trainer, module, *args):
        self.counts.append(int(module.agent.actor_body.norm.num_batches_tracked))

    on_train_batch_end = on_train_batch_start


NORMED = {
    "ppo": (PPO, {"agent": NormedActorCritic}),
    "ppg": (PPG, {"agent": NormedActorCritic, "n_iteration": 2, "num_aux_rollouts": 2}),
    "rnd": (RND, {"agent": NormedActorCritic, "num_iterations_obs_norm_init": 1}),
    "dqn": (DQN, {"agent": NormedQ, "learning_starts": 8}),
    "compiled dqn": (DQN, {"agent": NormedQ, "learning_starts": 8, "compile": True}),
    "double": (DQN, {"agent": NormedQ, "learning_starts": 8, "double": True}),
}


@pytest.mark.parametrize("name", NORMED)
def test_networks_of_users_train_in_updates_only(fit, tmp_path, name):
    algorithm, settings = NORMED[name]
    recorder = RecordsStatistics()
    # One-step episodes: no value of a final observation is needed.
    data = {"env_id": lambda: Counter(1), "num_envs": 1, "num_steps": 16, "total_timesteps": 64}
    module = fit(data, settings, ppo=algorithm, callbacks=[recorder], limit_val_batches=1)
    after, before = [0, *recorder.counts[1::2]], recorder.counts[::2]
    assert before == after[:-1]
    assert before[-1] < after[-1]
    module.trainer.save_checkpoint(tmp_path / "a.ckpt")
    observation = np.arange(64, dtype=np.float32)[:, None]
    state = {key: value.clone() for key, value in module.state_dict().items()}
    actions = module.predict(observation)
    for acting in (module, algorithm.load_from_checkpoint(tmp_path / "a.ckpt")):
        player = agent_player(acting.agent, deterministic=True)
        assert (player(observation, np.random.default_rng(1)) == actions).all()
        assert (acting.predict(observation) == actions).all()
        assert acting.predict(observation[0]) == actions[0]
    record_video(module.agent, EnvFactory(Seen, env_kwargs={"terminate_at": 3}), tmp_path / "a.gif")
    require_equal(state, module.state_dict())
    if isinstance(module, DQN):
        norms = module.agent.actor_body.norm, module.target.actor_body.norm
        assert norms[1].num_batches_tracked <= norms[0].num_batches_tracked


class Seen(Counter):
    """Counter with a picture."""

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


def require_equal(one, other):
    assert all(value.equal(other[key]) for key, value in one.items())


class Mixture(D.MixtureSameFamily):
    """Two normal distributions: no closed entropy, and samples without a gradient."""

    def __init__(self, loc, scale):
        parts = D.Independent(D.Normal(loc, scale), 1)
        super().__init__(D.Categorical(logits=torch.zeros(loc.shape[:-1])), parts)

    @property
    def deterministic_sample(self):
        return self.mean


class Widths(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_std = nn.Parameter(torch.tensor(0.0))

    def forward(self, observation):
        loc = torch.tensor([[-1.0], [1.0]]).expand(*observation.shape[:-1], 2, 1)
        return loc, self.log_std.exp().expand_as(loc)


def test_an_entropy_by_samples_without_a_gradient_has_that_of_the_density():
    body = TensorDictModule(Widths(), in_keys=["observation"], out_keys=["loc", "scale"])
    actor = ProbabilisticActor(body, in_keys=["loc", "scale"], distribution_class=Mixture)
    value = ValueOperator(nn.Linear(2, 1), in_keys=["observation"])
    agent = NetworkAgent(Unbounded((2,)), Bounded(-5, 5, (1,)), actor, value)
    entropy = agent.evaluate(torch.zeros(100_000, 2), torch.zeros(100_000, 1)).entropy.mean()
    (gradient,) = torch.autograd.grad(entropy, body.module.log_std)
    log_std, x = torch.tensor(0.0, requires_grad=True), torch.linspace(-12, 12, 20_001)
    density = sum(0.5 * D.Normal(loc, log_std.exp()).log_prob(x).exp() for loc in (-1.0, 1.0))
    exact = -torch.trapezoid(torch.xlogy(density, density), x)
    (expected,) = torch.autograd.grad(exact, log_std)
    torch.testing.assert_close(entropy, exact, atol=0.02, rtol=0)
    torch.testing.assert_close(gradient, expected, atol=0.03, rtol=0)
