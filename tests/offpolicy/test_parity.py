"""Two updates of each algorithm against a program written from the papers' formulas, in float64."""

import copy
import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Categorical, Unbounded
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import DDPGLoss, SACLoss, TD3Loss

from ppo_lightning.envs.specs import Specs
from ppo_lightning.offpolicy import C51, DDPG, DQN, SAC, TD3, DeterministicAgent, DiscreteSAC
from ppo_lightning.offpolicy.module import Delayed, state_and_settings
from tests.offpolicy.test_losses import projected

GAMMA, BATCH, LOW, HIGH = 0.9, 16, torch.tensor([-1.0, 0.0]).double(), torch.tensor([3.0, 1.0]).double()
SCALE, BIAS = (HIGH - LOW) / 2, (HIGH + LOW) / 2
DISCRETE = Specs(Unbounded((3,)), Categorical(4, shape=()))
CONTINUOUS = Specs(Unbounded((3,)), Bounded(LOW.float(), HIGH.float()))


def build(algorithm, specs, **settings):
    """Return a module with its networks and optimizers in float64, without a Trainer."""
    torch.manual_seed(0)
    module = algorithm(gamma=GAMMA, batch_size=BATCH, **settings)
    module.agent = module.make_agent(*specs)
    module.add_networks(specs)
    for parameter in module.parameters():  # online and target networks differ
        parameter.data += 0.1 * torch.randn_like(parameter)
    module.double()
    optimizers = module.configure_optimizers()
    module._adams = dict(zip(module.trained(), map(state_and_settings, optimizers), strict=True))
    return module


