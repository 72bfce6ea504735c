"""Atari: one preprocessing, two backends. Details 14 to 22."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torchrl.data import Bounded, Categorical, Unbounded
from torchrl.envs import RewardClipping

from ppo_lightning import PPO, CNNAgent, ConfigError, make_env
from ppo_lightning.envs import BatchedEnv
from ppo_lightning.envs.atari import AtariEnv
from ppo_lightning.rollouts.collector import RolloutCollector
from ppo_lightning.utils.processors import processors

BACKENDS = ["envpool", "gymnasium"]
NOTHING_RANDOM = {"noop_max": 0, "episodic_life": False}


def play(env, steps, seed=0):
    """Play random actions and return copies of the results of each step."""
    rng, played = np.random.default_rng(seed), [np.array(env.reset_arrays())]
    for _ in range(steps):
        action = rng.integers(0, env.action_spec_unbatched.space.n, env.num_envs)
        out = [np.array(result) for result in env.step_arrays(action)]
        done = out[2] | out[3]
        played += [*out, np.array(env.episode_done), np.array(env.lives)]
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
    assert all(isinstance(batch, BatchedEnv) for batch in batches), "TorchRL wraps nothing around it"
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
    """Wait until a life is lost; return the results of that step and the pictures before it."""
    before = np.array(env.reset_arrays())
    for _ in range(200):
        out = [np.array(result) for result in env.step_arrays(np.zeros(env.num_envs, np.int64))]
        if out[2].any():
            return out, before
        before = out[0]
    raise AssertionError("No life was lost.")


@pytest.mark.detail("16")
@pytest.mark.detail("17")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lost_life_cuts_learning_and_not_the_game(env, backend):
    game = env("ALE/Breakout-v5", 1, backend)
    (observation, _, terminated, truncated), before = lose_a_life(game)
    assert terminated[0] and not truncated[0] and not game.episode_done[0]
    assert game.lives[0] == 4
    np.testing.assert_array_equal(observation[0, :-1], before[0, 1:])
    following = np.array(game.reset_arrays(terminated))
    assert game.lives[0] == 4, "the game goes on"
    ball = slice(38, 75), slice(8, 76)  # below the bricks, above the paddle
    flying = []
    for _ in range(5):
        observation, _, terminated, _ = game.step_arrays(np.zeros(1, np.int64))
        flying.append(int(observation[0, -1][ball].max()) > 0)
        assert not terminated[0] and game.lives[0] == 4
    assert any(flying), "FIRE was pressed"
    assert all((picture == following[0, -1]).all() for picture in following[0])
    game = env("ALE/Breakout-v5", 1, backend, env_kwargs={"episodic_life": False})
    game.reset_arrays()
    while game.lives[0] != 4:
        *_, terminated, _ = game.step_arrays(np.full(1, 1))
        assert not terminated[0]


class Presses(CNNAgent):
    """Agent that always presses one button."""

    button = 1

    def array_policy(self):
        def policy(observation, noise, memory):
            count = len(observation)
            return np.full(count, self.button), np.zeros(count, np.float32), np.zeros(count, np.float32)

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


class Scripted(AtariEnv):
    """Game with scripted lives, ends and time limits; the pictures show the number of the step."""

    lives_at = (3, 3, 2, 2, 1, 0, 0)
    over = (5,)
    cut = ()

    def _make(self):
        self.envs, self.step_number = [], 0
        return 3

    def _new_games(self, rows):
        self.step_number = 0
        return self.frame(rows), np.full(len(rows), 3)

    def _next_lives(self, rows):
        self.step_number += 100
        return self.frame(rows)

    def frame(self, rows):
        return np.full((len(rows), 1, 84, 84), self.step_number, np.uint8)

    def _step_games(self, action):
        self.step_number += 1
        t, rows = self.step_number % 100, np.arange(self.num_envs)
        flags = (np.array([t in when for _ in rows]) for when in (self.over, self.cut))
        return self.frame(rows), np.ones(len(rows)), *flags, np.full(len(rows), self.lives_at[t])


@pytest.mark.detail("16")
@pytest.mark.detail("20")
def test_a_scripted_sequence_of_lives():
    env = Scripted("ALE/Breakout-v5", [1])
    env.reset_arrays()
    seen = []
    for _ in range(5):
        observation, _, terminated, truncated = env.step_arrays(np.zeros(1, int))
        stack = observation[0, :, 0, 0].tolist()
        seen.append((stack, bool(terminated[0]), bool(env.episode_done[0])))
        if terminated[0]:
            following = env.reset_arrays(terminated)[0, :, 0, 0].tolist()
            assert len(set(following)) == 1, "the next life, and the next game, fill the stack"
        assert not truncated[0]
    assert [flags for _, *flags in seen] == [
        [False] * 2,
        [True, False],
        [False] * 2,
        [True, False],
        [True, True],
    ]
    assert [stack for stack, *_ in seen[:2]] == [[0, 0, 0, 1], [0, 0, 1, 2]], "the real last pictures"
    assert env.step_number == 0, "a new game"


@pytest.mark.detail("16")
def test_a_time_limit_at_a_lost_life_is_no_terminal_state():
    class Cut(Scripted):
        cut = (2,)

    env = Cut("ALE/Breakout-v5", [1])
    env.reset_arrays()
    env.step_arrays(np.zeros(1, int))
    _, _, terminated, truncated = env.step_arrays(np.zeros(1, int))
    assert truncated[0] and not terminated[0] and env.episode_done[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_through_torchrl_lives_go_down_one_by_one_with_a_single_environment(env, backend):
    batch = env("ALE/Breakout-v5", 1, backend)
    lives = []

    def fire(tensordict):
        lives.append(int(batch.lives[0]))
        return tensordict.set("action", torch.ones(1, dtype=torch.int64))

    batch.rollout(150, policy=fire, break_when_any_done=False)
    assert [a for a, b in pairwise([*lives, -1]) if a != b][:4] == [5, 4, 3, 2]


def test_predict_takes_bytes_only(fit):
    module = fit(
        {"env_id": "ALE/Pong-v5", "backend": "envpool", "num_envs": 1, "num_steps": 8, "total_timesteps": 8},
        {"agent": CNNAgent},
    )
    pictures = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    assert torch.equal(module.predict(pictures), module(pictures))
    with pytest.raises(ConfigError, match="of bytes, such as pictures"):
        module.predict(pictures / 255)


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
        ({"repeat_action_probability": "high"}, "repeat_action_probability is 'high': it must be between 0"),
        ({"screen_size": [84, 84]}, "screen_size is .84, 84.: it must be at least 1"),
        ({"continuous": True}, "continuous is not an option of .*: they are noop_max, frame_skip"),
        ({"fire_rest": True}, "fire_rest is not an option of .*: did you mean fire_reset"),
        ({"fire_reset": "maybe"}, "fire_reset is 'maybe': it must be true or false"),
        ({"frame_stack": 0}, "frame_stack is 0: it must be at least 1"),
        ({"frame_skip": 2.5}, "frame_skip is 2.5: it must be an integer"),
        ({"noop_max": -1}, "noop_max is -1: it must be at least 0"),
        ({"repeat_action_probability": 1.5}, "repeat_action_probability is 1.5: it must be between 0 and 1"),
    ],
)
def test_wrong_ids_and_options(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_env(options.pop("env_id", "ALE/Pong-v5"), 1, "envpool", env_kwargs=options)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            {"env_kwargs": {"screen_size": 30}},
            "pictures of 30 x 30, and the body 'nature' needs 36 x 36 at least",
        ),
        ({"transforms": [RewardClipping(-1, 1)]}, "transforms do not work with Atari"),
    ],
)
def test_what_pictures_and_lives_do_not_allow_is_refused_before_training(fit, data, sentence):
    with pytest.raises(ConfigError, match=sentence):
        fit({"env_id": "ALE/Pong-v5", "backend": "envpool"} | data, {"agent": CNNAgent})


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


class FirstLoss(PPO):
    """Recorder of the metrics of the first minibatch of each iteration."""

    def training_step(self, rollout, batch_idx):
        self.first = []
        super().training_step(rollout, batch_idx)

    def update(self, minibatches):
        metrics = super().update(minibatches)
        self.first += metrics
        return metrics


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.integration)])
def test_bf16_is_for_the_body_alone_and_the_same_in_acting_and_learning(fit, compile):
    data = {
        "env_id": "ALE/Breakout-v5",
        "backend": "envpool",
        "num_envs": 2,
        "num_steps": 16,
        "total_timesteps": 96,
    }
    model = {"agent": Watched, "num_minibatches": 2, "update_epochs": 1, "compile": compile}
    module = fit(data, model, ppo=FirstLoss, precision="bf16-mixed")
    expected = {("body", torch.bfloat16), ("head", torch.float32), ("critic", torch.float32)}
    assert module.agent.seen["acting"] == expected
    assert compile or module.agent.seen["learning"] == expected
    assert all(parameter.dtype == torch.float32 for parameter in module.agent.parameters())
    assert abs(module.first[0]["old_approx_kl"]) < 1e-5
    assert module.first[0]["clipfrac"] == 0


@pytest.mark.detail("21")
def test_policy_and_value_share_the_nature_cnn():
    agent = CNNAgent(Bounded(0, 255, (4, 84, 84), dtype=torch.uint8), Categorical(6, shape=()))
    sizes = [tuple(p.shape) for p in agent.actor_body.parameters()]
    assert sizes[::2] == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 64 * 7 * 7)]
    assert agent.critic_body is None
    observation = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    agent.value(observation).sum().backward()
    assert all(p.grad is not None for p in agent.actor_body.parameters())
    features = agent.actor_body(observation)
    assert features.shape == (3, 512) and (features >= 0).all()


@pytest.mark.detail("22")
@pytest.mark.parametrize("body", ["nature", "impala"])
def test_pixels_are_scaled_to_one(body):
    agent = CNNAgent(Bounded(0, 255, (3, 64, 64), dtype=torch.uint8), Categorical(6, shape=()), body=body)
    seen = []
    agent.actor_body.convolutions.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    pictures = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    pictures[0, 0, 0, :2] = torch.tensor([0, 255])
    agent.value(pictures)
    assert torch.equal(seen[0], pictures / 255)
    assert seen[0].amin() == 0 and seen[0].amax() == 1
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.detail("P1")
def test_the_impala_cnn():
    agent = CNNAgent(
        Bounded(0, 255, (3, 64, 64), dtype=torch.uint8), Categorical(15, shape=()), body="impala"
    )
    widths = [p.shape[0] for p in agent.actor_body.parameters() if p.ndim == 4]
    assert widths == [16] * 5 + [32] * 5 + [32] * 5
    assert agent.actor_body.linear.weight.shape == (256, 32 * 8 * 8)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (Unbounded(shape=(4,)), "CNNAgent takes one picture"),
        (Bounded(0, 255, (4, 20, 84), dtype=torch.uint8), "needs 36 x 36"),
    ],
)
def test_observations_that_are_not_pictures_are_refused(spec, sentence):
    with pytest.raises(ConfigError, match=sentence):
        CNNAgent(spec, Categorical(6, shape=()))
