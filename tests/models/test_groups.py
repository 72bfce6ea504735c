"""Groups of players with separate parameters."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from mpe2 import simple_tag_v3

from ppo_lightning import MLPAgent
from ppo_lightning.envs import make_env
from ppo_lightning.envs.groups import PlayerGroups
from ppo_lightning.envs.pettingzoo import ParallelGamesEnv
from ppo_lightning.errors import ConfigError
from ppo_lightning.models.groups import GroupAgent

TAG = {"adversaries": ["adversary_0", "adversary_1", "adversary_2"], "good": ["agent_0"]}


def tag(**options):
    return make_env("mpe2/simple_tag_v3", 8, "pettingzoo", env_kwargs={"group_map": TAG, **options})


def group_parameters(agent, group):
    """Return the parameters of a group: its bodies, and its columns of the last layers."""
    bodies = [agent.actor_body.bodies[group], agent.critic_body.bodies[group]]
    last = [linear.weight.chunk(2, dim=1)[group] for linear in (agent.head.linear, agent.critic)]
    return [parameter for body in bodies for parameter in body.parameters()], last


def test_rows_are_those_of_pettingzoo_with_group_and_padding():
    env = ParallelGamesEnv(simple_tag_v3.parallel_env, list(range(8)), group_map=TAG)
    rows = env.reset_arrays()
    assert rows[:, 0].tolist() == [0, 0, 0, 1] * 2
    for g, seed in enumerate((0, 4)):
        observations, _ = simple_tag_v3.parallel_env().reset(seed=seed)
        for row, observation in zip(rows[4 * g :, 1:], observations.values(), strict=False):
            assert row.tolist() == [*observation.tolist(), *[0] * (16 - len(observation))]


def test_groups_share_no_parameters():
    torch.manual_seed(1)
    env = tag()
    agent = GroupAgent(*env.agent_specs, hidden_sizes=(8,))
    rows = torch.from_numpy(env.reset_arrays()).clone()
    noise = agent.noise((8,))
    action, log_prob, value, _ = agent.act(rows, noise)
    before = agent.evaluate(rows, action)
    torch.testing.assert_close(before.log_prob, log_prob)
    torch.testing.assert_close(before.value, value)
    good = rows[:, 0] == 1
    loss = (before.log_prob + before.entropy + before.value)[good].sum()
    loss.backward()
    for group, expected in ((0, False), (1, True)):
        bodies, _ = group_parameters(agent, group)
        assert all(bool(parameter.grad.any()) is expected for parameter in bodies)
        for linear in (agent.head.linear, agent.critic):
            gradient = linear.weight.grad.chunk(2, dim=1)[group]
            assert bool(gradient.any()) is expected
            assert bool(gradient[:, -1].any()) is expected  # of the bias
    owned = [parameter for group in (0, 1) for parameter in group_parameters(agent, group)[0]]
    expected = {id(parameter) for parameter in [*owned, agent.head.linear.weight, agent.critic.weight]}
    assert {id(parameter) for parameter in agent.parameters()} == expected
    with torch.no_grad():
        for parameter in [*group_parameters(agent, 1)[0], *group_parameters(agent, 1)[1]]:
            parameter += 0.5
    after = agent.evaluate(rows, action)
    assert torch.equal(after.log_prob[~good], before.log_prob[~good])
    assert torch.equal(after.value[~good], before.value[~good])
    assert (after.log_prob[good] != before.log_prob[good]).all()
    assert (after.value[good] != before.value[good]).all()


def test_the_first_policies_are_nearly_uniform_in_each_group():
    agent = GroupAgent(*tag().agent_specs)
    for block in agent.head.linear.weight.chunk(2, dim=1):
        torch.testing.assert_close(block[:, :-1] @ block[:, :-1].T, 1e-4 * torch.eye(5))
        assert not block[:, -1].any()
    for block in agent.critic.weight.chunk(2, dim=1):
        torch.testing.assert_close(block.norm(), torch.tensor(1.0))


def test_only_the_critic_reads_the_state():
    env = tag(state=True)
    agent = GroupAgent(*env.agent_specs)
    rows = torch.from_numpy(env.reset_arrays())
    other = rows.clone()
    other[:, 17:] += 1
    assert torch.equal(agent.explain(rows)[1], agent.explain(other)[1])
    assert not torch.equal(agent.value(rows), agent.value(other))


@pytest.mark.parametrize("agent", [GroupAgent, MLPAgent])
def test_an_iteration_of_ppo(agent, fit):
    data = {
        "env_id": "mpe2/simple_tag_v3",
        "backend": "pettingzoo",
        "env_kwargs": {"group_map": TAG},
        "num_envs": 8,
        "num_steps": 32,
        "total_timesteps": 512,
    }
    module = fit(data, {"agent": agent})
    assert module.env_steps == 512
    assert all(parameter.isfinite().all() for parameter in module.parameters())


class TwoKinds:
    """The part of a game that groups read: players with different spaces."""

    possible_agents = ("big", "small")

    def observation_space(self, player):
        return spaces.Box(-1, 1, (3 if player == "big" else 2,), np.float32)

    def action_space(self, player):
        return spaces.Discrete(4 if player == "big" else 2)


def test_a_mask_forbids_the_actions_of_other_groups():
    groups = PlayerGroups(TwoKinds(), {"a": ["big"], "b": ["small"]}, "kinds")
    assert groups.actions.n == 4
    assert list(groups.space) == ["action_mask", "group", "observation"]
    small = groups.pad("small", np.ones(2, np.float32))
    assert small["action_mask"].tolist() == [1, 1, 0, 0]
    assert small["observation"].tolist() == [1, 1, 0]
    assert groups.pad("big", np.ones(3))["action_mask"].all()


@pytest.mark.parametrize(
    ("group_map", "message"),
    [
        ({"a": ["big"]}, "each must be in one group"),
        ({"a": ["big", "small"], "b": ["small"]}, "each must be in one group"),
        ({"a": ["big", "small"]}, "'big' and 'small' share a group and have different spaces"),
    ],
)
def test_wrong_groups(group_map, message):
    with pytest.raises(ConfigError, match=message):
        PlayerGroups(TwoKinds(), group_map, "kinds")


def test_an_observation_without_groups_is_refused():
    env = make_env("mpe2/simple_spread_v3", 3, "pettingzoo")
    with pytest.raises(ConfigError, match=r"data\.env_kwargs\.group_map"):
        GroupAgent(*env.agent_specs)
