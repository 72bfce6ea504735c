"""Export to ONNX and to folders for the Hugging Face Hub."""

import functools
import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

import ppo_lightning
from ppo_lightning import PPO, CNNAgent, ConfigError, MLPAgent, RecurrentPPO
from ppo_lightning.checkpoints.agent import trained_agent
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.commands import cli
from ppo_lightning.export import load_from_hub, push_to_hub, to_onnx
from ppo_lightning.export.actor import deployed_actor
from ppo_lightning.export.onnx import largest_difference, random_observations
from ppo_lightning.spaces.specs import spec_from_plain
from tests.helpers import SaveAfter

pytest.importorskip("onnxruntime")
ATARI = {"env_id": "ALE/Breakout-v5", "backend": "gymnasium", "num_steps": 16}
AGENTS = {
    "MLP, categorical": ({}, MLPAgent),
    "MLP, shared": ({}, functools.partial(MLPAgent, shared=True, norm_obs=True)),
    "MLP, Gaussian": ({"env_id": "Hopper-v5"}, functools.partial(MLPAgent, norm_obs=True)),
    "MLP, tanh-Gaussian": ({"env_id": "Pendulum-v1"}, functools.partial(MLPAgent, head="tanh_gaussian")),
    "MLP, residual": (
        {"env_id": "Pendulum-v1"},
        functools.partial(MLPAgent, body="residual", activation="relu"),
    ),
    "Nature": (ATARI, CNNAgent),
    "IMPALA": (ATARI, functools.partial(CNNAgent, body="impala")),
}


@pytest.fixture
def checkpoint(fit, tmp_path):
    def train(kind):
        data, agent = AGENTS[kind]
        data = {"num_envs": 2, "num_steps": 64} | data
        data["total_timesteps"] = data["num_envs"] * data["num_steps"] * 2
        save = ModelCheckpoint(tmp_path, filename="trained", every_n_train_steps=1)
        model = {"agent": agent, "learning_rate": 0.01}
        module = fit(data, model, callbacks=[save], enable_checkpointing=True)
        return module, tmp_path / "trained.ckpt"

    return train


@pytest.mark.parametrize("kind", AGENTS)
def test_onnx_gives_what_pytorch_gives(kind, checkpoint, tmp_path):
    _, path = checkpoint(kind)
    read = read_checkpoint(str(path))
    agent, spec = trained_agent(read), spec_from_plain(read["agent"]["observation_spec"])
    onnx = to_onnx(deployed_actor(agent, spec), tmp_path / "out" / "agent.onnx")
    for folder in (Path(ppo_lightning.__file__).parent, Path(torch.__file__).parent, Path.home()):
        assert str(folder).encode() not in onnx.read_bytes(), "no paths of this machine"
    observation = random_observations(spec)
    assert observation.shape == (256, *spec.shape)
    assert observation.std() > 0
    assert largest_difference(agent, onnx, observation) < 1e-5
    with torch.no_grad():  # the measure finds a changed weight
        agent.critic.bias += 0.1
    assert largest_difference(agent, onnx, observation) > 1e-3


def test_a_module_is_exported_for_any_batch(checkpoint, tmp_path):
    """A module that trains on, too: it is not changed."""
    onnxruntime = pytest.importorskip("onnxruntime")
    module, path = checkpoint("MLP, Gaussian")
    module.train()
    loaded, file = PPO.load_from_checkpoint(path), tmp_path / "agent.onnx"
    for one, export in ((module, to_onnx), (loaded, PPO.to_onnx)):
        assert export(one, file) == file
        session = onnxruntime.InferenceSession(str(file))
        for batch in (1, 5):
            observation = np.random.default_rng(1).normal(0, 5, (batch, 11)).astype(np.float32)
            action, value = session.run(None, {"observation": observation})
            np.testing.assert_allclose(action, one.predict(observation), rtol=1e-4, atol=1e-5)
            assert value.shape == (batch,) and np.abs(action).max() <= 1
        assert one.training and one.agent.training
    with pytest.raises(ConfigError, match="There is no trained agent"):
        to_onnx(PPO(), tmp_path / "none.onnx")


