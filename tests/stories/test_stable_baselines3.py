"""One update of Stable-Baselines3: advantages, losses and weights are the same from the same rollout."""

import numpy as np
import pytest
import torch

from ppo_lightning import PPO, RolloutDataModule
from ppo_lightning.algorithms import losses
from ppo_lightning.algorithms.minibatches import mean_of, split_epoch

NUM_ENVS, NUM_STEPS, BATCH_SIZE, EPOCHS = 2, 64, 32, 3
SAME = {"gamma": 0.97, "ent_coef": 0.01}  # of both programs; the rest are defaults of Stable-Baselines3
THEIRS = SAME | {"n_steps": NUM_STEPS, "batch_size": BATCH_SIZE, "n_epochs": EPOCHS, "vf_coef": 0.7}
OURS = SAME | {
    "num_minibatches": NUM_ENVS * NUM_STEPS // BATCH_SIZE,
    "update_epochs": EPOCHS,
    "vf_coef": 2 * 0.7,  # of half the squared error
    "clip_vloss": False,
    "learning_rate": 3e-4,
    "anneal_lr": False,
}


class SameData(PPO):
    """PPO that learns from given minibatches, starting at given weights."""

    def configure_model(self):
        super().configure_model()
        copy_weights(self.policy, self.agent)

    def advantages(self, rollout):
        return rollout

    def minibatches(self, rollout):
        yield from split_epoch(next(self.epochs), self.hparams.num_minibatches, self.hparams.norm_adv)

    def log_rollout(self, rollout, metrics):
        self.metrics = {name: value.item() for name, value in mean_of(metrics).items()}


def pairs(policy, agent):
    networks = policy.mlp_extractor
    for theirs, ours in ((networks.policy_net, agent.actor_body), (networks.value_net, agent.critic_body)):
        yield from zip([theirs[0], theirs[2]], ours.layers, strict=True)
    yield policy.action_net, agent.head.linear
    yield policy.value_net, agent.critic


def copy_weights(policy, agent):
    for theirs, ours in pairs(policy, agent):
        ours.load_state_dict(theirs.state_dict())
    if hasattr(policy, "log_std"):
        agent.head.log_std.data.copy_(policy.log_std)


@pytest.mark.parametrize(("env_id", "seed"), [("CartPole-v1", 1), ("Pendulum-v1", 2)])
def test_losses_and_weights_are_those_of_stable_baselines3(env_id, seed, make_trainer):
    sb3 = pytest.importorskip("stable_baselines3", reason="in the extras dev and benchmark")
    from stable_baselines3.common.logger import configure

    env = sb3.common.env_util.make_vec_env(env_id, n_envs=NUM_ENVS, seed=seed)
    theirs = sb3.PPO("MlpPolicy", env, seed=seed, device="cpu", **THEIRS)
    theirs.set_logger(configure(None, []))
    rollout = NUM_ENVS * NUM_STEPS
    theirs.learn(total_timesteps=rollout)  # so that values and entropies are not those of the first weights
    _, callback = theirs._setup_learn(rollout)
    theirs.collect_rollouts(env, callback, theirs.rollout_buffer, theirs.n_steps)
    theirs.policy.optimizer.state.clear()  # Adam starts anew here, too

    ours = SameData(**OURS)
    ours.policy = theirs.policy
    buffer = theirs.rollout_buffer
    check_advantages(buffer, theirs)
    np.random.seed(seed)  # noqa: NPY002  (the generator of its minibatches)
    ours.epochs = iter([epoch_of(buffer, env_id) for _ in range(EPOCHS)])
    make_trainer().fit(
        ours, RolloutDataModule(env_id, "gymnasium", NUM_ENVS, NUM_STEPS, total_timesteps=rollout)
    )
    np.random.seed(seed)  # noqa: NPY002  (the generator of its minibatches)
    theirs.train()

    logged = theirs.logger.name_to_value
    policy_loss, value_loss = logged["train/policy_gradient_loss"], logged["train/value_loss"]
    assert ours.metrics["policy_loss"] == pytest.approx(policy_loss, rel=1e-4, abs=1e-6)
    assert 2 * ours.metrics["value_loss"] == pytest.approx(value_loss, rel=1e-4)
    assert ours.metrics["entropy"] == pytest.approx(-logged["train/entropy_loss"], rel=1e-5)
    assert ours.metrics["clipfrac"] == pytest.approx(logged["train/clip_fraction"], abs=1e-6)
    for expected, layer in pairs(theirs.policy, ours.agent):
        torch.testing.assert_close(layer.weight, expected.weight, rtol=1e-4, atol=1e-5)


def epoch_of(buffer, env_id):
    """Return one epoch of minibatches of Stable-Baselines3 as one dictionary of tensors."""
    samples = [*buffer.get(BATCH_SIZE)]
    fields = {"observation": "observations", "action": "actions", "action_log_prob": "old_log_prob"}
    fields |= {"state_value": "old_values", "advantage": "advantages", "value_target": "returns"}
    epoch = {key: torch.cat([getattr(sample, name) for sample in samples]) for key, name in fields.items()}
    if env_id == "CartPole-v1":
        epoch["action"] = epoch["action"].long().flatten()
    return epoch | {key: epoch[key].view(-1, 1) for key in ("state_value", "advantage", "value_target")}


def check_advantages(buffer, theirs):
    """GAE gives the advantages of the buffer, whose rewards contain the bootstrap at time limits."""
    starts = np.concatenate([buffer.episode_starts[1:], theirs._last_episode_starts[None]])
    value = torch.from_numpy(buffer.values.T)
    last = theirs.policy.predict_values(theirs.policy.obs_to_tensor(theirs._last_obs)[0]).detach()
    done = torch.from_numpy(starts.T > 0)
    advantage, target = losses.gae(
        torch.from_numpy(buffer.rewards.T.copy()),
        value,
        torch.cat([value[:, 1:], last], dim=1),
        done,
        done,
        theirs.gamma,
        theirs.gae_lambda,
    )
    torch.testing.assert_close(advantage, torch.from_numpy(buffer.advantages.T), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target, torch.from_numpy(buffer.returns.T), rtol=1e-4, atol=1e-4)
