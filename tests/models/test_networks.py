"""Actors and critics of TorchRL, and plain networks, as they are."""

import argparse
import functools
import math
import shlex

import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import distributions as D
from torch import nn
from torchrl.data import MultiCategorical, Unbounded
from torchrl.modules import (
    ActorValueOperator,
    IndependentNormal,
    MaskedCategorical,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
    TruncatedNormal,
    ValueOperator,
)

from ppo_lightning import PPG, PPO, RND, RPO, ConfigError, MLPAgent, RecurrentPPO, RolloutDataModule
from ppo_lightning.commands.cli import main
from ppo_lightning.envs import state
from ppo_lightning.export.onnx import largest_difference, random_observations
from ppo_lightning.models.networks import PAIR, NetworkAgent, _draw, _joint
from ppo_lightning.spaces.specs import join_vectors, mask_columns, spec_from_space
from tests.documented import blocks
from tests.helpers import ROOT, RecordedPPO, SaveAfter, difference, require_same, run, weights

SHORT = {"env_id": "Match-v0", "num_envs": 8, "num_steps": 16, "total_timesteps": 8 * 16 * 3}
LONG = SHORT | {"total_timesteps": 8 * 16 * 60, "eval_episodes": 2}
EAGER = {"learning_rate": 3e-3, "gamma": 0.9, "anneal_lr": False}


def mlp(inputs, outputs, *more):
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs), *more)


def two_heads():
    """Return an ActorValueOperator with keys of its own, and one-hot actions."""
    body = TensorDictModule(mlp(1, 32, nn.Tanh()), in_keys=["state"], out_keys=["hidden"])
    logits = TensorDictModule(nn.Linear(32, 2), in_keys=["hidden"], out_keys=["logits"])
    policy = ProbabilisticActor(
        logits, in_keys=["logits"], out_keys=["move"], distribution_class=OneHotCategorical
    )
    value = ValueOperator(nn.Linear(32, 1), in_keys=["hidden"], out_keys=["worth"])
    return {"actor": ActorValueOperator(body, policy, value)}


class BoundedBeta(D.TransformedDistribution):
    """Beta distribution between -1 and 1, whose entropy has no closed form here."""

    def __init__(self, alpha, beta):
        scale = D.AffineTransform(-1.0, 2.0)
        super().__init__(D.Independent(D.Beta(alpha, beta), 1), [scale], validate_args=False)
        self.deterministic_sample = scale(alpha / (alpha + beta))  # ONNX has no mode of a Beta


class Positive(nn.Module):
    def forward(self, features):
        return (nn.functional.softplus(features) + 1).chunk(2, -1)


def beta():
    parameters = TensorDictModule(mlp(1, 2, Positive()), in_keys=["observation"], out_keys=["alpha", "beta"])
    actor = ProbabilisticActor(parameters, in_keys=["alpha", "beta"], distribution_class=BoundedBeta)
    return {"actor": actor, "critic": ValueOperator(mlp(1, 1), in_keys=["observation"])}


class Eyes(nn.Module):
    """A CNN over pixels [B, H, W, C] beside a vector."""

    def __init__(self, outputs):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, stride=2)
        self.layers = mlp(4 * 25 + 1, outputs)

    def forward(self, pixels, vector):
        picture = (pixels.float() / 255).permute(0, 3, 1, 2)
        return self.layers(torch.cat([self.convolution(picture).relu().flatten(1), vector], -1))


def cnn():
    logits = TensorDictModule(Eyes(2), in_keys=["pixels", "vector"], out_keys=["logits"])
    actor = ProbabilisticActor(logits, in_keys=["logits"], distribution_class=D.Categorical)
    return {"actor": actor, "critic": ValueOperator(Eyes(1), in_keys=["pixels", "vector"])}


class Transformer(nn.Module):
    """A transformer over the numbers of an observation, made from the specs of the environment."""

    def __init__(self, observation_spec, action_spec, width=16, outputs=None):
        super().__init__()
        self.place = nn.Parameter(torch.randn(observation_spec.shape[0], width))
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(width, outputs or action_spec.space.n)

    def forward(self, observation):
        tokens = observation.unsqueeze(-1) * self.place + self.place.roll(1, -1)
        return self.out(self.encoder(tokens).mean(1))


