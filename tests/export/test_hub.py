"""Agents in folders and in repositories of the Hub, which a local server stands in for."""

import base64
import functools
import http.server
import json
import os
import pickle
import resource
import shutil
import threading
import zipfile
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from ppo_lightning import (
    DQN,
    PPG,
    PPO,
    RND,
    SAC,
    AgentModule,
    ConfigError,
    MLPAgent,
    RecurrentPPO,
    RolloutDataModule,
)
from ppo_lightning.commands import cli
from tests.helpers import REACH, short

hub = pytest.importorskip("huggingface_hub")
SHA = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """The endpoints of the Hub that uploads and downloads of small files use."""

    repos: dict  # name -> path -> content
    listed: dict  # name -> paths that a listing adds
    requested: list

    def reply(self, content, kind="application/json", code=200, **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.requested.append(path)
        parts = path.strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if name not in self.repos:
            self.reply({"error": "Repository not found"}, code=404, X_Error_Code="RepoNotFound")
        elif parts[0] == "api" and parts[4:] in ([], ["revision", "main"]):
            self.reply({"id": name, "sha": SHA})
        elif parts[0] == "api":
            files = [*self.repos[name], *self.listed]
            size = {file: len(self.repos[name].get(file, b"x")) for file in files}
            self.reply(
                [{"type": "file", "path": file, "size": size[file], "oid": "b" * 40} for file in files]
            )
        else:
            content = self.repos[name]["/".join(parts[4:])]
            kind = "application/octet-stream"
            self.reply(content, kind, ETag='"b"', X_Repo_Commit=SHA)

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer token":
            return self.reply({"error": "Invalid username or password."}, code=401)
        if self.path == "/api/repos/create":
            name = "{organization}/{name}".format(**json.loads(body))
            self.repos[name] = {}
            return self.reply({"url": f"http://{self.headers['Host']}/{name}"})
        if self.path == "/api/validate-yaml":
            return self.reply({"errors": [], "warnings": []})
        name = "/".join(self.path.split("/")[3:5])
        if "/preupload/" in self.path:
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            return self.reply(
                {"files": [{"path": file["path"]} | mode for file in json.loads(body)["files"]]}
            )
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.repos[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        url = f"http://{self.headers['Host']}/{name}/commit/{SHA}"
        return self.reply({"success": True, "commitOid": SHA, "commitUrl": url})

    def log_message(self, *args):
        pass


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Serve a Hub, and return its handler."""
    handler = type("Served", (Hub,), {"repos": {}, "listed": {}, "requested": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "token")
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield handler
        server.shutdown()


SMALL = {"num_envs": 2, "num_steps": 16, "total_timesteps": 64}
LSTM = {"agent": functools.partial(MLPAgent, memory="lstm", shared=True), "num_minibatches": 2}
OFF_POLICY = {"learning_starts": 8, "batch_size": 8, "buffer_size": 64}
KINDS = {
    "PPO": (PPO, SMALL, {}),
    "Dict observations": (PPO, SMALL | REACH | {"total_timesteps": 64}, {}),
    "memory": (RecurrentPPO, SMALL, LSTM),
    "RND": (RND, SMALL, {"num_iterations_obs_norm_init": 1}),
    "PPG": (PPG, SMALL, {"n_iteration": 1, "num_aux_rollouts": 2}),
    "SAC": (SAC, SMALL | {"env_id": "Pendulum-v1", "num_steps": 4}, OFF_POLICY | {"save_buffer": True}),
    "DQN": (DQN, SMALL | {"num_steps": 4}, OFF_POLICY | {"train_frequency": 8}),
}


@pytest.fixture(scope="module")
def trained(fit_once):
    """Return a function that returns the trained module of a kind."""
    return functools.cache(lambda kind: fit_once(KINDS[kind][1], KINDS[kind][2], ppo=KINDS[kind][0]))


def actions(module, kind):
    """Return what a module does in ten steps of new environments."""
    env = gymnasium.make(KINDS[kind][1].get("env_id", "CartPole-v1"))
    observation, _ = env.reset(seed=5)
    taken, memory = [], None
    for _ in range(10):
        action = module.predict(observation, memory=memory)
        if kind == "memory":
            action, memory = action
        taken.append(np.array(action))
        observation, *_ = env.step(action)
    return np.stack(taken)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_the_trained_agent(kind, trained, tmp_path):
    module, algorithm = trained(kind), KINDS[kind][0]
    Path(module.trainer.default_root_dir, "cli_config.yaml").touch()  # of others: there is no logger
    module.save_pretrained(tmp_path / "agent")
    assert {path.name for path in (tmp_path / "agent").iterdir()} == {"README.md", "model.ckpt"}
    loaded = algorithm.from_pretrained(tmp_path / "agent")
    assert not loaded.loaded[0]["state_dict"]  # a second copy
    assert type(loaded) is type(AgentModule.from_pretrained(tmp_path / "agent")) is algorithm
    for key, value in module.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    assert np.array_equal(actions(module, kind), actions(loaded, kind))
    explores = [getattr(agent.head, "exploration", None) for agent in (module.agent, loaded.agent)]
    assert explores[0] == explores[1]
    loaded.save_pretrained(tmp_path / "again")  # without a Trainer
    names = [tmp_path / folder / "model.ckpt" for folder in ("agent", "again")]
    first, second = (torch.load(name, weights_only=True) for name in names)
    assert first.keys() == second.keys() and "optimizer_states" not in first and "beside" not in first
    assert repr({**first, "state_dict": 0}) == repr({**second, "state_dict": 0})


@pytest.mark.parametrize(("package", "base"), [("__main__", DQN), ("my", PPO)])
def test_the_card_imports_the_class_of_the_module(package, base, trained, tmp_path, monkeypatch):
    name = f"My{base.__name__}" if base is DQN else base.__name__
    module = trained(base.__name__)
    monkeypatch.setattr(module, "__class__", type(name, (base,), {"__module__": package}))
    module.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert f"# {name} on CartPole-v1" in text and f"from {package} import {name}\n" in text


def test_a_folder_of_another_algorithm_is_named(trained, tmp_path):
    trained("SAC").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"The checkpoint is of SAC and the module of PPO: give"):
        PPO.from_pretrained(tmp_path)


def test_a_repository_gives_the_trained_agent(trained, served):
    """The card names the repository, and nothing but the checkpoint is downloaded."""
    module = trained("memory")
    assert module.push_to_hub("owner/name").endswith("/owner/name")
    repo = served.repos["owner/name"]
    assert repo.keys() == {"README.md", "model.ckpt"}
    assert b'RecurrentPPO.from_pretrained("owner/name")' in repo["README.md"]
    served.listed |= dict.fromkeys(
        ["../../../evil", "..\\evil", "/tmp/evil", "modeling.py", "model.ckpt/evil"]
    )
    loaded = RecurrentPPO.from_pretrained("owner/name")
    assert np.array_equal(actions(module, "memory"), actions(loaded, "memory"))
    assert {path for path in served.requested if "resolve" in path} == {
        f"/owner/name/resolve/{SHA}/model.ckpt"
    }


def test_what_the_hub_lacks_ends_in_one_sentence(served, tmp_path):
    for name in ("owner/none", "../owner/name", "a/b/c", ""):
        with pytest.raises(ConfigError, match=r"is neither a folder nor a bundled agent .+ failed: .+"):
            PPO.from_pretrained(name) if name else PPO.from_pretrained(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"cartpole is .* bundled agent: did you mean classic/cartpole\?"):
        PPO.from_pretrained("cartpole")
    served.repos["owner/name"] = {"model.safetensors": b"weights"}
    with pytest.raises(ConfigError, match=r"owner/name has no file model\.ckpt: give a folder that save_pre"):
        PPO.from_pretrained("owner/name")
    with pytest.raises(ConfigError, match="There is no trained agent"):
        PPO().save_pretrained(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a command-line run with videos."""
    folder = tmp_path_factory.mktemp("run")
    logger = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(folder)]
    video = ["--trainer.callbacks+=ppo_lightning.callbacks.CaptureVideo", "--trainer.callbacks.every", "2"]
    sizes = short(num_envs=2, num_steps=16, eval_episodes=2, rollouts_per_epoch=2)
    cli.main(["fit", *sizes, *video, "--trainer.callbacks.max_frames", "9", *logger])
    return next(folder.rglob("checkpoints")).parent


def test_the_card_shows_what_the_folder_of_the_run_has(run, tmp_path, output_of, make_trainer):
    path = str(next((run / "checkpoints").glob("*.ckpt")))
    assert f"hub: {tmp_path / 'a'}" in output_of("export", "--ckpt_path", path, "--hub", tmp_path / "a")
    loaded = PPO.load_from_checkpoint(path)
    make_trainer(limit_val_batches=1).validate(loaded, RolloutDataModule(eval_episodes=2), verbose=False)
    loaded.save_pretrained(tmp_path / "b")
    for folder in (tmp_path / "a", tmp_path / "b"):
        names = {"README.md", "cli_config.yaml", "curve.png", "model.ckpt", "replay.mp4"}
        assert {path.name for path in folder.iterdir()} == names
        (video,) = (run / "videos").iterdir()
        assert (folder / "replay.mp4").read_bytes() == video.read_bytes()
        card = hub.ModelCard.load(folder / "README.md")
        (result,) = card.data.eval_results
        evaluation = torch.load(path, weights_only=True)["evaluation"]
        value = "{episodic_return:.2f} +/- {episodic_return_std:.2f}".format(**evaluation)
        assert (result.metric_value, result.dataset_name) == (value, "CartPole-v1")
        text = card.text
        assert f"Return of the last evaluation: {value}, after 64 environment steps." in text
        assert "--config cli_config.yaml" in text and "(curve.png)" in text and 'src="replay.mp4"' in text
        assert "| learning_rate | 0.00025 |" in text
        names = {"observation": np.zeros(4, np.float32)}
        exec(text.split("```python")[1].split("```")[0].replace("OWNER/NAME", str(folder)), names)
        assert names["action"] in (0, 1)
    PPO.from_pretrained(folder).save_pretrained(folder)
    assert hub.ModelCard.load(folder / "README.md").text == text
    make_trainer().fit(loaded, RolloutDataModule(**SMALL))
    loaded.save_pretrained(tmp_path / "c")
    assert "Return of the last training episodes: " in (tmp_path / "c/README.md").read_text()
    alone = shutil.copy(path, tmp_path / "alone.ckpt")
    output_of("export", "--ckpt_path", alone, "--hub", tmp_path / "a")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"README.md", "model.ckpt", "replay.mp4"}


