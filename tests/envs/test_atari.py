"""Atari: one preprocessing, two backends. Details 14 to 22."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torchrl.data import Bounded, Categorical
from torchrl.envs import RewardClipping

from ppo_lightning import CNNAgent, ConfigError, make_env
from ppo_lightning.envs.torchrl import TorchRLEnv
from ppo_lightning.rollouts.collector import RolloutCollector
from ppo_lightning.utils.threads import processors
from tests.helpers import RecordedPPO

BACKENDS = ["envpool", "gymnasium"]
NOTHING_RANDOM = {"noop_max": 0, "episodic_life": False}


def play(env, steps, seed=0):
    """Play random actions and return copies of the results of each step."""
    rng, played = np.random.default_rng(seed), [np.array(env.reset_arrays())]
    for _ in range(steps):
        action = rng.integers(0, env.action_spec_unbatched.space.n, env.num_envs)
        out = [np.array(result) for result in env.step_arrays(action)]
        done = out[2] | out[3]
        played += [*out, np.array(env.lives)]
        if done.any():
            played.append(np.array(env.reset_arrays(done)))
    return played


@pytest.mark.detail("18")
@pytest.mark.detail("20")
@pytest.mark.parametrize("options", [{}, {"frame_stack": 2}, {"frame_skip": 2}])
@pytest.mark.parametrize("game", ["Breakout", "Pong"])
def test_the_same_actions_give_the_same_games_on_all_backends(env, game, options):
    """Pictures, rewards, ends and lives of several games are equal, to the bit."""
    batches = [env(f"ALE/{game}-v5", 2, b, env_kwargs=NOTHING_RANDOM | options) for b in BACKENDS]
    assert all(type(batch) is TorchRLEnv for batch in batches), "TorchRL wraps nothing around it"
    first, other = (play(batch, 300) for batch in batches)
    frames = options.get("frame_stack", 4)
    assert first[0].shape == (2, frames, 84, 84) and first[0].dtype == np.uint8
    np.testing.assert_array_equal(first[0], np.repeat(first[0][:, -1:], frames, axis=1))
    assert len(first) > 1 + 6 * 300 or game == "Pong", "games ended"
    for one, two in zip(first, other, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.detail("14")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_game_begins_with_up_to_noop_max_frames(env, backend):
    """In Freeway, cars move from the first frame on."""
    first, again = (env("ALE/Freeway-v5", 6, backend, seed=3).reset_arrays().copy() for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(first[:, -1].reshape(6, -1), axis=0)) > 1
    still = env("ALE/Freeway-v5", 6, backend, seed=3, env_kwargs={"noop_max": 0}).reset_arrays()
    assert len(np.unique(still[:, -1].reshape(6, -1), axis=0)) == 1


def lose_a_life(env):
    """Wait until a life is lost; return the pictures up to the lost life and the flags of that step."""
    pictures, lives = [np.array(env.reset_arrays())], env.lives[0]
    while env.lives[0] == lives:
        assert len(pictures) < 200
        observation, _, terminated, truncated, _ = env.step_arrays(np.zeros(env.num_envs, np.int64))
        pictures.append(observation.copy())
    return pictures, terminated, truncated


@pytest.mark.detail("16")
@pytest.mark.detail("17")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lost_life_cuts_learning_and_not_the_game(env, backend):
    game = env("ALE/Breakout-v5", 1, backend)
    (*_, before, observation), terminated, truncated = lose_a_life(game)
    assert terminated[0] and not truncated[0] and not game.over[0]
    assert game.lives[0] == 4
    np.testing.assert_array_equal(observation[0, :-1], before[0, 1:])
    following = np.array(game.reset_arrays(terminated))
    assert game.lives[0] == 4, "the game goes on"
    ball = slice(38, 75), slice(8, 76)  # below the bricks, above the paddle
    flying = []
    for _ in range(5):
        observation, _, terminated, *_ = game.step_arrays(np.zeros(1, np.int64))
        flying.append(int(observation[0, -1][ball].max()) > 0)
        assert not terminated[0] and game.lives[0] == 4
    assert any(flying), "FIRE was pressed"
    assert all((picture == following[0, -1]).all() for picture in following[0])
    game = env("ALE/Breakout-v5", 1, backend, env_kwargs={"episodic_life": False})
    game.reset_arrays()
    while game.lives[0] != 4:
        _, _, terminated, *_ = game.step_arrays(np.full(1, 1))
        assert not terminated[0]


@pytest.mark.detail("16")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_time_limit_at_a_lost_life_is_no_terminal_state(env, backend):
    options = {"noop_max": 0}
    pictures, *_ = lose_a_life(env("ALE/Breakout-v5", 1, backend, env_kwargs=options))
    options["max_episode_frames"] = 4 * (len(pictures) - 1)
    game = env("ALE/Breakout-v5", 1, backend, env_kwargs=options)
    _, terminated, truncated = lose_a_life(game)
    assert truncated[0] and not terminated[0] and game.over[0]


class Presses(CNNAgent):
    """Agent that always presses one button."""

    button = 1

    def array_policy(self):
        def policy(observation, noise, memory):
            count = len(observation)
            return np.full(count, self.button), np.zeros(count, np.float32), np.zeros((count, 1), np.float32)

        return policy


@pytest.mark.detail("16")
@pytest.mark.detail("19")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rollout_learns_from_lives_and_signs_and_reports_whole_games(env, backend):
    batch = env("ALE/Breakout-v5", 2, backend, seed=2)
    rollout = RolloutCollector(batch, Presses(*batch.agent_specs), 300).rollout()
    following = rollout["next"]
    done, over = following["done"], following["episode_done"]
    assert rollout["observation"].dtype == following["observation"].dtype == torch.uint8
    assert 0 < over.sum() < done.sum()
    assert (done | ~over).all(), "a game's end cuts learning too"
    assert set(following["reward"].unique().tolist()) <= {-1.0, 0.0, 1.0}
    totals = following["episode_reward"]
    for row in range(2):
        for end in done[row, :-1, 0].nonzero().flatten().tolist():
            again = totals[row, end + 1] < totals[row, end] or following["step_count"][row, end + 1] == 1
            assert again == bool(over[row, end]), "the sums go on where the game does"
    inside = ~done[:, :-1, 0]
    assert torch.equal(rollout["observation"][:, 1:][inside], following["observation"][:, :-1][inside])
    raw = env("ALE/Breakout-v5", 2, backend, env_kwargs={"clip_reward": False})
    assert raw.learning_reward(np.array([7.0, -3.0])).tolist() == [7.0, -3.0]
    assert batch.learning_reward(np.array([7.0, -3.0])).tolist() == [1.0, -1.0]


@pytest.mark.detail("15")
@pytest.mark.parametrize(("frames", "steps"), [(80, 20), (3, 1)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_game_is_truncated_after_max_episode_frames(env, backend, frames, steps):
    """80 frames are 20 steps of 4. An episode has one step at least."""
    options = {"noop_max": 0, "frame_skip": 4, "max_episode_frames": frames}
    batch = env("ALE/Pong-v5", 1, backend, env_kwargs=options)
    batch.reset_arrays()
    ends = [bool(batch.step_arrays(np.zeros(1, np.int64))[3][0]) for _ in range(steps)]
    assert ends == [False] * (steps - 1) + [True]


@pytest.mark.detail("15")
@pytest.mark.parametrize("option", [{"frame_skip": 2}, {"repeat_action_probability": 0.5}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_options_of_atari_games_have_their_effect(env, backend, option):
    plain, other = (
        env("ALE/Pong-v5", 1, backend, env_kwargs=NOTHING_RANDOM | options) for options in ({}, option)
    )
    assert plain.action_spec_unbatched.space.n == 6
    assert not np.array_equal(play(plain, 40)[-6], play(other, 40)[-6])


@pytest.mark.detail("19")
def test_the_agent_learns_from_signs_where_the_game_gives_more(env):
    batch = env("ALE/MsPacman-v5", 1, "envpool")
    following = RolloutCollector(batch, CNNAgent(*batch.agent_specs), 150).rollout()["next"]
    assert set(following["reward"].unique().tolist()) == {0.0, 1.0}
    assert following["episode_reward"].max() >= 10, "ten a dot"


@pytest.mark.parametrize("backend", BACKENDS)
def test_through_torchrl_lives_go_down_one_by_one_with_a_single_environment(env, backend):
    batch = env("ALE/Breakout-v5", 1, backend)
    lives = []

    def fire(tensordict):
        lives.append(int(batch.lives[0]))
        return tensordict.set("action", torch.ones(1, dtype=torch.int64))

    batch.rollout(150, policy=fire, break_when_any_done=False)
    assert [a for a, b in pairwise([*lives, -1]) if a != b][:4] == [5, 4, 3, 2]


@pytest.mark.parametrize(
    ("env_id", "game"),
    [
        ("BreakoutNoFrameskip-v4", "Breakout"),
        ("Breakout-v5", "Breakout"),
        ("ALE/breakout-v5", "Breakout"),
        ("ALE/TicTacToe3D-v5", "TicTacToe3D"),
        ("ALE/MsPacman-v5", "MsPacman"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_of_games(env, env_id, game, backend):
    batch = env(env_id, 1, backend)
    assert batch.game == game
    assert batch.reset_arrays().shape == (1, 4, 84, 84)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"env_id": "ALE/Brekout-v5"}, "is not an Atari game: did you mean ALE/Breakout-v5"),
        ({"noop_max": "abc"}, "noop_max is 'abc': it must be at least 0"),
        ({"continuous": True}, "continuous is not an option of .*: they are noop_max, frame_skip"),
        ({"fire_rest": True}, "fire_rest is not an option of .*: did you mean fire_reset"),
        ({"fire_reset": "maybe"}, "fire_reset is 'maybe': it must be true or false"),
        ({"frame_stack": 0}, "frame_stack is 0: it must be at least 1"),
        ({"frame_skip": 2.5}, "frame_skip is 2.5: it must be an integer"),
        ({"repeat_action_probability": 1.5}, "repeat_action_probability is 1.5: it must be between 0 and 1"),
    ],
)
def test_wrong_ids_and_options(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_env(options.pop("env_id", "ALE/Pong-v5"), 1, "envpool", env_kwargs=options)


def test_transforms_are_refused(fit):
    with pytest.raises(ConfigError, match="transforms do not work with Atari"):
        fit({"env_id": "ALE/Pong-v5", "transforms": [RewardClipping(-1, 1)]})


@pytest.mark.parametrize(("ranks", "asked"), [(1, 0), (2, 0), (2, 3), (64, 0)])
@pytest.mark.parametrize("env_id", ["ALE/Pong-v5", "Pendulum-v1", "TicTacToe-v1"])
def test_ranks_of_a_machine_share_the_cores(env, monkeypatch, env_id, ranks, asked):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    batch = env(env_id, 4, "envpool", env_kwargs={"num_threads": asked})
    share = 0 if ranks == 1 else max(1, processors() // ranks)  # EnvPool replaces 0 by all cores
    assert batch.envs.config["num_threads"] == min(asked or share, 4)


# Networks


class Watched(CNNAgent):
    """Recorder of the precision of each layer while acting and while learning."""

    def __init__(self, *specs):
        super().__init__(*specs)
        self.seen = {"acting": set(), "learning": set()}
        for name, part in (("body", self.actor_body), ("head", self.head.linear), ("critic", self.critic)):
            part.register_forward_hook(partial(self.keep, name))

    def keep(self, name, module, inputs, out):
        if not torch.compiler.is_compiling():
            self.seen["acting" if torch.is_inference_mode_enabled() else "learning"].add((name, out.dtype))


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.integration)])
def test_bf16_is_for_the_body_alone_and_the_same_in_acting_and_learning(fit, compile):
    data = {"env_id": "ALE/Breakout-v5", "backend": "envpool", "num_envs": 2, "num_steps": 16}
    model = {"agent": Watched, "num_minibatches": 2, "update_epochs": 1, "compile": compile}
    module = fit(data | {"total_timesteps": 96}, model, ppo=RecordedPPO, precision="bf16-mixed")
    expected = {("body", torch.bfloat16), ("head", torch.float32), ("critic", torch.float32)}
    assert module.agent.seen["acting"] == expected
    assert compile or module.agent.seen["learning"] == expected
    assert all(parameter.dtype == torch.float32 for parameter in module.agent.parameters())
    assert len(module.metrics) == 3 * 2
    for first in module.metrics[::2]:  # of each iteration
        assert abs(first["old_approx_kl"]) < 1e-5
        assert first["clipfrac"] == 0


def test_the_layers_of_the_nature_cnn():
    agent = CNNAgent(Bounded(0, 255, (4, 84, 84), dtype=torch.uint8), Categorical(6, shape=()))
    sizes = [tuple(p.shape) for p in agent.actor_body.parameters()]
    assert sizes[::2] == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 64 * 7 * 7)]
    features = agent.actor_body(torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8))
    assert features.shape == (3, 512) and (features >= 0).all()


def test_the_layers_of_the_impala_cnn():
    agent = CNNAgent(
        Bounded(0, 255, (3, 64, 64), dtype=torch.uint8), Categorical(15, shape=()), body="impala"
    )
    widths = [p.shape[0] for p in agent.actor_body.parameters() if p.ndim == 4]
    assert widths == [16] * 5 + [32] * 5 + [32] * 5
    assert agent.actor_body.linear.weight.shape == (256, 32 * 8 * 8)