def transformer():
    return {"actor": Transformer, "critic": functools.partial(Transformer, outputs=1)}


def networks():
    """Two networks for continuous actions."""
    return {"actor": mlp(1, 2), "critic": mlp(1, 1)}


# name -> modules, arguments of Match
AGENTS = {
    "two heads": (two_heads, {}),
    "beta": (beta, {"continuous": True}),
    "CNN": (cnn, {"pictures": True}),
    "transformer": (transformer, {}),
    "networks": (networks, {"continuous": True}),
}


def modules_of(name):
    torch.manual_seed(0)
    return AGENTS[name][0]()


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.integration) for name in AGENTS])
def trained(request, fit_once, tmp_path_factory):
    """Return the name of an agent, its module after a run, a resumed module and the checkpoint."""
    name, path = request.param, tmp_path_factory.mktemp("run") / "middle.ckpt"
    data = LONG | {"env_kwargs": AGENTS[name][1]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "KNOWN", ("tests.environments",))  # Match hides no state
        whole = fit_once(data, EAGER | modules_of(name), ppo=RecordedPPO, callbacks=[SaveAfter(path, 57)])
        resumed = fit_once(data, EAGER | modules_of(name), ppo=RecordedPPO, ckpt_path=path)
    return name, whole, resumed, path


def situations(name):
    """Return rows of all observations of Match, and the sign of the right action."""
    if name != "CNN":
        return torch.tensor([[-1.0], [1.0]]), torch.tensor([-1.0, 1.0])
    pairs = [(dark, sign) for dark in (0, 1) for sign in (-1.0, 1.0)]
    rows = [torch.cat([torch.full((144,), 255.0 * bright), torch.tensor([sign])]) for bright, sign in pairs]
    return torch.stack(rows), torch.tensor([sign * (2 * bright - 1) for bright, sign in pairs])


def test_networks_learn_the_known_values_and_actions_of_a_probe(trained):
    name, module, *_ = trained
    first = module.metrics[0]
    assert first["clipfrac"] == 0
    assert abs(first["old_approx_kl"]) < 1e-6, "the ratio is 1 in the first minibatch"
    rows, right = situations(name)
    agent = module.agent.eval()
    with torch.no_grad():
        torch.testing.assert_close(agent.value(rows), torch.ones(len(rows)), atol=0.25, rtol=0)
        action = agent.mode(rows)
    if AGENTS[name][1].get("continuous"):
        # Rounding, and with it the run, depends on the CPU: 0.24 on one. An untrained mode is 0.5 away.
        torch.testing.assert_close(action.squeeze(-1), right / 2, atol=0.25, rtol=0)
    else:
        assert torch.equal(action, (right > 0).long())


def test_networks_resume_to_the_bit(trained):
    _, whole, resumed, _ = trained
    assert len(resumed.rollouts) == 3
    require_same(whole, resumed)


def test_networks_are_loaded_exported_and_validated(trained, make_trainer, tmp_path):
    name, module, _, path = trained
    modules = modules_of(name)
    if name == "transformer":
        assert PPO.load_from_checkpoint(path).agent.actor_network.out.out_features == 2
    else:
        with pytest.raises(ConfigError, match=r"networks were objects.* load_from_checkpoint\("):
            PPO.load_from_checkpoint(path)
    loaded = PPO.load_from_checkpoint(path, **modules)
    make_trainer(limit_val_batches=1).validate(loaded, module.data, verbose=False)
    file = loaded.to_onnx(tmp_path / "agent.onnx")
    rows = random_observations(loaded.observation_spec)
    assert largest_difference(loaded.agent, file, rows) < 1e-5
    observation = module.data.env.observation_spec_unbatched["observation"]
    predicted = PPO(**modules_of(name))
    (actions,) = make_trainer().predict(
        predicted, torch.utils.data.DataLoader(torch.zeros(3, *observation.shape), 3), ckpt_path=path
    )
    assert torch.equal(actions, loaded.agent.mode(torch.zeros(3, *observation.shape)))
    assert loaded.agent.explain(torch.from_numpy(rows))[1].isfinite().all()