def batches(specs, noise=None):
    """Return two minibatches."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64)

    for _ in range(2):
        action = torch.randint(4, (BATCH,), generator=generator) if specs is DISCRETE else BIAS + draw(2)
        batch = {"observation": draw(3), "action": action, "reward": draw(), "next_observation": draw(3)}
        batch["terminated"] = (draw() > 0.5).double()
        yield batch if noise is None else batch | {"noise": draw(*noise)}


# The other program. A network is the list of its weights and biases.


def network(net):
    body, last = (net.actor_body, net.head) if hasattr(net, "actor_body") else (net.body, net.linear)
    return [tensor.detach().clone().requires_grad_() for tensor in (*body.parameters(), *last.parameters())]


def critics_of(module):
    """Return the critics and the target critics."""
    return ([network(q) for q in critics] for critics in (module.critics, module.target_critics))


def run(net, *inputs):
    x = torch.cat(inputs, -1)
    for i in range(0, len(net), 2):
        x = x @ net[i].T + net[i + 1]
        x = x.clamp(min=0) if i + 2 < len(net) else x
    return x


class Adam:
    def __init__(self, weights, lr, eps=1e-8):
        self.weights, self.lr, self.eps, self.t = weights, lr, eps, 0
        self.m, self.v = ([torch.zeros_like(w) for w in weights] for _ in range(2))

    def step(self, loss):
        self.t += 1
        grads = torch.autograd.grad(loss, self.weights)
        for w, m, v, g in zip(self.weights, self.m, self.v, grads, strict=True):
            m.copy_(0.9 * m + 0.1 * g)
            v.copy_(0.999 * v + 0.001 * g * g)
            step = (m / (1 - 0.9**self.t)) / ((v / (1 - 0.999**self.t)).sqrt() + self.eps)
            w.data -= self.lr * step


def polyak(target, online, tau):
    for old, new in zip(target, online, strict=True):
        old.data = (1 - tau) * old + tau * new


def agree(nets, expected):
    for net, weights in zip(nets, expected, strict=True):
        for found, weight in zip(network(net), weights, strict=True):
            torch.testing.assert_close(found, weight, atol=1e-9, rtol=1e-6)


def agree_on_critics(module, qs, target_qs):
    agree([*module.critics, *module.target_critics], [*qs, *target_qs])


@pytest.mark.parametrize("double", [False, True])
def test_dqn(double):
    module = build(DQN, DISCRETE, double=double, tau=0.7, target_network_frequency=500)
    q, target = network(module.agent), network(module.target)
    adam = Adam(q, 2.5e-4)
    for step, batch in zip((500, 510), batches(DISCRETE), strict=True):  # the target moves once
        metrics = module.update(batch, Delayed(target=step == 500))
        with torch.no_grad():
            following = run(target, batch["next_observation"])
            best = (run(q, batch["next_observation"]) if double else following).argmax(1)
            bootstrap = following[range(BATCH), best] * (1 - batch["terminated"])
        value = run(q, batch["observation"])[range(BATCH), batch["action"]]
        loss = ((value - batch["reward"] - GAMMA * bootstrap) ** 2).mean()
        adam.step(loss)
        assert metrics["losses/td_loss"].item() == pytest.approx(loss.item())
        if step == 500:
            polyak(target, q, 0.7)
    agree([module.agent, module.target], [q, target])


def test_c51():
    module = build(C51, DISCRETE)
    q, target = network(module.agent), network(module.target)
    adam, atoms = Adam(q, 2.5e-4, eps=0.01 / BATCH), torch.linspace(-100, 100, 101).double()
    for batch in batches(DISCRETE):
        module.update(batch, Delayed())
        pmf = run(target, batch["next_observation"]).view(BATCH, 4, 101).softmax(-1).detach()
        pmf = pmf[range(BATCH), (pmf @ atoms).argmax(1)]
        goal = torch.from_numpy(projected(batch["reward"], batch["terminated"], pmf, atoms, GAMMA))
        chosen = run(q, batch["observation"]).view(BATCH, 4, 101)[range(BATCH), batch["action"]].softmax(-1)
        adam.step(-(goal * chosen.clamp(1e-5, 1 - 1e-5).log()).sum(1).mean())
    agree([module.agent], [q])


@pytest.mark.parametrize("algorithm", [DDPG, TD3])
def test_deterministic_policies(algorithm):
    more = {"noise_clip": 0.3} if algorithm is TD3 else {}
    module = build(algorithm, CONTINUOUS, learning_rate=3e-4, **more)
    pi, target_pi = network(module.agent), network(module.target)
    qs, target_qs = critics_of(module)
    assert len(qs) == (2 if algorithm is TD3 else 1)
    actor, critic = Adam(pi, 3e-4), Adam([w for q in qs for w in q], 3e-4)
    for step, batch in zip((1, 2), batches(CONTINUOUS, (2,)), strict=True):  # the actor moves once
        module.update(batch, Delayed(policy=step == 2, target=step == 2))
        s, following = batch["observation"], batch["next_observation"]
        with torch.no_grad():
            action = run(target_pi, following).tanh() * SCALE + BIAS
            if algorithm is TD3:
                action = action + (0.2 * batch["noise"]).clamp(-0.3, 0.3) * SCALE
                action = torch.minimum(torch.maximum(action, LOW), HIGH)
            values = [run(q, following, action)[:, 0] for q in target_qs]
            y = batch["reward"] + GAMMA * (1 - batch["terminated"]) * torch.stack(values).min(0).values
        critic.step(sum(((run(q, s, batch["action"])[:, 0] - y) ** 2).mean() for q in qs))
        if step == 2:
            actor.step(-run(qs[0], s, run(pi, s).tanh() * SCALE + BIAS).mean())
            for target, online in ((target_pi, pi), *zip(target_qs, qs, strict=True)):
                polyak(target, online, 0.005)
    agree([module.agent, module.target], [pi, target_pi])
    agree_on_critics(module, qs, target_qs)


def test_sac():
    module = build(SAC, CONTINUOUS)
    pi = network(module.agent)
    qs, target_qs = critics_of(module)
    log_alpha = [module.log_alpha.detach().clone().requires_grad_()]
    actor, critic, temperature = Adam(pi, 3e-4), Adam([*qs[0], *qs[1]], 1e-3), Adam(log_alpha, 1e-3)

    def act(s, noise):
        mean, log_std = run(pi, s).chunk(2, -1)
        log_std = -5 + 0.5 * (2 + 5) * (log_std.tanh() + 1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        x = mean + log_std.exp() * noise
        log_prob = normal.log_prob(x) - torch.log(SCALE * (1 - x.tanh() ** 2) + 1e-6)
        return x.tanh() * SCALE + BIAS, log_prob.sum(1)

    for step, batch in zip((1, 2), batches(CONTINUOUS, (5, 2)), strict=True):
        module.update(batch, Delayed(policy=step == 2, target=True))
        s, following, noise = batch["observation"], batch["next_observation"], batch["noise"]
        with torch.no_grad():
            action, log_prob = act(following, noise[:, 0])
            values = torch.minimum(*(run(q, following, action)[:, 0] for q in target_qs))
            values = values - log_alpha[0].exp() * log_prob
            y = batch["reward"] + GAMMA * (1 - batch["terminated"]) * values
        critic.step(sum(((run(q, s, batch["action"])[:, 0] - y) ** 2).mean() for q in qs))
        for i in (1, 3) if step == 2 else ():
            action, log_prob = act(s, noise[:, i])
            value = torch.minimum(*(run(q, s, action)[:, 0] for q in qs))
            actor.step((log_alpha[0].detach().exp() * log_prob - value).mean())
            log_prob = act(s, noise[:, i + 1])[1].detach()
            temperature.step((-log_alpha[0].exp() * (log_prob - 2)).mean())
        for target, online in zip(target_qs, qs, strict=True):
            polyak(target, online, 0.005)
    agree([module.agent], [pi])
    assert module.log_alpha.item() == pytest.approx(log_alpha[0].item(), rel=1e-9)
    assert not math.isclose(module.log_alpha.item(), 0)
    agree_on_critics(module, qs, target_qs)


def test_discrete_sac():
    module = build(DiscreteSAC, DISCRETE, q_lr=3e-4, tau=1.0, policy_frequency=1)
    pi = network(module.agent)
    qs, target_qs = critics_of(module)
    log_alpha = [module.log_alpha.detach().clone().requires_grad_()]
    trained = (pi, [*qs[0], *qs[1]], log_alpha)
    actor, critic, temperature = (Adam(weights, 3e-4, eps=1e-4) for weights in trained)
    for step, batch in zip((7999, 8000), batches(DISCRETE, (3, 0)), strict=True):
        module.update(batch, Delayed(policy=True, target=step == 8000))
        s, following = batch["observation"], batch["next_observation"]
        with torch.no_grad():
            log_p = run(pi, following).log_softmax(1)
            value = torch.minimum(*(run(q, following) for q in target_qs)) - log_alpha[0].exp() * log_p
            y = batch["reward"] + GAMMA * (1 - batch["terminated"]) * (log_p.exp() * value).sum(1)
        chosen = [run(q, s)[range(BATCH), batch["action"]] for q in qs]
        critic.step(sum(((values - y) ** 2).mean() for values in chosen))
        log_p, value = run(pi, s).log_softmax(1), torch.minimum(*(run(q, s) for q in qs)).detach()
        actor.step((log_p.exp() * (log_alpha[0].detach().exp() * log_p - value)).mean())
        log_p = run(pi, s).log_softmax(1).detach()
        temperature.step((log_p.exp() * -log_alpha[0].exp() * (log_p + 0.89 * math.log(4))).mean())
        if step == 8000:
            for target, online in zip(target_qs, qs, strict=True):
                polyak(target, online, 1.0)
    agree([module.agent], [pi])
    assert module.log_alpha.item() == pytest.approx(log_alpha[0].item(), rel=1e-9)
    agree_on_critics(module, qs, target_qs)


# TorchRL's losses, where they mean the same: mean squared errors, target actors, scaled noise.


NOISE = torch.randn(BATCH, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


class Drawn(torch.distributions.Normal):
    """SAC's distribution, which draws the same noise each time."""

    def rsample(self, sample_shape=()):
        return (self.loc + self.scale * NOISE).tanh() * SCALE + BIAS

    def log_prob(self, action):
        squashed = (action - BIAS) / SCALE
        return (super().log_prob(squashed.atanh()) - (SCALE * (1 - squashed**2) + 1e-6).log()).sum(-1)


