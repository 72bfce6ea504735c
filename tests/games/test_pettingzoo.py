"""Games of PettingZoo: players as rows, deaths, ends, seeds, turns, and settings that do not fit."""

import functools
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces
from mpe2 import simple_spread_v3, simple_tag_v3
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.classic import connect_four_v3, rps_v2, tictactoe_v3
from pettingzoo.utils.conversions import parallel_to_aec, turn_based_aec_to_parallel

from ppo_lightning import MLPAgent, SelfPlay
from ppo_lightning.envs import EnvFactory, check_environment, make_env
from ppo_lightning.envs.conformance import random_play
from ppo_lightning.envs.rollout_checks import check_rollout, episodes_of
from ppo_lightning.errors import ConfigError
from ppo_lightning.games.pettingzoo import ParallelGamesEnv
from ppo_lightning.games.pettingzoo_atari import PettingZooAtari
from ppo_lightning.games.turn_based import TurnBasedGamesEnv
from ppo_lightning.rollouts.make_collector import make_collector
from ppo_lightning.utils.seeding import Shard

TRAINS = {"num_envs": 2, "num_steps": 8, "total_timesteps": 16}


class Mortals(ParallelEnv):
    """Players who die at fixed steps. They observe the number of the game, the step and themselves."""

    metadata = {"name": "mortals_v0"}  # noqa: RUF012
    entry = None  # of a dictionary of observations

    def __init__(self, deaths, truncates=False):
        self.names = self.possible_agents = [f"player_{i}" for i in range(len(deaths))]
        self.deaths = dict(zip(self.names, deaths, strict=True))
        self.truncates = truncates
        self.game = -1
        self.seeds = []
        self.seen = []  # by players who live or just died

    def observation_space(self, agent):
        return spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents = list(self.names)
        self.game += 1
        self.time = 0
        self.seeds.append(seed)
        return self.observe(self.agents), {agent: {} for agent in self.agents}

    def observe(self, agents):
        rows = [[self.game, self.time, self.names.index(agent)] for agent in agents]
        self.seen += rows
        return {agent: np.array(row, np.float32) for agent, row in zip(agents, rows, strict=True)}

    def step(self, actions):
        assert set(actions) == set(self.agents)  # no action of a dead player
        self.time += 1
        acted = self.agents
        over = {agent: self.time >= self.deaths[agent] for agent in acted}
        self.agents = [agent for agent in acted if not over[agent]]
        never = dict.fromkeys(acted, False)
        rewards = {agent: 1.0 + self.names.index(agent) for agent in acted}
        flags = (never, over) if self.truncates else (over, never)
        return self.observe(acted), rewards, *flags, {agent: {} for agent in acted}


class Script(AECEnv):
    """A game whose moves are forced: who moves, and the rewards of both players after the move."""

    metadata = {"name": "script_v0", "is_parallelizable": False}  # noqa: RUF012

    def __init__(self, moves, last="terminated", players=2):
        super().__init__()
        self.moves = moves
        self.last = last
        self.possible_agents = [f"player_{i}" for i in range(players)]

    def observation_space(self, agent):
        return spaces.Dict(
            observation=spaces.Box(0, 9, (2, 1), np.int8), action_mask=spaces.Box(0, 1, (3,), np.int8)
        )

    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.time = 0
        self.agent_selection = self.agents[self.moves[0][0]]
        zeros = dict.fromkeys(self.agents, 0)
        self.rewards, self._cumulative_rewards = dict(zeros), dict(zeros)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}

    def observe(self, agent):
        mask = np.array([0, int(self.time < len(self.moves)), 0], np.int8)
        view = np.array([[self.time], [self.possible_agents.index(agent)]], np.int8)
        return {"observation": view, "action_mask": mask}

    def step(self, action):
        assert action == 1
        _, rewards = self.moves[self.time]
        self.rewards = dict(zip(self.possible_agents, rewards, strict=True))
        self.time += 1
        if self.time < len(self.moves):
            self.agent_selection = self.agents[self.moves[self.time][0]]
            return
        self.agent_selection = self.agents[1 - self.moves[-1][0]]
        if self.last == "one player":
            self.terminations[self.agents[0]] = True
        else:
            flags = self.terminations if self.last == "terminated" else self.truncations
            flags.update(dict.fromkeys(self.agents, True))


def mortals(*deaths, **options):
    """Return a function that makes games in turn, and the list of the games that it made."""
    made = []

    def make():
        made.append(Mortals(deaths[len(made) % len(deaths)], **options))
        return made[-1]

    return make, made