@pytest.mark.integration
@pytest.mark.parametrize("name", ["two heads", "beta", "networks"])
def test_a_compiled_update_is_the_eager_one(name, fit):
    data = SHORT | {"env_kwargs": AGENTS[name][1]}
    eager, compiled = (fit(data, EAGER | modules_of(name) | {"compile": on}) for on in (False, True))
    torch.testing.assert_close(weights(compiled), weights(eager), atol=1e-4, rtol=0)


@pytest.mark.integration
def test_ranks_train_as_one_process(tmp_path):
    options = {"data": {"env_id": "Match-v0"}, "pair": "two heads"}
    (one,) = run(tmp_path / "one", 1, **options)
    ranks = run(tmp_path / "two", 2, **options)
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    assert difference(ranks, one) < 0.01
    assert ranks[0]["returns"] == pytest.approx(one["returns"])


def test_a_file_names_no_function_and_no_network_of_others(fit, tmp_path):
    module = fit(SHORT, transformer())
    module.trainer.save_checkpoint(tmp_path / "agent.ckpt")
    checkpoint = torch.load(tmp_path / "agent.ckpt")
    for path in ("os.system", "torch.nn.modules.linear.Linear", "ppo_lightning.MLPAgent", "unknown.Network"):
        checkpoint["agent"]["init_args"]["actor"] = {"class_path": path, "init_args": {}}
        torch.save(checkpoint, tmp_path / "edited.ckpt")
        with pytest.raises(ConfigError, match=f"The checkpoint's {path.replace('.', '[.]')}|is {path}"):
            PPO.load_from_checkpoint(tmp_path / "edited.ckpt")


@pytest.mark.integration
def test_a_recipe_names_classes(tmp_path, monkeypatch, capsys):
    """They are named again for a checkpoint: by the settings of the run, or as classes to import."""
    monkeypatch.chdir(tmp_path)
    path = f"{Transformer.__module__}.{Transformer.__qualname__}"
    flags = ["--model.actor", path, "--model.critic", path, "--model.critic.outputs", "1"]
    main(
        ["fit", *flags, "--data.num_envs", "2", "--data.total_timesteps", "512", "--data.eval_episodes", "1"]
    )
    checkpoint = capsys.readouterr().out.split("checkpoint: ")[1].splitlines()[0]
    with pytest.raises(SystemExit):
        main(["validate", "--ckpt_path", checkpoint])
    shown = capsys.readouterr().err.partition("ppo-lightning ")[2]
    assert "cli_config.yaml" in shown
    main(shlex.split(shown))
    main(["export", "--onnx", "agent.onnx", "--ckpt_path", checkpoint, *flags[:4]])


@pytest.mark.parametrize(
    ("frames", "reached"),
    [
        pytest.param("10_240", 100, marks=pytest.mark.integration),
        pytest.param("80_000", 450, marks=pytest.mark.slow),
    ],
)
def test_our_agent_learns_cartpole_in_the_loop_of_the_docs(frames, reached):
    (code,) = (block.text for block in blocks(ROOT / "docs/torchrl.md") if "Collector(" in block.text)
    names = {}
    exec(code.replace("80_000", frames), names)
    assert max(names["returns"]) > reached


def test_log_probabilities_and_entropies_for_torchrl_are_those_of_the_update(env):
    agent = MLPAgent(*env("Pendulum-v1").agent_specs, norm_obs=True)
    batch = agent(TensorDict({"observation": torch.randn(5, 3)}, [5]))
    distribution = agent.get_dist(batch)
    torch.testing.assert_close(distribution.log_prob(batch["action"]), batch["action_log_prob"])
    evaluation = agent.evaluate(agent.normalize(batch["observation"]), batch["action"])
    torch.testing.assert_close(distribution.entropy(), evaluation.entropy)


