"""The notebooks run from top to bottom, with small budgets."""

import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"

# Notebook -> replacements that shorten it, the number of pictures, and a text in the outputs.
QUICK = {
    "1_cartpole.ipynb": ({"total_timesteps=100_000": "total_timesteps=2_048"}, 2, "wall time"),
    "2_details.ipynb": (
        {"TOTAL = 40_000": "TOTAL = 2_048", "seeds = (1, 2)": "seeds = (1,)"},
        2,
        "largest distance",
    ),
    "3_your_own.ipynb": ({"TOTAL = 60_000": "TOTAL = 1_024"}, 3, "wall time"),
    "4_benchmark.ipynb": ({'TOTAL = "20000"': 'TOTAL = "1024"'}, 1, "difference [95 %]"),
    "5_use_an_agent.ipynb": ({"TOTAL = 40_000": "TOTAL = 1_024"}, 1, "onnxruntime:"),
}


@pytest.mark.integration
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    # EnvPool, which other tests import, disables matplotlib's pictures.
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = nbformat.read(path, as_version=4)
    shorter, pictures, text = QUICK[path.name]
    for long, short in shorter.items():
        assert sum(cell.source.count(long) for cell in notebook.cells) == 1
        for cell in notebook.cells:
            cell.source = cell.source.replace(long, short)
    for folder in ("configs", "benchmarks/results/compare"):
        shutil.copytree(NOTEBOOKS.parent / folder, tmp_path / folder)
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    images = [output for output in outputs if {"image/png", "image/gif"} & set(output.get("data", {}))]
    assert len(images) >= pictures
    assert text in str(outputs)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_is_committed_with_its_pictures(path):
    notebook = nbformat.read(path, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)


KERNEL = """
import os, signal, sys
WIDGETS or sys.modules.update(ipywidgets=None)  # as where it is not installed
import lightning as L, gymnasium
import lightning.pytorch.trainer.connectors.callback_connector as connector
from ppo_lightning import PPO, RolloutDataModule
from ppo_lightning.callbacks import Doctor, LivePlot
connector._RICH_AVAILABLE = RICH

class Act(L.Callback):
    def __init__(self, path=None):
        self.path = path
    def on_train_batch_end(self, trainer, module, *args):
        if module.rollouts_done == 3 and self.path:
            trainer.save_checkpoint(self.path)
        elif module.rollouts_done == 3:
            os.kill(os.getpid(), signal.SIGINT)

class Talking(gymnasium.Wrapper):
    def reset(self, **options):
        print("\\nhello\\nagain", end="")
        return super().reset(**options)

def fit(*callbacks, env_id="CartPole-v1", **model):
    data = RolloutDataModule(env_id, num_envs=1, num_steps=64, total_timesteps=640, eval_episodes=1)
    L.Trainer(accelerator="cpu", logger=False, callbacks=[*callbacks]).fit(PPO(**model), data)
"""
SAID = {  # cell: what it shows
    "fit(Doctor(every=2), learning_rate=.5)": "doctor, after 192 environment steps: large KL: ",
    "fit(Act('/proc/none/a.ckpt'))": "NO CHECKPOINT was written to /proc/none/a.ckpt",
    "fit(env_id=lambda: Talking(gymnasium.make('CartPole-v1')))": "hello",
    "fit(LivePlot(every=0.0), Doctor(every=2), learning_rate=.5)": "doctor, after 192 ",
    "fit(Act())": "Interrupted after 192 environment steps: ",
    "fit()": "wall time",
}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("rich", "widgets"),
    [(True, True), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, 0), (0, 1), (0, 0)))],
)
def test_a_kernel_shows_messages_one_bar_and_no_traceback(rich, widgets, tmp_path, monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)
    cells = [KERNEL.replace("RICH", str(bool(rich))).replace("WIDGETS", str(bool(widgets))), *SAID]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", allow_errors=True, resources=resources
    ).execute()
    for cell in notebook.cells[1:]:
        text = "".join(output.get("text", "") for output in cell.outputs)
        errors = [output for output in cell.outputs if output.output_type == "error"]
        if cell.source == "fit(Act())":
            (error,) = errors
            assert len(error.traceback) == 1 and "preempted.ckpt" in error.evalue
            text += error.traceback[0]
        else:
            assert not errors
        assert SAID[cell.source] in text
        assert "return=" in text and "Validation" not in text
        plots = [output for output in cell.outputs if "image/png" in output.get("data", {})]
        assert len(plots) == ("LivePlot" in cell.source)