class Network(nn.Module):
    """A network of this package as a network of TorchRL."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, observation, action=None):
        if action is not None:
            return self.network(observation, action)[..., None]
        if isinstance(self.network, DeterministicAgent):
            return self.network.policy(observation)
        raw = self.network.head.linear(self.network.actor_body(observation))
        mean, log_std = self.network.head.moments(raw)
        return mean, log_std.exp()


@pytest.mark.parametrize("algorithm", [DDPG, TD3, SAC])
def test_the_losses_are_those_of_torchrl(algorithm):
    module = build(algorithm, CONTINUOUS, **{"policy_frequency": 1} if algorithm is SAC else {})
    batch = next(batches(CONTINUOUS, {DDPG: (0,), TD3: (2,), SAC: (3, 2)}[algorithm]))
    batch["action"] = batch["action"].clamp(LOW, HIGH)
    for online, target in (("critics", "target_critics"), ("agent", "target")):  # theirs begin as copies
        if hasattr(module, target):
            getattr(module, target).load_state_dict(getattr(module, online).state_dict())
    qs = [ValueOperator(Network(q), in_keys=["observation", "action"]) for q in copy.deepcopy(module.critics)]
    actor = TensorDictModule(Network(copy.deepcopy(module.agent)), ["observation"], ["action"])
    if algorithm is DDPG:
        theirs = DDPGLoss(actor, qs[0], loss_function="l2", delay_actor=True, delay_value=True)
    elif algorithm is TD3:
        torch.manual_seed(0)
        batch["noise"] = torch.randn_like(batch["action"])
        torch.manual_seed(0)
        noise = {"policy_noise": 0.2 * SCALE, "noise_clip": 0.5 * SCALE}
        theirs = TD3Loss(actor, qs, bounds=(LOW, HIGH), loss_function="l2", delay_actor=True, **noise)
    else:
        actor.out_keys = ["loc", "scale"]
        actor = ProbabilisticActor(actor, in_keys=["loc", "scale"], distribution_class=Drawn)
        options = {"alpha_init": module.log_alpha.exp().item(), "target_entropy": -2.0}
        theirs = SACLoss(actor, qs, loss_function="l2", action_spec=CONTINUOUS.action, **options)
        batch["noise"][:] = NOISE[:, None]
    theirs.make_value_estimator(gamma=GAMMA)
    ended = batch["terminated"][:, None].bool()
    following = {"observation": batch["next_observation"], "reward": batch["reward"][:, None]}
    following |= {"terminated": ended, "done": ended}
    rows = {"observation": batch["observation"], "action": batch["action"], "next": following}
    data = TensorDict(rows, [BATCH])
    if algorithm is SAC:  # their temperature's loss is linear in log alpha, and the gradient lacks alpha
        log_prob = module.evaluate(batch["observation"], NOISE, module.critics)[1].detach()
        alpha_loss = -(module.log_alpha * (log_prob - 2)).mean().item()
        assert theirs(data)["loss_alpha"].item() == pytest.approx(alpha_loss)
    expected = {name: loss.item() for name, loss in theirs(data).items() if loss.numel() == 1}
    arguments = (batch["observation"], NOISE, NOISE) if algorithm is SAC else (batch,)
    # The critics move first, and theirs do not.
    other = copy.deepcopy(module)
    other._adams = dict(
        zip(other.trained(), map(state_and_settings, other.configure_optimizers()), strict=True)
    )
    found = module.update(batch, Delayed()) | other.update_actor(*arguments)
    loss = expected["loss_value"] if algorithm is DDPG else expected["loss_qvalue"] / 2
    assert found["losses/qf_loss"].item() == pytest.approx(loss)
    assert found["losses/actor_loss"].item() == pytest.approx(expected["loss_actor"])
