"""Former names of classes and environments, which older checkpoints have."""

from typing import Any

# Former name -> name now, of a class or of an environment.
MOVED: dict[str, str] = {
    "ppo_lightning.models.foreign.ForeignAgent": "ppo_lightning.models.networks.NetworkAgent",
}


def use_present_names(checkpoint: dict[str, Any]) -> None:
    """Replace former names in a checkpoint: its algorithm, its agent and its environment."""
    module, agent = checkpoint["hyper_parameters"], checkpoint["agent"]
    data = checkpoint["datamodule_hyper_parameters"]
    for settings, key in ((module, "_class_path"), (agent, "class_path"), (data, "env_id")):
        if key in settings:
            settings[key] = MOVED.get(str(settings[key]), settings[key])
    # Until residual bodies left, MLPAgent had this argument, whose name its base class still has.
    arguments = agent["init_args"]
    if agent["class_path"] == "ppo_lightning.models.mlp.MLPAgent" and arguments.get("body") == "mlp":
        del arguments["body"]
