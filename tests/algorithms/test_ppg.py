"""Phasic Policy Gradient: both phases by hand, the order of the phases, resumed runs, and refusals."""

import functools
import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Unbounded

from ppo_lightning import PPG, PPO, CNNAgent, ConfigError, MLPAgent
from ppo_lightning.algorithms.ppg import POLICY
from ppo_lightning.models.init import normed
from tests.helpers import SaveAfter, require_same

DATA = {"num_envs": 4, "num_steps": 16, "total_timesteps": 64 * 7}
SHARED = functools.partial(MLPAgent, shared=True)
# Two auxiliary phases and one rollout more.
MODEL = {
    "n_iteration": 3,
    "e_auxiliary": 2,
    "num_aux_rollouts": 2,
    "num_minibatches": 2,
    "learning_rate": 1e-3,
    "agent": SHARED,
}


class Traced(PPG):
    """Recorder of the learning rate and the losses of each update, in both phases."""

    def record(self, phase, update, minibatches):
        metrics = []
        for minibatch in minibatches:
            metrics += update([minibatch])
            lr = self.optimizers().param_groups[0]["lr"]
            self.updates.append((phase, lr, metrics[-1], minibatch))
        return metrics

    def update(self, minibatches):
        return self.record("policy", super().update, minibatches)

    def on_train_start(self):
        super().on_train_start()
        self.updates = []
        self.optimize_auxiliary = functools.partial(self.record, "auxiliary", self.optimize_auxiliary)


@pytest.fixture
def by_hand():
    """Return a PPG module in float64: one hidden unit, tanh(w x) with w = atanh(1/2), no biases.

    At x = 1 the feature is 1/2, the action probabilities are 3/4 and 1/4, V is 1 and the auxiliary value 3.
    At x = -1, the feature and both values are negative, and the probabilities are exchanged.
    """
    module = PPG(beta_clone=2.0, vf_coef=0.5, ent_coef=0.0)
    module.agent = MLPAgent(Unbounded((1,)), Categorical(2, shape=()), hidden_sizes=(1,), shared=True)
    module.add_networks(None)
    module.double()
    with torch.no_grad():
        module.agent.actor_body.layers[0].weight.fill_(math.atanh(0.5))
        module.agent.head.linear.weight.copy_(
            torch.tensor([[math.log(3)], [-math.log(3)]], dtype=torch.float64)
        )
        module.agent.critic.weight.fill_(2)
        module.auxiliary_critic.weight.fill_(6)
    return module


def gradients(module, loss):
    parameters = {
        "body": module.agent.actor_body.layers[0].weight,
        "critic": module.agent.critic.weight,
        "auxiliary": module.auxiliary_critic.weight,
    }
    grads = torch.autograd.grad(loss, list(parameters.values()))
    return {name: grad.item() for name, grad in zip(parameters, grads, strict=True)}


OBSERVATION = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
TARGET = torch.tensor([[2.0], [-2.0]], dtype=torch.float64)


def test_the_auxiliary_phase_by_hand(by_hand):
    """The old policy is uniform, and the targets are 2 and -2: all errors are 1."""
    minibatch = {
        "observation": OBSERVATION,
        "action": torch.tensor([0, 0]),
        "value_target": TARGET,
        f"{POLICY}0": torch.full((2, 2), math.log(0.5), dtype=torch.float64),
    }
    loss, parts = by_hand.auxiliary_loss(minibatch)
    kl = 0.5 * math.log(4 / 3)  # of (1/2, 1/2) to (3/4, 1/4)
    assert parts["kl_loss"].item() == pytest.approx(kl, abs=1e-12)
    assert parts["aux_value_loss"].item() == pytest.approx(0.5, abs=1e-12)
    assert parts["real_value_loss"].item() == pytest.approx(0.5, abs=1e-12)
    assert loss.item() == pytest.approx(1 + 2 * kl, abs=1e-12)
    # V - R = -1 and 1, the auxiliary value - R = 1 and -1, the slope of tanh is 3/4 at both.
    expected = {
        "critic": -0.5,
        "auxiliary": 0.5,
        "body": 1 * 6 * 0.75 + 2 * (0.25 * 2 * math.log(3)) * 0.75,  # the value's 2 * 0.75 is not in it
    }
    assert gradients(by_hand, loss) == pytest.approx(expected, abs=1e-12)