def collect(env, num_steps, seed=1):
    torch.manual_seed(seed)
    agent = MLPAgent(*env.agent_specs, hidden_sizes=(8,))
    return make_collector(env, agent, num_steps, shard=Shard.whole(env.num_envs, seed)).rollout()


def cells(values, num_games, num_players):
    """Return one row of numbers per player, [game][player][step]."""
    return values.reshape(num_games, num_players, -1).int().tolist()


def test_players_who_die_at_different_steps_in_two_games():
    make, games = mortals((1, 3, 3), (2, 2, 4))
    env = ParallelGamesEnv(make, list(range(6)))
    rollout = collect(env, 6)
    following = rollout["next"]
    seen = rollout["observation"]
    # 10 times the game plus the step that each player sees: a dead one keeps the last observation.
    assert cells(seen[..., :2] @ torch.tensor([10.0, 1.0]), 2, 3) == [
        [[0, 1, 1, 10, 11, 11], [0, 1, 2, 10, 11, 12], [0, 1, 2, 10, 11, 12]],
        [[0, 1, 2, 2, 10, 11], [0, 1, 2, 2, 10, 11], [0, 1, 2, 3, 10, 11]],
    ]
    assert (seen[..., 2] == torch.tensor([0, 1, 2, 0, 1, 2])[:, None]).all()
    # Final observations at deaths and ends, first observations after the steps of the dead.
    assert cells(following["observation"][..., :2] @ torch.tensor([10.0, 1.0]), 2, 3) == [
        [[1, 1, 10, 11, 11, 20], [1, 2, 3, 11, 12, 13], [1, 2, 3, 11, 12, 13]],
        [[1, 2, 2, 10, 11, 12], [1, 2, 2, 10, 11, 12], [1, 2, 3, 4, 11, 12]],
    ]
    dead = [[[0, 1, 1, 0, 1, 1], [0] * 6, [0] * 6], [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0], [0] * 6]]
    ends = [
        [[1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 1], [0, 0, 1, 0, 0, 1]],
        [[0, 1, 0, 0, 0, 1], [0, 1, 0, 0, 0, 1], [0, 0, 0, 1, 0, 0]],
    ]
    assert cells(rollout["weight"] == 0, 2, 3) == dead
    assert cells(following["episode_done"], 2, 3) == ends
    assert torch.equal(following["terminated"], following["episode_done"])
    assert not following["truncated"].any()
    assert cells(following["reward"], 2, 3) == [
        [[1, 0, 0, 1, 0, 0], [2] * 6, [3] * 6],
        [[1, 1, 0, 0, 1, 1], [2, 2, 0, 0, 2, 2], [3] * 6],
    ]
    assert cells(following["step_count"], 2, 3) == [
        [[1, 0, 0, 1, 0, 0], [1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 2, 3]],
        [[1, 2, 0, 0, 1, 2], [1, 2, 0, 0, 1, 2], [1, 2, 3, 4, 1, 2]],
    ]
    # One seed per game, at the first reset only. The second game is still in its second round.
    assert [game.seeds for game in games] == [[0, None, None], [3, None]]


def test_metrics_are_means_of_each_player_whose_episode_ended(fit):
    data = {"env_id": lambda: Mortals((2, 4, 99)), "num_envs": 3, "num_steps": 8, "total_timesteps": 24}
    metrics = fit(data).trainer.callback_metrics
    for name, expected in (("", (5, 3)), ("-player0", (2, 2)), ("-player1", (8, 4))):
        keys = f"charts/episodic_return{name}", f"charts/episodic_length{name}"
        assert tuple(metrics[key] for key in keys) == expected
    assert not any("player2" in name for name in metrics)


def test_dead_players_do_not_enter_the_statistics():
    make, games = mortals((1, 3, 3), (2, 2, 4))
    env = ParallelGamesEnv(make, list(range(6)))
    agent = MLPAgent(*env.agent_specs, norm_obs=True)
    collector = make_collector(env, agent, 7, shard=Shard.whole(6, 1))
    for _ in range(3):
        collector.rollout()
        seen = np.concatenate([game.seen for game in games])
        assert agent.normalizer.count == len(seen)
        np.testing.assert_allclose(agent.normalizer.mean, seen.mean(axis=0), rtol=1e-6)


def test_a_time_limit_truncates():
    env = ParallelGamesEnv(mortals((2, 3), truncates=True)[0], [1, 2])
    following = collect(env, 3)["next"]
    assert cells(following["truncated"], 1, 2) == [[[0, 1, 0], [0, 0, 1]]]
    assert not following["terminated"].any()


