"""Methods with which trained modules leave the package, and come back."""

import tempfile
from pathlib import Path
from typing import Any

import lightning as L

from ppo_lightning import private
from ppo_lightning.checkpoints.run import class_path, complete
from ppo_lightning.errors import ConfigError, import_extra


class Pretrained:
    """Mixin of modules whose trained agent can be exported, and loaded from a folder or the Hub."""

    @classmethod
    def from_pretrained(cls: Any, source: str | Path, **kwargs: Any) -> Any:
        """Load the module from a folder of :meth:`save_pretrained`, or from ``"OWNER/NAME"`` on the Hub.

        Or load a bundled agent, for example ``"best/halfcheetah"`` (``zoo/agents.csv`` lists them).
        Only the checkpoint is read, by ``load_from_checkpoint``, which gets the other arguments.
        """
        from ppo_lightning.export.hub import find_model

        return cls.load_from_checkpoint(find_model(source), **kwargs)

    def save_pretrained(self: Any, folder: str | Path, repo_id: str = "OWNER/NAME") -> None:
        """Write the agent and a model card, with what the folder of its run has: video, curve, settings."""
        require_trained(self)
        checkpoint, run = self.loaded
        if not checkpoint:  # a Trainer has trained the agent, or read its checkpoint
            trainer = self.trainer if private.has_trainer(self) else None  # a copy has none
            # Without a logger, `log_dir` is a folder that others may use.
            run = Path((trainer and trainer.loggers and trainer.log_dir) or folder)
            checkpoint = {
                "pytorch-lightning_version": L.__version__,
                "hyper_parameters": dict(self.hparams),
                "state_dict": self.state_dict(),
            }
            self.on_save_checkpoint(checkpoint)
            checkpoint = complete(checkpoint, self)
            if trainer and not trainer.is_global_zero:
                return
        from ppo_lightning.export.hub import write_folder

        checkpoint = checkpoint | {"state_dict": self.state_dict()}
        write_folder(checkpoint, Path(folder), run, repo_id, class_path(self))

    def push_to_hub(self, repo_id: str) -> str:
        """Upload the folder of :meth:`save_pretrained` to ``"OWNER/NAME"``, and return its address."""
        api = import_extra("huggingface_hub", extra="export").HfApi()
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, repo_id)
            address = api.create_repo(repo_id, exist_ok=True)
            api.upload_folder(repo_id=repo_id, folder_path=folder)
        return str(address)

    def to_onnx(self: Any, file_path: str | Path, input_sample: Any = None, **options: Any) -> Path:
        """Export the agent, see :func:`ppo_lightning.export.onnx.to_onnx`. No ``input_sample`` is needed."""
        from ppo_lightning.export.onnx import to_onnx

        require_trained(self)
        return to_onnx(self.agent, self.observation_spec, file_path, **options)


def require_trained(module: Any) -> None:
    """Raise a ConfigError if a module has no agent yet."""
    if module.agent is None:
        name = type(module).__name__
        raise ConfigError(f"There is no trained agent: call fit, or {name}.load_from_checkpoint(path).")