def test_the_policy_phase_by_hand(by_hand, monkeypatch):
    """Advantages of 3 and 1 are normalized over the rollout, not over its minibatches of one step."""
    monkeypatch.setattr(PPG, "fitting", False)
    rollout = TensorDict(
        {
            "observation": OBSERVATION[None],
            "action": torch.tensor([[0, 0]]),
            "action_log_prob": torch.tensor([[0.75, 0.25]], dtype=torch.float64).log(),
            "state_value": torch.tensor([[[1.0], [-1.0]]], dtype=torch.float64),
            "next": {
                "observation": OBSERVATION[None],
                "reward": torch.tensor([[[4.0], [0.0]]], dtype=torch.float64),
                **{key: torch.ones(1, 2, 1, dtype=torch.bool) for key in ("done", "terminated")},
            },
        },
        batch_size=(1, 2),
    )
    rollout = by_hand.advantages(rollout)
    assert rollout["value_target"].flatten().tolist() == [4, 0]
    half = 1 / math.sqrt(2)
    assert rollout["advantage"].flatten().tolist() == pytest.approx([half, -half], abs=1e-7)
    minibatch = {key: rollout[key][0] for key in by_hand.minibatch_keys}
    loss, parts = by_hand.total_loss(minibatch)
    assert parts["policy_loss"].item() == pytest.approx(0, abs=1e-12)  # the ratios are 1
    assert parts["value_loss"].item() == pytest.approx(0.5 * (9 + 1) / 2, abs=1e-12)
    assert loss.item() == pytest.approx(0.5 * 2.5, abs=1e-12)
    # Of log pi(0), the derivative by the feature is 2 ln 3 times the probability of the other action.
    slopes = (2 * math.log(3) * 0.25 * 0.75, 2 * math.log(3) * 0.75 * 0.75 * -1)
    expected = {
        "critic": 0.5 * (-3 * 0.5 + -1 * -0.5) / 2,
        "auxiliary": 0.0,
        "body": -(half * slopes[0] - half * slopes[1]) / 2,
    }
    assert gradients(by_hand, loss) == pytest.approx(expected, abs=1e-7)
    by_hand.hparams.adv_eps = math.sqrt(2)  # as large as the standard deviation
    again = by_hand.advantages(rollout)["advantage"]
    assert again.flatten().tolist() == pytest.approx([half / 2, -half / 2], abs=1e-7)


def test_value_gradients_do_not_reach_the_body_of_the_policy():
    module = PPG()
    module.agent = MLPAgent(Unbounded((3,)), Categorical(2, shape=()))
    module.add_networks(None)
    assert module.auxiliary_critic.weight.norm().item() == pytest.approx(0.1)
    torch.nn.init.normal_(module.agent.critic.weight)
    minibatch = {"observation": torch.randn(8, 3), "action": torch.zeros(8, dtype=torch.int64)}
    module.evaluate(minibatch).value.sum().backward()
    assert all(parameter.grad is None for parameter in module.agent.actor_body.parameters())
    assert all(parameter.grad.any() for parameter in module.agent.critic_body.parameters())
    minibatch |= {"value_target": torch.ones(8, 1), f"{POLICY}0": torch.zeros(8, 2)}
    module.auxiliary_loss(minibatch)[0].backward()
    assert module.agent.actor_body.layers[0].weight.grad.any()


@pytest.fixture(scope="module")
def traced(fit_once):
    """Return the module of a finished run, whose observations name environment, episode and step."""
    return fit_once(DATA | {"env_id": "Script-v0"}, MODEL, ppo=Traced)


def test_phases_alternate_and_the_learning_rate_falls_with_the_iterations(traced):
    phases = [phase for phase, *_ in traced.updates]
    policy, auxiliary = ["policy"] * (3 * 2), ["auxiliary"] * (2 * 6)  # 12 sequences, 2 in a minibatch
    assert phases == policy + auxiliary + policy + auxiliary + ["policy"] * 2
    rates = [lr for _, lr, *_ in traced.updates]
    # The auxiliary phase has the learning rate of the iteration before it.
    iterations = [*(i for i in (0, 1, 2) for _ in range(2)), *[2] * 12]
    iterations += [i + 3 for i in iterations] + [6, 6]
    assert rates == pytest.approx([1e-3 * (1 - i / 7) for i in iterations])
    assert traced.trainer.global_step == 2 * 7 + 2 * 12