def test_any_distribution_acts_by_its_noise():
    """Normal and discrete actions depend on their row of the noise, others on the whole of it."""
    torch.manual_seed(0)
    noise = torch.rand(20_000, 2).clamp(1e-6, 1 - 1e-6)
    loc, scale = torch.tensor([0.3, -1.0]).expand(20_000, 2), torch.tensor([0.5, 2.0])
    before = torch.get_rng_state()
    for distribution in (
        IndependentNormal(loc, scale.expand(20_000, 2)),
        TanhNormal(loc, scale.expand(20_000, 2)),
        TruncatedNormal(loc, scale.expand(20_000, 2), low=-1.0, high=1.0),
        D.Independent(D.Laplace(loc, scale.expand(20_000, 2)), 1),
        D.Independent(D.Beta(torch.full((20_000, 2), 2.0), torch.ones(20_000, 2)), 1),
    ):
        sample = _draw(distribution, noise)
        assert torch.equal(sample, _draw(distribution, noise)), "the noise is the seed"
        assert not torch.equal(sample, _draw(distribution, noise.flip(0)))
        assert torch.equal(torch.get_rng_state(), before)
        with torch.random.fork_rng():
            expected = distribution.sample().mean(0)
        torch.testing.assert_close(sample.mean(0), expected, atol=0.07, rtol=0)
    few = IndependentNormal(loc[:7], scale.expand(7, 2))
    normal = IndependentNormal(loc, scale.expand(20_000, 2))
    assert torch.equal(_draw(few, noise[:7]), _draw(normal, noise)[:7])
    masked = MaskedCategorical(logits=torch.zeros(20_000, 4), mask=torch.tensor([[False, True, True, False]]))
    counts = _draw(_joint(masked), noise[:, 0]).bincount(minlength=4)
    assert counts[[0, 3]].sum() == 0
    assert counts[1].item() == pytest.approx(10_000, rel=0.05)