def test_observations_rewards_and_seeds_are_those_of_pettingzoo():
    seeds = [11, 12, 13, 14, 15, 16]
    env = ParallelGamesEnv(simple_spread_v3.parallel_env, seeds, state=True)
    games = [simple_spread_v3.parallel_env() for _ in range(2)]
    observation = env.reset_arrays()
    expected = [game.reset(seed=seed)[0] for game, seed in zip(games, (11, 14), strict=True)]
    generator = np.random.default_rng(0)
    for step in range(26):
        for g, game in enumerate(games):
            rows = observation[3 * g : 3 * g + 3]
            np.testing.assert_array_equal(rows[:, :18], np.stack(list(expected[g].values())))
            np.testing.assert_array_equal(rows[:, 18:], np.tile(game.state(), (3, 1)))
        if step == 25:
            break
        action = generator.integers(0, 5, 6)
        observation, reward, terminated, truncated, _ = env.step_arrays(action)
        for g, game in enumerate(games):
            chosen = dict(zip(game.agents, action[3 * g : 3 * g + 3].tolist(), strict=True))
            expected[g], rewards, *_ = game.step(chosen)
            np.testing.assert_array_equal(reward[3 * g : 3 * g + 3], list(rewards.values()))
        assert not terminated.any()
        assert truncated.tolist() == [step == 24] * 6
    # Later resets continue the random numbers of the game.
    fresh = env.reset_arrays(truncated)
    np.testing.assert_array_equal(fresh[3:, :18], np.stack(list(games[1].reset()[0].values())))


def test_only_the_critic_reads_the_state():
    env = make_env("mpe2/simple_spread_v3", 3, "pettingzoo", env_kwargs={"state": True})
    agent = MLPAgent(*env.agent_specs)
    observation = torch.from_numpy(env.reset_arrays())
    other = observation.clone()
    other[:, 18:] += 1
    assert torch.equal(agent.explain(observation)[0], agent.explain(other)[0])
    assert not torch.equal(agent.value(observation), agent.value(other))


def test_continuous_actions_and_options_of_the_game():
    options = {"continuous_actions": True, "N": 2, "max_cycles": 3}
    env = make_env("mpe2/simple_spread_v3", 4, "pettingzoo", env_kwargs=options)
    assert env.num_players == 2
    assert env.spaces[1].shape == (5,)
    rollout = collect(env, 6)
    assert rollout["next", "truncated"].squeeze(-1).sum(1).tolist() == [2] * 4


@pytest.mark.parametrize(
    ("env_id", "kind"),
    [
        ("pettingzoo/classic/connect_four_v3", TurnBasedGamesEnv),
        ("pettingzoo.classic.connect_four_v3", TurnBasedGamesEnv),
        ("classic/connect_four-v3", TurnBasedGamesEnv),
        ("connect_four_v3", TurnBasedGamesEnv),
        (connect_four_v3, TurnBasedGamesEnv),
        ("rps_v2", ParallelGamesEnv),
        ("mpe2.simple_spread_v3", ParallelGamesEnv),
        ("pong_v3", PettingZooAtari),
        ("atari/pong-v3", PettingZooAtari),
        ("pettingzoo.atari.pong_v3", PettingZooAtari),
    ],
)
def test_ids_as_pettingzoo_cleanrl_and_python_write_them(env_id, kind):
    assert type(make_env(env_id, 6, "pettingzoo").arrays) is kind


def test_a_dotted_path_trains(fit):
    data = TRAINS | {"env_id": "pettingzoo.classic.tictactoe_v3"}
    with pytest.raises(ConfigError, match="env_id must be callable"):
        fit(data)
    module = fit(data | {"backend": "pettingzoo"}, {"rating_games": 0}, ppo=SelfPlay)
    assert module.env_steps == 16


def test_functions_make_games_with_the_default_backend():
    assert isinstance(make_env(simple_spread_v3.parallel_env, 3).arrays, ParallelGamesEnv)
    assert isinstance(make_env(connect_four_v3.env, 3).arrays, TurnBasedGamesEnv)


def test_evaluation_completes_the_last_game():
    env = EnvFactory("mpe2/simple_spread_v3", "pettingzoo").make(4, stream="eval")
    assert env.num_envs == 6
    assert len(np.unique(env.reset_arrays(), axis=0)) == 6


