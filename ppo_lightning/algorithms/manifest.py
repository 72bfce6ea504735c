"""Implementation details of PPO and their settings in a run."""

from ppo_lightning.rollouts.learner import Learner

Value = bool | float | int | str | list | None  # None: the run does not have the setting

# Huang et al., "The 37 Implementation Details of Proximal Policy Optimization" (2022): title and setting by
# number, which is that of the comments `# detail N`. Without a setting, the detail is on where it applies.
DETAILS: dict[str, tuple[str, str]] = {
    "1": ("vectorized environments", "num_envs"),
    "2": ("orthogonal initialization", ""),
    "3": ("Adam's epsilon", "adam_eps"),
    "4": ("learning rate annealing", "anneal_lr"),
    "5": ("GAE, lambda", "gae_lambda"),
    "6": ("minibatches, times epochs", "num_minibatches"),
    "7": ("advantage normalization", "norm_adv"),
    "8": ("clipped objective", "clip_coef"),
    "9": ("clipped value loss", "clip_vloss"),
    "10": ("entropy bonus in the total loss", "ent_coef"),
    "11": ("gradient clipping", "max_grad_norm"),
    "12": ("debug variables", ""),
    "13": ("separate networks", "separate"),
    "14": ("no-ops at a reset, at most", "noop_max"),
    "15": ("frame skip with max", "frame_skip"),
    "16": ("episodic life", "episodic_life"),
    "17": ("fire at a reset", "fire_reset"),
    "18": ("grey pictures of this size", "screen_size"),
    "19": ("reward clipping to the sign", "clip_reward"),
    "20": ("frame stack", "frame_stack"),
    "21": ("Nature network", ""),
    "22": ("pixels scaled to [0, 1]", ""),
    "23": ("normal distribution", ""),
    "24": ("state-independent log std", ""),
    "25": ("independent components", ""),
    "26": ("separate networks", "separate"),
    "27": ("action clipping", ""),
    "28": ("observation normalization", "norm_obs"),
    "29": ("observation clipping", "norm_obs"),
    "30": ("reward scaling", "norm_reward"),
    "31": ("scaled reward clipping", "norm_reward"),
    "32": ("memory: orthogonal weights", "memory"),
    "33": ("memory zero at first", "memory"),
    "34": ("memory reset at episode ends", "memory"),
    "35": ("minibatches of whole sequences", "memory"),
    "36": ("memory recomputed in the update", "memory"),
    "37": ("independent discrete components", ""),
    "A1": ("clip range annealing", "anneal_clip_coef"),
    "A2": ("ranks that share the gradients", ""),
    "A3": ("early stop by KL", "target_kl"),
    "A4": ("invalid action masking", ""),
    "P1": ("IMPALA network", ""),
    "P2": ("rewards scaled with PPO's own gamma", "norm_reward"),
}


def manifest(module: Learner) -> dict[str, Value]:
    """Return the value of each detail's setting in a run, by number. All ranks return the same."""
    settings = {**module.data.hparams, **module.agent.hparams, **module.hparams}
    settings |= {"num_envs": module.data.num_envs, "separate": module.agent.critic_body is not None}
    return {
        number: settings.get(name, getattr(module.data.env, name, None)) if name else True
        for number, (_, name) in DETAILS.items()
    }
