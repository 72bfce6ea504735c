"""Past selves in training games: which rows they play, what they play, and how results are counted."""

import itertools

import numpy as np
import pytest
import torch

from ppo_lightning import MLPAgent, make_env
from ppo_lightning.rollouts import RolloutCollector
from ppo_lightning.rollouts.opponents import Opponents, Snapshot
from ppo_lightning.utils.seeding import Shard

COLUMN = 2  # of the agent; the snapshot prefers column 5


def stacking_agent(env, column):
    """Return an agent that drops its stones into one column with near certainty."""
    agent = MLPAgent(*env.agent_specs, hidden_sizes=(4,))
    with torch.no_grad():
        agent.head.linear.weight.zero_()
        agent.head.linear.bias.fill_(-20.0)
        agent.head.linear.bias[column] = 20.0
    return agent


def weights_of(agent):
    return {name: tensor.clone() for name, tensor in agent.state_dict().items()}


def collect(num_envs=10, share=1.0, num_rollouts=1, pool=None, opening_moves=0):
    """Play Connect Four, where the agent drops into column 2 and its snapshot into column 5."""
    env = make_env("ConnectFour-v1", num_envs, backend="envpool", seed=1)
    agent = stacking_agent(env, COLUMN)
    if pool is None:
        pool = [Snapshot(100, weights_of(stacking_agent(env, 5)))]
    opponents = Opponents(agent, pool, share, opening_moves, num_envs, 2, turn_based=True, seed=1)
    collector = RolloutCollector(
        env, agent, num_steps=32, shard=Shard.whole(num_envs, seed=1), opponents=opponents
    )
    rollouts = [collector.rollout().clone() for _ in range(num_rollouts)]
    env.close()
    return rollouts, opponents


def test_snapshots_act_in_their_rows_with_weight_0():
    (rollout,), _ = collect()
    skipped = (rollout["next", "done"] & (rollout["next", "step_count"] == 0)).squeeze(-1)
    valid = rollout["valid"]
    legal = rollout["observation"][..., :7] > 0
    free = legal[..., COLUMN] & legal[..., 5]
    assert (rollout["action"][valid & free] == COLUMN).all()
    assert (rollout["action"][~valid & ~skipped & free] == 5).all()
    assert (~valid & ~skipped).sum() > 100


def test_the_agent_keeps_its_side_in_a_game_and_has_both_sides():
    rollouts, _ = collect(num_envs=16, num_rollouts=3)
    sides = set()
    for rollout in rollouts:
        for game in rollout:
            ends = game["next", "episode_done"].squeeze(-1).nonzero().squeeze(-1).tolist()
            for start, end in zip([-1, *ends[:-1]], ends, strict=True):
                steps = slice(start + 1, end + 1)
                players = game["player"][steps, 0][game["valid"][steps]].unique().tolist()
                assert len(players) <= 1
                sides.update(players)
    assert sides == {0, 1}


@pytest.mark.parametrize(("share", "games"), [(0.2, 2), (0.5, 5), (0.0, 0), (0.15, 1)])
def test_a_share_of_the_games_is_played_against_snapshots(share, games):
    (rollout,), _ = collect(share=share)
    skipped = (rollout["next", "done"] & (rollout["next", "step_count"] == 0)).squeeze(-1)
    assert (~rollout["valid"] & ~skipped).any(1).sum() == games


def test_without_snapshots_the_agent_plays_all_games():
    (rollout,), opponents = collect(pool=[])
    skipped = (rollout["next", "done"] & (rollout["next", "step_count"] == 0)).squeeze(-1)
    assert torch.equal(rollout["valid"], ~skipped)
    assert not opponents.take_results()


def test_results_are_counted_from_the_agents_view():
    """The player who moves first completes a column of four first."""
    (rollout,), opponents = collect()
    results = opponents.take_results()
    expected = {"win": 0, "loss": 0}
    for game in rollout:
        start = 0
        for end in game["next", "episode_done"].squeeze(-1).nonzero().squeeze(-1).tolist():
            agent_won = game["valid"][end].item()  # the last stone wins
            expected["win" if agent_won else "loss"] += 1
            start = end + 1
        assert start
    assert {outcome: count for (_, outcome), count in results.items()} == expected
    assert {step for step, _ in results} == {100}
    assert not opponents.take_results()


def test_half_of_the_draws_are_the_latest_snapshot():
    env = make_env("ConnectFour-v1", 2, backend="envpool", seed=1)
    agent = stacking_agent(env, COLUMN)
    pool = [Snapshot(step, weights_of(agent)) for step in range(10)]
    opponents = Opponents(agent, pool, 1.0, 0, 2, 2, turn_based=True, seed=1)
    drawn = []
    for _ in range(400):
        opponents.draw(1)
        drawn.append(opponents._next_opponent)
    counts = np.bincount(drawn, minlength=10)
    assert 0.45 < counts[9] / 400 < 0.66  # 0.55: a half, and a tenth of the other half
    assert (counts > 0).all()
    env.close()


def test_ranks_play_the_games_of_one_rank():
    def rollout(num_envs, first_env):
        env = make_env("TicTacToe-v1", num_envs, backend="envpool", seed=1, first_env=first_env)
        torch.manual_seed(1)
        agent, past = (MLPAgent(*env.agent_specs, hidden_sizes=(8,)) for _ in range(2))
        rows = {"first_env": first_env, "total_envs": 8}
        pool = [Snapshot(100, weights_of(past))]
        opponents = Opponents(agent, pool, 0.5, 3, num_envs, 2, turn_based=True, seed=1, **rows)
        collector = RolloutCollector(
            env, agent, num_steps=16, shard=Shard(1, first_env, num_envs, 8), opponents=opponents
        )
        collected = collector.rollout()
        env.close()
        return collected, opponents.take_results()

    whole, results = rollout(8, 0)
    first, first_results = rollout(4, 0)
    second, second_results = rollout(4, 4)
    for key in ("action", "valid", "player", ("next", "reward")):
        assert torch.equal(whole[key], torch.cat([first[key], second[key]])), key
    assert first_results + second_results == results
    assert results


def test_openings_are_random_legal_moves_with_weight_0():
    rollouts, _ = collect(num_envs=16, share=0.0, num_rollouts=4, opening_moves=4)
    lengths, moves = [], []
    for rollout in rollouts:
        for game in rollout:
            ends = game["next", "episode_done"].squeeze(-1).nonzero().squeeze(-1).tolist()
            for start, end in itertools.pairwise(ends):
                steps = slice(start + 2, end + 1)  # without the reset
                valid = game["valid"][steps]
                opening = int(valid.int().argmax())
                assert valid[opening:].all()
                legal = game["observation"][steps, COLUMN] > 0
                assert (game["action"][steps][opening:] == COLUMN)[legal[opening:]].all()
                assert (
                    game["observation"][steps][:opening]
                    .gather(1, game["action"][steps][:opening, None])
                    .all()
                )
                lengths.append(opening)
                moves += game["action"][steps][:opening].tolist()
    assert set(lengths) == {0, 1, 2, 3, 4}
    assert set(moves) == set(range(7))
