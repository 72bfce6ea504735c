"""Export to ONNX and to folders for the Hugging Face Hub."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.data import Categorical, Unbounded

import ppo_lightning
from ppo_lightning import PPO, CNNAgent, ConfigError, MLPAgent
from ppo_lightning.checkpoints.agent import trained_agent
from ppo_lightning.checkpoints.file import read_checkpoint
from ppo_lightning.export.onnx import largest_difference, random_observations, to_onnx
from ppo_lightning.models.networks import NetworkAgent
from ppo_lightning.offpolicy import C51Agent, QAgent
from ppo_lightning.spaces.specs import spec_from_plain, spec_from_space
from tests.environments import Parts
from tests.helpers import SaveAfter

pytest.importorskip("onnxruntime")
ATARI = {"env_id": "ALE/Breakout-v5", "backend": "gymnasium", "num_steps": 16}
AGENTS = {
    "MLP, categorical": ({}, MLPAgent),
    "MLP, shared": ({}, functools.partial(MLPAgent, shared=True, norm_obs=True)),
    "MLP, Gaussian": ({"env_id": "Hopper-v5"}, functools.partial(MLPAgent, norm_obs=True)),
    "MLP, tanh-Gaussian": ({"env_id": "Pendulum-v1"}, functools.partial(MLPAgent, head="tanh_gaussian")),
    "MLP, ReLU": ({"env_id": "Pendulum-v1"}, functools.partial(MLPAgent, activation="relu")),
    "Nature": (ATARI, CNNAgent),
    "IMPALA": (ATARI, functools.partial(CNNAgent, body="impala")),
}


@pytest.fixture
def checkpoint(fit, tmp_path):
    def train(kind):
        data, agent = AGENTS[kind]
        data = {"num_envs": 2, "num_steps": 64} | data
        data["total_timesteps"] = data["num_envs"] * data["num_steps"] * 2
        module = fit(data, {"agent": agent, "learning_rate": 0.01})
        module.trainer.save_checkpoint(tmp_path / "trained.ckpt")
        return module, tmp_path / "trained.ckpt"

    return train


@pytest.mark.parametrize("kind", AGENTS)
def test_onnx_gives_what_pytorch_gives(kind, checkpoint, tmp_path):
    _, path = checkpoint(kind)
    read = read_checkpoint(str(path))
    agent, spec = trained_agent(read), spec_from_plain(read["agent"]["observation_spec"])
    onnx = to_onnx(agent, spec, tmp_path / "out" / "agent.onnx")
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
    onnx, onnxruntime = (pytest.importorskip(name) for name in ("onnx", "onnxruntime"))
    module, path = checkpoint("MLP, Gaussian")
    module.train()
    loaded, file = PPO.load_from_checkpoint(path), tmp_path / "agent.onnx"
    options = {"export_params": True, "opset_version": 19}  # of torch.onnx.export
    for one in (module, loaded):
        assert one.to_onnx(file_path=file, input_sample=torch.zeros(1, 11), **options) == file
        assert onnx.load(file).opset_import[0].version == 19
        session = onnxruntime.InferenceSession(str(file))
        for batch in (1, 5):
            observation = np.random.default_rng(1).normal(0, 5, (batch, 11)).astype(np.float32)
            action, value = session.run(None, {"observation": observation})
            np.testing.assert_allclose(action, one.predict(observation), rtol=1e-4, atol=1e-5)
            assert value.shape == (batch,) and np.abs(action).max() <= 1
        assert one.training and one.agent.training
        rows = torch.randn(5, 11)
        program = torch.export.export(one, (rows,)).module()
        assert torch.equal(program(rows), one.predict(rows)), "with the statistics inside"
    with pytest.raises(ConfigError, match="There is no trained agent"):
        PPO().to_onnx(tmp_path / "none.onnx")


@pytest.mark.parametrize("kind", [QAgent, C51Agent])
def test_the_value_of_a_q_network_is_that_of_the_best_allowed_action(kind, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    spec = spec_from_space(spaces.Dict(action_mask=spaces.MultiBinary(3), v=spaces.Box(-1, 1, (2,))))
    agent = kind(spec, Categorical(3, shape=()))
    rows = np.concatenate([np.eye(3), np.full((3, 2), 0.5)], axis=1).astype(np.float32)
    session = onnxruntime.InferenceSession(str(to_onnx(agent, spec, tmp_path / "agent.onnx")))
    action, value = session.run(None, {"observation": rows})
    assert action.tolist() == [0, 1, 2]
    everything = torch.tensor([[1, 1, 1, 0.5, 0.5]])
    np.testing.assert_allclose(value, agent.explain(everything)[0][0].detach(), rtol=1e-4, atol=1e-5)


class OfFixedLength(torch.nn.Module):
    def __init__(self, out_features):
        super().__init__()
        self.linear = torch.nn.Linear(4, out_features)

    def forward(self, x):
        return self.linear(x.reshape(len(x), -1))


def test_a_network_of_a_fixed_number_of_rows_is_not_exported(tmp_path):
    spec = Unbounded((2, 2))
    agent = NetworkAgent(spec, Categorical(2, shape=()), actor=OfFixedLength(2), critic=OfFixedLength(1))
    with pytest.raises(Exception, match="batch as dynamic but your code specialized it"):
        to_onnx(agent, spec, tmp_path / "agent.onnx")


def test_export_writes_onnx_and_hub_and_prints_the_deviation(checkpoint, output_of):
    """Without the environment, which the checkpoint only names."""
    module, path = checkpoint("MLP, shared")
    content = torch.load(path, weights_only=True)
    content["datamodule_hyper_parameters"]["env_id"] = "gone.make"
    torch.save(content, path)
    out = output_of("export", "--ckpt_path", path, "--onnx", "a.onnx", "--hub", "hub")
    assert float(out.split("random observations: ")[1].split()[0]) < 1e-5
    card = Path("hub/README.md").read_text()
    result = f"{np.mean(module.episode_returns):.2f} +/- {np.std(module.episode_returns, ddof=1):.2f}"
    assert f"Return of the last training episodes: {result}, after {module.env_steps} environment" in card
    observation = torch.randn(16, 4)
    assert torch.equal(PPO.from_pretrained("hub").predict(observation), module.predict(observation))


def test_the_input_of_an_actor_of_some_entries_has_the_mask(fit, output_of, tmp_path):
    data = {"env_id": Parts, "num_envs": 2, "num_steps": 16, "total_timesteps": 32}
    module = fit(data, {"agent": functools.partial(MLPAgent, actor_keys=["kind"])})
    module.trainer.save_checkpoint(tmp_path / "masked.ckpt")
    out = output_of("export", "--ckpt_path", tmp_path / "masked.ckpt", "--onnx", "a.onnx")
    assert "input: action_mask (5), kind (1)" in out


def test_a_checkpoint_omits_an_evaluation_of_older_weights(fit, tmp_path):
    options = {"limit_val_batches": 1.0, "val_check_interval": 2, "check_val_every_n_epoch": None}
    saved = [SaveAfter(tmp_path / f"{rollouts}.ckpt", rollouts) for rollouts in (1, 3)]
    data = {"num_envs": 2, "num_steps": 16, "total_timesteps": 128, "eval_episodes": 1}
    fit(data, callbacks=saved, **options)
    for rollouts in (1, 3):
        assert read_checkpoint(tmp_path / f"{rollouts}.ckpt")["evaluation"] is None


def test_an_export_of_nothing_is_refused(refusal_of):
    assert "something to write" in refusal_of("export", "--ckpt_path", "a.ckpt")