@pytest.mark.parametrize("winner", [0, 1])
def test_the_loser_of_a_turn_based_game_sees_the_defeat(winner):
    """A hand-computed game: the last move decides, and one player moves twice in a row."""
    rewards = (1, -1) if winner == 0 else (-1, 1)
    moves = [(0, (0, 0)), (1, (0, 0)), (1, (0, 0)), (0, rewards)]
    env = TurnBasedGamesEnv(lambda: Script(moves), [1])
    rollout = collect(env, 8)
    following = rollout["next"]
    assert rollout["player"].flatten().tolist() == [0, 1, 1, 0] * 2
    assert rollout["observation"][0, :, -1].tolist() == [0, 1, 1, 0] * 2  # seen by the player to move
    assert following["terminated"].flatten().tolist() == [False, False, False, True] * 2
    final = rewards[0]
    assert following["reward"].flatten().tolist() == [0, 0, 0, final] * 2
    # The next value is that of the opponent, except after the first of two moves of one player.
    cases = [
        (1.0, 1.0, 0.0, [final, -final, -final, final]),
        (0.5, 1.0, 0.0, [0.125 * final, -0.25 * final, -0.5 * final, final]),
        (1.0, 0.0, 0.5, [-1, 0, -1, final - 0.5]),
    ]
    for gamma, gae_lambda, value, advantages in cases:
        module = SelfPlay(gamma=gamma, gae_lambda=gae_lambda)
        module.agent = MLPAgent(*env.agent_specs)
        rollout["state_value"].fill_(value)
        assert module.advantages(rollout)["advantage"].flatten().tolist() == advantages * 2
    assert following["episode_reward"].flatten().tolist()[3::4] == [final] * 2


def test_rewards_of_random_openings_enter_no_return():
    env = TurnBasedGamesEnv(lambda: Script([(0, (1, -1)), (0, (1, -1)), (0, (0, 0))]), [1], opening_moves=2)
    rollout = collect(env, 60)
    over = rollout["next", "episode_done"].flatten()
    lengths, returns = (rollout["next", name].flatten()[over] for name in ("step_count", "episode_reward"))
    assert set(lengths.tolist()) == {1, 2, 3}
    assert torch.equal(returns, lengths - 1), "one for each move but the last"


def test_a_truncated_turn_based_game_has_a_usable_mask():
    env = TurnBasedGamesEnv(lambda: Script([(0, (0, 0))], last="truncated"), [1])
    env.reset_arrays()
    observation, _, terminated, truncated, _ = env.step_arrays(np.array([1]))
    assert (terminated.tolist(), truncated.tolist()) == ([False], [True])
    assert observation[0].tolist() == [1, 1, 1, 1, 1]
    assert env.mover.tolist() == [1]
    assert env.reset_arrays(truncated)[0].tolist() == [0, 1, 0, 0, 0]
    assert env.mover.tolist() == [0]


@pytest.mark.parametrize(
    ("moves", "last", "message"),
    [
        ([(0, (1, 0))], "terminated", "must sum to 0"),
        ([(0, (0, 0))], "one player", r"terminated \[True, False\]"),
    ],
)
def test_turn_based_games_are_zero_sum_and_end_for_both(moves, last, message):
    env = TurnBasedGamesEnv(lambda: Script(moves, last), [1])
    env.reset_arrays()
    with pytest.raises(ConfigError, match=message):
        env.step_arrays(np.array([1]))


def test_rewards_that_round_to_a_sum_of_zero_are_zero_sum():
    env = TurnBasedGamesEnv(lambda: Script([(0, (0.3, -0.1 - 0.2))]), [1])
    env.reset_arrays()
    assert env.step_arrays(np.array([1]))[1] == pytest.approx([0.3])


class Kept(Mortals):
    """Game that lists its dead players, too."""

    def step(self, actions):
        dead = [agent for agent in self.possible_agents if self.time >= self.deaths[agent]]
        self.agents = [agent for agent in self.agents if agent not in dead]
        observations, rewards, terminated, truncated, infos = super().step(
            {agent: actions[agent] for agent in self.agents}
        )
        if self.agents:
            self.agents = list(self.possible_agents)
        return observations, rewards, terminated | dict.fromkeys(dead, True), truncated, infos


def test_a_dead_player_that_a_game_lists_stays_dead():
    games = (ParallelGamesEnv(functools.partial(kind, (2, 5)), [1, 2]) for kind in (Mortals, Kept))
    torch.testing.assert_close(*(collect(env, 12).to_dict() for env in games), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["possible_agents", "metadata"])
def test_a_game_trains_without_an_optional_part(fit, name):
    def make():
        game = Mortals((8, 8))
        setattr(game, name, None)
        return game

    assert fit(TRAINS | {"env_id": make}).env_steps == 16


@pytest.mark.parametrize("part", [1, 2, 3])
def test_a_part_that_misses_a_player_is_named(fit, part):
    class Missing(Mortals):
        def step(self, actions):
            parts = list(super().step(actions))
            parts[part] = {}
            return tuple(parts)

    with pytest.raises(ConfigError, match="the player 'player_0' left the game without"):
        fit(TRAINS | {"env_id": lambda: Missing((8, 8))})