class Code:
    def __reduce__(self):
        return os.system, ("touch executed",)


def rewritten(path, compression, **members):
    """Write a checkpoint again with other members."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(name, members.get(name.rpartition("/")[2].partition(".")[0], content))


NO_FILE, NO_CHECKPOINT = r"has no file model\.ckpt: give", "it is damaged, or not a checkpoint"
HOSTILE = {  # what it does to the file of a folder, and the sentence
    "no file": (lambda path: path.unlink(), NO_FILE),
    "a folder in its place": (lambda path: (path.unlink(), path.mkdir()), NO_FILE),
    "a link to another file": (lambda path: (path.unlink(), path.symlink_to("/etc/passwd")), NO_CHECKPOINT),
    "a link without an end": (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), NO_FILE),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), NO_FILE),
    "JSON": (lambda path: path.write_text('{"agent": {}}'), NO_CHECKPOINT),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps(Code())), NO_CHECKPOINT),
    "a pickle in a checkpoint": (lambda path: torch.save({"agent": Code()}, path), "would execute code"),
    "a compressed checkpoint": (
        lambda path: rewritten(path, zipfile.ZIP_DEFLATED, data=b"0" * 3 * 10**8),
        "it is compressed",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_ends_in_one_sentence_and_executes_nothing(name, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    trained("PPO").save_pretrained("agent")
    for module in ("evil.py", "agent/model.py", "agent/__init__.py"):
        (tmp_path / module).write_text("open('executed', 'w')")
    (tmp_path / "agent/cli_config.yaml").write_text("model: {class_path: evil.Agent}")
    change, sentence = HOSTILE[name]
    change(tmp_path / "agent/model.ckpt")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=sentence) as error:
        PPO.from_pretrained("agent")
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    assert not (tmp_path / "executed").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kB"