class Goal(gymnasium.Env):
    """A user's environment, which a script registers."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.Discrete(2)
    on_this_machine = True

    def __init__(self, render_mode=None):
        if not self.on_this_machine:
            raise RuntimeError("no licence\nfor this machine")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.zeros(3, np.float32), 1.0, False, True, {}


def make_goal():
    return Goal()


@pytest.mark.parametrize(
    ("env_id", "flags", "sentence"),
    [
        ("Goal-v0", [], "no video: env_id 'Goal-v0' is not an environment of"),
        ("Goal-v1", [], "no licence"),
        (make_goal, [], "no video: The checkpoint's settings import or call code (data.env_id"),
        (make_goal, ["--trust_checkpoint"], "is not the id of an environment"),
        ("Reach-v0", [], "no video"),
    ],
)
def test_an_export_needs_no_environment(env_id, flags, sentence, fit, tmp_path, monkeypatch, capsys):
    """An unknown id, one that cannot be made, a function, and one without pictures: all but the video."""
    for name in ("Goal-v0", "Goal-v1"):
        gymnasium.register(name, Goal)
    save = ModelCheckpoint(tmp_path, filename="trained", every_n_train_steps=1)
    data = {"env_id": env_id, "num_envs": 2, "num_steps": 16, "total_timesteps": 32}
    fit(data, callbacks=[save], enable_checkpointing=True)
    gymnasium.registry.pop("Goal-v0")
    monkeypatch.setattr(Goal, "on_this_machine", False)
    written = ["--onnx", str(tmp_path / "a.onnx"), "--hub", str(tmp_path / "hub")]
    cli.main(["export", "--ckpt_path", str(tmp_path / "trained.ckpt"), *written, *flags])
    gymnasium.registry.pop("Goal-v1")
    out = capsys.readouterr().out
    assert sentence in out
    assert float(out.split("random observations: ")[1].split()[0]) < 1e-5
    assert "video" not in (tmp_path / "hub/README.md").read_text()
    assert not (tmp_path / "hub/replay.mp4").exists()


def test_export_writes_onnx_and_hub_and_prints_the_deviation(checkpoint, tmp_path, capsys):
    module, path = checkpoint("MLP, shared")
    hub = tmp_path / "hub"
    written = ["--onnx", str(tmp_path / "a.onnx"), "--hub", str(hub)]
    cli.main(["export", "--ckpt_path", str(path), *written])
    assert float(capsys.readouterr().out.split("random observations: ")[1].split()[0]) < 1e-5
    names = sorted(path.name for path in hub.iterdir())
    assert names == ["README.md", "config.json", "model.safetensors", "replay.mp4"]
    card, config = (hub / "README.md").read_text(), json.loads((hub / "config.json").read_text())
    assert card.startswith("---\nlibrary_name: ppo_lightning\n")
    assert "type: CartPole-v1" in card and "replay.mp4" in card
    result = f"{np.mean(module.episode_returns):.2f} +/- {np.std(module.episode_returns):.2f}"
    assert f"training episodes (sampled actions; no evaluation of these weights): {result}, after" in card
    assert config["evaluation"] is None
    assert config["env_steps"] == module.env_steps and config["details"]["28"] is True
    agent, observation = load_from_hub(hub), torch.randn(16, 4)
    assert torch.equal(agent.mode(observation), module.predict(observation))


@pytest.mark.parametrize("memory", [None, "lstm"])
def test_the_card_of_an_evaluated_agent(fit, tmp_path, memory):
    """The card shows the return of the evaluation, its code runs, and no file has private settings."""
    options = {"limit_val_batches": 1.0, "val_check_interval": 2, "check_val_every_n_epoch": None}
    data = {"num_envs": 2, "num_steps": 16, "total_timesteps": 64, "eval_episodes": 3}
    agent = functools.partial(MLPAgent, memory=memory, shared=memory is not None)
    save = ModelCheckpoint(tmp_path, filename="trained")
    model = {"agent": agent, "num_minibatches": 2}
    ppo = RecurrentPPO if memory else PPO
    module = fit(data, model, ppo=ppo, callbacks=[save], enable_checkpointing=True, **options)
    checkpoint = torch.load(tmp_path / "trained.ckpt", weights_only=True)
    checkpoint["datamodule_hyper_parameters"]["_instantiator"] = "lightning.pytorch.cli.instantiate_module"
    torch.save(checkpoint, tmp_path / "trained.ckpt")
    hub = tmp_path / "hub"
    cli.main(["export", "--ckpt_path", str(tmp_path / "trained.ckpt"), "--hub", str(hub), "--no_video"])
    card, config = (hub / "README.md").read_text(), json.loads((hub / "config.json").read_text())
    metrics = module.trainer.callback_metrics
    mean, std = (float(metrics[f"eval/episodic_return{name}"]) for name in ("", "_std"))
    result = f"{mean:.2f} +/- {std:.2f}"
    assert f"Return of the last evaluation (whole episodes, the most probable actions): {result}" in card
    (metric,) = yaml.safe_load(card.split("---")[1])["model-index"][0]["results"][0]["metrics"]
    assert metric == {"type": "mean_reward", "value": result, "name": "return of the last evaluation"}
    assert config["evaluation"]["episodic_return"] == mean and config["training"]["episodes"] > 0
    assert "_instantiator" not in json.dumps(config)
    code = card.split("```python")[1].split("```")[0].replace("USER/NAME", str(hub))
    names = {"observation": torch.randn(5, 4)}
    exec(code, names)
    assert names["action"].shape == (5,)
    assert memory or torch.equal(names["action"], module.predict(names["observation"]))


def test_a_checkpoint_omits_an_evaluation_of_older_weights(fit, tmp_path):
    options = {"limit_val_batches": 1.0, "val_check_interval": 2, "check_val_every_n_epoch": None}
    saved = [SaveAfter(tmp_path / f"{rollouts}.ckpt", rollouts) for rollouts in (1, 3)]
    data = {"num_envs": 2, "num_steps": 16, "total_timesteps": 128, "eval_episodes": 1}
    fit(data, callbacks=saved, **options)
    for rollouts in (1, 3):
        assert read_checkpoint(tmp_path / f"{rollouts}.ckpt")["evaluation"] is None


def test_an_upload_that_fails_ends_in_one_sentence(tmp_path, monkeypatch):
    """Nothing listens on this port."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"not uploaded to user/name .*: check the network, and log in"):
        push_to_hub(tmp_path, "user/name")


@pytest.mark.parametrize(
    ("flags", "message"),
    [([], "something to write"), (["--push", "user/name", "--onnx", "a.onnx"], "give both")],
)
def test_what_cannot_be_exported_is_refused(flags, message, capsys):
    with pytest.raises(SystemExit):
        cli.main(["export", "--ckpt_path", "a.ckpt", *flags])
    assert message in capsys.readouterr().err


def test_a_folder_without_a_hub_export_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_from_hub(tmp_path)