def test_each_pass_sees_every_stored_sequence_once_and_whole(traced):
    seen = [minibatch for phase, *_, minibatch in traced.updates if phase == "auxiliary"]
    assert len(seen) == 2 * 2 * 6
    stored = torch.cat([minibatch["observation"] for minibatch in seen[:6]])
    for start in (0, 6):
        rows = torch.cat([minibatch["observation"] for minibatch in seen[start : start + 6]])
        assert rows.unique(dim=0).shape == (3 * 64, 3)
        assert torch.equal(rows.unique(dim=0), stored.unique(dim=0))
    assert not torch.equal(seen[0]["observation"], seen[6]["observation"]), "the order is drawn anew"
    for minibatch in seen:
        for sequence in minibatch["observation"].split(16):
            assert len(sequence[:, 0].unique()) == 1, "one environment"
            episode, step = sequence[:, 1], sequence[:, 2]
            assert bool(((episode[1:] > episode[:-1]) | (step[1:] == step[:-1] + 1)).all()), "in order"


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Parts-v0", "Reach-v0"])
def test_the_old_policy_is_that_before_the_auxiliary_phase(fit, env_id):
    module = fit(DATA | {"env_id": env_id}, MODEL | {"beta_clone": 0.1}, ppo=Traced)
    for first in (6, 6 + 12 + 6):
        divergences = [parts["kl_loss"].item() for _, _, parts, _ in module.updates[first : first + 12]]
        assert abs(divergences[0]) < 1e-7 < min(divergences[2:])
        assert max(divergences) < 1


def test_a_phase_stores_bytes_and_only_what_it_needs(monkeypatch):
    monkeypatch.setattr(PPO, "advantages", lambda self, rollout: rollout)
    module = PPG(norm_adv=False)
    rollout = TensorDict(
        {
            "observation": torch.zeros(2, 4, 3, 64, 64, dtype=torch.uint8),
            "action": torch.zeros(2, 4, dtype=torch.int64),
            "value_target": torch.zeros(2, 4, 1),
            "advantage": torch.zeros(2, 4, 1),
        },
        batch_size=(2, 4),
    )
    module.advantages(rollout)
    rollout["observation"].fill_(1)  # the collector overwrites its storage
    (stored,) = module.rollouts
    assert not stored["observation"].any()
    assert sum(tensor.nbytes for tensor in stored.values()) == 8 * (3 * 64 * 64 + 8 + 4)


def test_invalid_steps_have_no_weight_in_the_auxiliary_phase(by_hand):
    torch.manual_seed(0)
    minibatch = {
        "observation": torch.randn(6, 1, dtype=torch.float64),
        "action": torch.zeros(6, dtype=torch.int64),
        "value_target": torch.randn(6, 1, dtype=torch.float64),
        f"{POLICY}0": torch.randn(6, 2, dtype=torch.float64).log_softmax(-1),
    }
    valid = torch.tensor([True, False, True, True, False, True])
    alone = {key: tensor[valid] for key, tensor in minibatch.items()}
    weighted = minibatch | {"weight": valid * (6 / 4)}
    alone, weighted = (by_hand.auxiliary_loss(rows) for rows in (alone, weighted))
    torch.testing.assert_close(weighted, alone, atol=1e-12, rtol=0)


def test_steps_that_only_reset_enter_neither_the_normalization_nor_the_auxiliary_phase(fit):
    data = DATA | {"env_id": "tests.environments.NextStepVector", "env_kwargs": {"env_id": "Hopper-v5"}}
    module = fit(data, MODEL | {"num_minibatches": 1}, ppo=Traced)
    for phase, *_, minibatch in module.updates:
        valid = minibatch["weight"].flatten() > 0
        if phase == "policy":  # whose minibatch is the rollout
            advantage = minibatch["advantage"].flatten()[valid]
            assert advantage.mean().abs() < 1e-5 and advantage.std().item() == pytest.approx(1, abs=1e-3)
    weights = [m["weight"] for phase, *_, m in module.updates if phase == "auxiliary"]
    assert any((weight == 0).any() for weight in weights)
    for weight in weights:
        assert weight.mean().item() == pytest.approx(1, abs=1e-6)


RUNS = {
    "discrete, shared": ({}, SHARED),
    "discrete, dual": ({}, MLPAgent),
    "continuous": ({"env_id": "Pendulum-v1"}, functools.partial(MLPAgent, shared=True, norm_obs=True)),
}