class Stateless(Mortals):
    state_space = None


class Unmasked(Script):
    def observation_space(self, agent):
        return super().observation_space(agent)["observation"]


@pytest.mark.parametrize(
    ("make", "num_envs", "options", "message"),
    [
        (simple_spread_v3.parallel_env, 4, {}, r"batch size \[6\].* a multiple of the 3 players"),
        (simple_tag_v3.parallel_env, 4, {}, "different spaces.*'adversary_0'.*'agent_0'"),
        (lambda: turn_based_aec_to_parallel(connect_four_v3.env()), 2, {}, "turn-based game.*AECEnv"),
        (lambda: Script([(0, (0, 0, 0))], players=3), 2, {}, "3 players"),
        (lambda: Unmasked([(0, (0, 0))]), 2, {}, "'action_mask'"),
        (lambda: Mortals((1, 2)), 2, {"state": True}, "has no state"),
        (lambda: Stateless((1, 2)), 2, {"state": True}, "has no state"),
        (tictactoe_v3.env, 2, {"state": True}, "state is not an option of"),
        ("mpe2/simple_spread_v9", 3, {}, "cannot be imported"),
        ("mpe2/simple_spread_v3", 3, {"agents": 3}, "does not fit"),
        ("json/tool", 3, {}, "without parallel_env"),
        (dict, 3, {}, "makes a dict"),
    ],
)
def test_wrong_settings(make, num_envs, options, message):
    with pytest.raises(ConfigError, match=message):
        make_env(make, num_envs, "pettingzoo", env_kwargs=options)


@pytest.mark.parametrize("make", [rps_v2.env, lambda: parallel_to_aec(Mortals((1, 2)))])
def test_an_aec_env_whose_players_act_at_once_is_parallel(make):
    env = make_env(make, 2, "pettingzoo")
    assert isinstance(env.arrays, ParallelGamesEnv)
    assert collect(env, 20)["next", "done"].any()


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpe2", None)
    with pytest.raises(ConfigError, match=r"ppo-lightning\[selfplay\]"):
        make_env("mpe2/simple_spread_v3", 3, "pettingzoo")


class SharedView(Mortals):
    """All players see the same, and the first observations of later games differ."""

    def observe(self, agents):
        return dict.fromkeys(agents, np.array([self.game, self.time, 0], np.float32))


class Walk(Mortals):
    """All players walk away from a random place."""

    def reset(self, seed=None, options=None):
        self.place = np.random.default_rng(self.game if seed is None else seed).normal(size=3)
        return super().reset(seed, options)

    def observe(self, agents):
        return dict.fromkeys(agents, (self.place + 5 * self.time).astype(np.float32))


@pytest.mark.parametrize(("game", "deaths", "rows"), [(SharedView, (4, 7), 2), (Walk, (4, 7, 7), 6)])
def test_the_checks_find_nothing_in_players_of_one_game(game, deaths, rows):
    """The players of a game share its first observation, and the dead repeat their last one."""
    env = ParallelGamesEnv(lambda: game(deaths), list(range(rows)))
    assert [*check_rollout(collect(env, 70), env)] == []


@pytest.mark.parametrize("by_collector", [True, False])
def test_episodes_of_a_recording_leave_out_the_steps_of_the_dead(by_collector):
    env = ParallelGamesEnv(mortals((1, 3, 3), (2, 2, 4))[0], list(range(6)))
    rollout = collect(env, 6) if by_collector else random_play(env, 6)
    assert rollout["player"][:, 0].flatten().tolist() == [0, 1, 2] * 2
    rows, start, end = episodes_of(rollout)
    assert rows.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert start.tolist() == [0, 3] * 3 + [0, 4] * 2 + [0]
    length = end - start + 1
    assert length.tolist() == [1, 1, 3, 3, 3, 3, 2, 2, 2, 2, 4]
    assert rollout["next", "observation"][rows, end, 1].tolist() == length.tolist()


@pytest.mark.parametrize(
    ("env_id", "sizes"),
    [
        ("mpe2/simple_spread_v3", (6, 200)),
        ("pettingzoo/classic/connect_four_v3", (6, 200)),
        ("atari/pong_v3", (2, 60)),
    ],
)
def test_check_env_finds_no_error(env_id, sizes):
    findings = check_environment(EnvFactory(env_id, "pettingzoo"), *sizes, seconds=2).findings
    assert [str(finding) for finding in findings if finding.severity != "note"] == []