WRONG = {
    "no critic": ({"actor": mlp(1, 2)}, "NoneType"),
    "no actor": ({"critic": mlp(1, 1)}, "NoneType"),
    "no distribution": (
        {
            "actor": TensorDictModule(mlp(1, 2), in_keys=["observation"], out_keys=["action"]),
            "critic": mlp(1, 1),
        },
        "TensorDictModule has no distribution",
    ),
    "another key": ({"actor": cnn()["actor"], "critic": mlp(1, 1)}, "pixels"),
    "another size": ({"actor": mlp(3, 2), "critic": mlp(1, 1)}, "mat1 and mat2 shapes cannot be multiplied"),
    "two values": ({"actor": mlp(1, 2), "critic": mlp(1, 2)}, "have the shapes [[2], [2], [4]] for two rows"),
    "class without specs": ({"actor": nn.Tanh, "critic": mlp(1, 1)}, "positional argument"),
    "text": ({"actor": "mlp", "critic": mlp(1, 1)}, "'str' object is not callable"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_form_names_the_contract_and_the_page(kind, make_trainer):
    modules, reason = WRONG[kind]
    with pytest.raises(ConfigError) as raised:
        make_trainer().fit(PPO(**modules), RolloutDataModule(**SHORT))
    assert reason in str(raised.value)
    assert str(raised.value).endswith(f"{PAIR}.")


def test_a_shared_body_runs_once(env):
    agent = NetworkAgent(*env("Match-v0").agent_specs, **two_heads(), critic=None)
    calls = []
    agent.body.register_forward_hook(lambda *_: calls.append(1))
    agent.evaluate(torch.ones(2, 1), torch.ones(2, dtype=torch.int64))
    assert len(calls) == 1
    agent.value(torch.ones(2, 1))
    assert len(calls) == 2


class Dictionary(Eyes):
    def forward(self, inputs):
        return super().forward(**inputs)


def overwritten(kind):
    """Return an actor that writes what its critic reads, or for "dictionary" a critic without keys."""
    if kind == "dictionary":
        return {"actor": cnn()["actor"], "critic": Dictionary(1)}
    name = "observation" if kind == "input" else "hidden"
    layers = TensorDictSequential(
        TensorDictModule(mlp(1, 1), in_keys=[name], out_keys=[name]),
        TensorDictModule(nn.Linear(1, 2), in_keys=[name], out_keys=["logits"]),
    )
    actor = ProbabilisticActor(layers, in_keys=["logits"], distribution_class=D.Categorical)
    critic = ValueOperator(nn.Linear(1, 1), in_keys=[name])
    if kind == "input":
        return {"actor": actor, "critic": critic}
    body = TensorDictModule(mlp(1, 1), in_keys=["observation"], out_keys=[name])
    return {"actor": ActorValueOperator(body, actor, critic), "critic": None}


@pytest.mark.parametrize("kind", ["input", "body", "dictionary"])
def test_a_critic_reads_nothing_that_only_the_actor_writes(kind, env):
    pictures = kind == "dictionary"
    specs = env("Match-v0", env_kwargs={"pictures": pictures}).agent_specs
    agent = NetworkAgent(*specs, **overwritten(kind))
    rows = torch.linspace(-3, 3, 4)[:, None].repeat(1, 145 if pictures else 1)
    evaluation = agent.evaluate(rows, torch.ones(4, dtype=torch.int64))
    torch.testing.assert_close(evaluation.value, agent.value(rows))


class Own(PPO):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.save_hyperparameters()


def test_a_subclass_that_saves_all_its_arguments_saves_no_network(fit, tmp_path):
    fit(SHORT, networks() | {"gamma": 0.5}, ppo=Own).trainer.save_checkpoint(tmp_path / "own.ckpt")
    loaded = Own.load_from_checkpoint(tmp_path / "own.ckpt", **networks())
    assert loaded.hparams.gamma == 0.5


@pytest.mark.parametrize(("name", "value"), [("args", argparse.Namespace(width=3)), ("func", nn.ReLU)])
def test_an_attribute_of_a_network_does_not_describe_it(name, value, env):
    modules = two_heads() | {"critic": None}
    setattr(modules["actor"], name, value)
    assert NetworkAgent(*env("Match-v0").agent_specs, **modules).hparams["actor"] is None


def test_a_class_beside_an_object_is_given_again(fit, tmp_path):
    modules = {"actor": Transformer, "critic": mlp(1, 1)}
    fit(SHORT, modules).trainer.save_checkpoint(tmp_path / "mixed.ckpt")
    with pytest.raises(ConfigError, match="networks were objects"):
        PPO.load_from_checkpoint(tmp_path / "mixed.ckpt")


def test_an_agent_beside_an_actor_is_refused():
    with pytest.raises(ConfigError, match=r"model\.agent and model\.actor are both given"):
        PPO(agent=MLPAgent, **networks())


@pytest.mark.parametrize("reads_mask", [False, True])
def test_an_actor_of_torchrl_reads_the_action_mask_or_is_refused(reads_mask):
    space = spaces.Dict(place=spaces.Box(-1, 1, (4,)), action_mask=spaces.MultiBinary(3))
    observation, action = map(spec_from_space, (join_vectors(space), spaces.Discrete(3)))
    logits = TensorDictModule(mlp(4, 3), in_keys=["place"], out_keys=["logits"])
    names = {"logits": "logits"} | ({"mask": "action_mask"} if reads_mask else {})
    kind = MaskedCategorical if reads_mask else D.Categorical
    actor = ProbabilisticActor(logits, in_keys=names, distribution_class=kind)
    critic = ValueOperator(mlp(4, 1), in_keys=["place"])
    if not reads_mask:
        with pytest.raises(ConfigError, match="the actor does not read the observation's action_mask"):
            NetworkAgent(observation, action, actor, critic)
        return
    agent = NetworkAgent(observation, action, actor, critic)
    rows = torch.rand(200, 7)
    rows[:, mask_columns(observation)] = torch.tensor([1.0, 1.0, 0.0])
    assert agent.act(rows, agent.noise((200,)))[0].unique().tolist() == [0, 1]


def test_an_actor_of_torchrl_takes_several_discrete_actions():
    layers = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(-1, (2, 3)))
    logits = TensorDictModule(layers, in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(logits, in_keys=["logits"], distribution_class=D.Categorical)
    critic = ValueOperator(mlp(4, 1), in_keys=["observation"])
    agent = NetworkAgent(Unbounded((4,)), MultiCategorical([3, 3]), actor, critic)
    action, log_prob, *_ = agent.act(torch.zeros(5, 4), agent.noise((5,)))
    assert action.shape == (5, 2) and log_prob.shape == (5,)
    assert agent.head.largest_entropy == pytest.approx(2 * math.log(3))


@pytest.mark.parametrize("algorithm", [PPG, RND, RPO, RecurrentPPO])
def test_variants_refuse_in_one_sentence(algorithm, make_trainer):
    module = algorithm(num_minibatches=1, **networks())
    data = RolloutDataModule(**LONG | {"env_kwargs": {"continuous": True}})
    with pytest.raises(ConfigError, match=rf"^{algorithm.__name__} (builds on the features|needs)"):
        make_trainer().fit(module, data)