def state(module):
    return torch.cat([tensor.double().flatten() for tensor in module.state_dict().values()])


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_resumes_in_the_middle_of_a_policy_phase_to_the_bit(kind, fit, tmp_path):
    data, agent = RUNS[kind]
    model = MODEL | {"agent": agent}
    paths = {rollouts: tmp_path / f"{rollouts}.ckpt" for rollouts in (2, 3, 5)}
    saves = [SaveAfter(path, rollouts) for rollouts, path in paths.items()]
    whole = fit(DATA | data, model, ppo=PPG, callbacks=saves)
    for path, stored in zip(paths.values(), (2, 0, 2), strict=True):
        assert len(torch.load(path, weights_only=True)["auxiliary"]["rollouts"]) == stored
        require_same(whole, fit(DATA | data, model, ppo=PPG, ckpt_path=path))
    sizes = [path.stat().st_size for path in paths.values()]
    assert sizes[1] < sizes[0], "after an auxiliary phase, a checkpoint has no rollouts"


def test_a_phase_resumes_with_rollouts_of_its_size_only(fit, tmp_path):
    path = tmp_path / "2.ckpt"
    fit(DATA, MODEL, ppo=PPG, callbacks=[SaveAfter(path, 2)])
    sizes = {"num_envs": 2, "num_steps": 32}
    # Phases, and sequences of each: the rollouts of other sizes, or too many of them, are left out.
    for data, n_iteration, phases, sequences in ((sizes, 3, 1, 6), ({}, 2, 3, 8), ({}, 4, 1, 16)):
        resumed = fit(DATA | data, MODEL | {"n_iteration": n_iteration}, ppo=Traced, ckpt_path=path)
        updates = [phase for phase, *_ in resumed.updates].count("auxiliary")
        assert updates == phases * 2 * sequences // 2


@pytest.mark.integration
@pytest.mark.parametrize("kind", RUNS)
def test_eager_and_compiled_runs_agree(fit, kind):
    """Past the second auxiliary phase."""
    data, agent = RUNS[kind]
    model = MODEL | {"agent": agent, "learning_rate": 1e-4}
    eager, compiled = (fit(DATA | data, model | {"compile": on}, ppo=Traced) for on in (False, True))
    assert len(eager.updates) == len(compiled.updates)
    for (phase, lr, one, _), (other_phase, other_lr, other, _) in zip(
        eager.updates, compiled.updates, strict=True
    ):
        assert (phase, lr) == (other_phase, other_lr)
        torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(state(compiled), state(eager), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"num_aux_rollouts": 5}, r"model.num_aux_rollouts \(5\) must divide .* = 12"),
        ({"beta_clone": -1.0}, "model.beta_clone is -1.0"),
        ({"agent": functools.partial(MLPAgent, shared=True, memory="lstm")}, "model.agent has a memory"),
    ],
)
def test_settings_that_cannot_work_are_refused(fit, model, message):
    with pytest.raises(ConfigError, match=message):
        fit(DATA, MODEL | model, ppo=PPG)


def test_normed_weights_have_one_norm_per_output():
    spec = Unbounded((3, 64, 64), dtype=torch.uint8), Categorical(15, shape=())
    agent = CNNAgent(*spec, body="impala", normed_init=True, shared=False)
    for body in (agent.actor_body, agent.critic_body):
        norms = [layer.weight.flatten(1).norm(dim=1) for layer in body.modules() if hasattr(layer, "weight")]
        for norm, expected in zip(norms, [1.0, *[6**-0.25] * 4] * 3 + [1.4], strict=True):
            torch.testing.assert_close(norm, torch.full_like(norm, expected))
    torch.testing.assert_close(agent.head.linear.weight.norm(dim=1), torch.full((15,), 0.1))
    assert not any(p.any() for name, p in agent.named_parameters() if name.endswith("bias"))
    assert agent.actor_body.convolutions[0].weight.is_contiguous(memory_format=torch.channels_last)
    linear = torch.nn.Linear(3, 2)
    weight = linear.weight.detach().clone()
    cosine = torch.nn.functional.cosine_similarity(normed(linear, 2.0).weight, weight)
    torch.testing.assert_close(cosine, torch.ones(2))
    with pytest.raises(ConfigError, match=r"normed_init is true: set model.agent.body to impala"):
        CNNAgent(*spec, normed_init=True)
