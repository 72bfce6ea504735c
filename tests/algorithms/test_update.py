"""The compiled update agrees with the eager update, step by step."""

import functools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.exc import GPUTooOldForTriton, TritonMissing

from ppo_lightning import PPO, CNNAgent, ConfigError, MLPAgent, RecurrentPPO, RolloutDataModule
from ppo_lightning.algorithms.minibatches import equal_parts
from ppo_lightning.algorithms.update import CompiledUpdate, EagerUpdate, compile_per_instance
from ppo_lightning.callbacks import Threads
from ppo_lightning.models.bodies import FastTanh
from tests.helpers import CARTPOLE, MODEL, REACH, Recorder, weights

MIN_GRU = functools.partial(MLPAgent, shared=True, memory="min_gru", memory_size=16)


@pytest.fixture
def calls(monkeypatch):
    """Record the minibatches of each scan, and the parts of each minibatch with a call of its own."""
    made = []
    scan, one = CompiledUpdate._scan_over, CompiledUpdate._one

    def scan_over(self, minibatches):
        made.append(minibatches)
        return scan(self, minibatches)

    def one_alone(self, minibatch):
        made.append(equal_parts(minibatch, self.module.microbatch_size))
        return one(self, minibatch)

    monkeypatch.setattr(CompiledUpdate, "_scan_over", scan_over)
    monkeypatch.setattr(CompiledUpdate, "_one", one_alone)
    return made


class Watching(Recorder):
    """Recorder of Lightning's count of steps, and of the weights with which minibatches are drawn."""

    def on_train_end(self):
        super().on_train_end()
        self.steps = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total

    def minibatches(self, rollout):
        self.drawn = [*getattr(self, "drawn", []), weights(self)]
        yield from super().minibatches(rollout)


class Tracing(Watching, PPO):
    pass


class Tightening(Tracing):
    """Its callback changes a setting in the middle of the run."""

    def on_train_batch_start(self, *args):
        if self.rollouts_done == 2:
            self.hparams.max_grad_norm = 0.01


class TracingSequences(Watching, RecurrentPPO):
    pass


def frozen(observation_spec, action_spec):
    agent = MLPAgent(observation_spec, action_spec)
    agent.actor_body.requires_grad_(False)
    return agent


def require_same_updates(one, other):
    """Require the same weights and the same metrics of each minibatch, to float tolerance."""
    torch.testing.assert_close(weights(other), weights(one), atol=1e-5, rtol=1e-4)
    for expected, found in zip(one.metrics, other.metrics, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)


def require_drawn(module, fresh):
    """Require that the minibatches of the two epochs of an iteration are drawn with different weights."""
    assert torch.equal(module.drawn[2], module.drawn[3]) != fresh, "the second iteration"


def optimizer_state(module):
    """Return Adam's state for the agent."""
    state = module.trainer.optimizers[0].state
    states = [state[parameter] for parameter in module.agent.parameters() if parameter in state]
    return torch.cat([part[key].flatten() for part in states for key in ("exp_avg", "exp_avg_sq", "step")])


@pytest.mark.integration
@pytest.mark.parametrize(
    "data, model, ppo",
    [
        (REACH, {"ent_coef": 0.01}, Tightening),
        (REACH, {"agent": MIN_GRU}, TracingSequences),  # whose episodes end after 3 to 9 steps
        pytest.param(
            CARTPOLE,
            {"clip_vloss": False, "norm_adv": False, "max_grad_norm": 99.0, "agent": frozen},
            Tracing,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_eager_and_compiled_updates_agree(fit, data, model, ppo, calls, recwarn):
    """The compiled update draws all minibatches of an iteration before its first step."""
    eager, compiled = (fit(data, MODEL | model | {"compile": on}, ppo=ppo) for on in (False, True))
    assert eager.steps == compiled.steps
    assert eager.steps.ready == eager.steps.completed == 3 * 2 * 2
    assert [len(call) for call in calls] == [4, 4, 4]
    assert not any("lr_scheduler" in str(warning.message) for warning in recwarn)
    assert all(parameter.grad is None for parameter in compiled.agent.parameters())
    assert eager.learning_rates == compiled.learning_rates
    require_same_updates(eager, compiled)
    require_drawn(eager, fresh=True)
    require_drawn(compiled, fresh=False)
    # Adam's step does not depend on the gradients' scale, but its state does.
    torch.testing.assert_close(optimizer_state(compiled), optimizer_state(eager), atol=1e-5, rtol=1e-3)
    assert list(eager.state_dict()) == list(compiled.state_dict())


class Unused(PPO):
    """PPO with parameters that the optimizer updates and the loss does not use."""

    def add_networks(self, specs):
        self.unused = torch.nn.Linear(1, 1)

    def trainable_parameters(self):
        return [*super().trainable_parameters(), *self.unused.parameters()]


@pytest.mark.integration
@pytest.mark.parametrize(("algorithm", "lengths"), [(PPO, [4, 4]), (Unused, [1, 1, 1, 1, 4])])
def test_a_run_changes_between_eager_and_compiled_at_a_checkpoint(algorithm, lengths, fit, tmp_path, calls):
    """Eager Adam has no state for a parameter without a gradient, whose step count then differs."""

    def half(compile, ckpt_path=None, rollouts=1):
        model = MODEL | {"anneal_clip_coef": False, "anneal_lr": False, "compile": compile}
        data = REACH | {"total_timesteps": 64 * rollouts}
        module = fit(data, model, ppo=algorithm, ckpt_path=ckpt_path, max_epochs=-1)
        path = tmp_path / f"{len(list(tmp_path.glob('*.ckpt')))}.ckpt"
        module.trainer.save_checkpoint(path)
        return module, path

    ends, unmoved = [], []
    for first, second in ((False, False), (False, True), (True, False)):
        _, path = half(first)
        module, _ = half(second, ckpt_path=path, rollouts=2)
        ends.append((weights(module), optimizer_state(module), module.trainer.global_step))
        still = [*module.unused.parameters()] if algorithm is Unused else []
        assert all(map(torch.equal, still, unmoved or still))
        unmoved = still
    assert [len(call) for call in calls] == lengths
    for end in ends[1:]:
        assert end[2] == ends[0][2] == 2 * 2 * 2
        torch.testing.assert_close(end[:2], ends[0][:2], atol=1e-5, rtol=1e-3)


@pytest.mark.integration
def test_microbatches_give_the_update_of_the_whole_minibatch(fit, calls):
    """32 rows are split into 4 parts of 8, and for 11 rows at once into 4 parts again: 3 are not equal."""
    ends = [
        fit(CARTPOLE, MODEL | {"compile": on, "microbatch_size": rows}, ppo=Tracing)
        for on, rows in ((False, None), (False, 8), (True, 8), (True, 11))
    ]
    assert {len(call) for call in calls} == {4}
    for end in ends[1:]:
        require_same_updates(ends[0], end)


class Ahead(Tracing):
    """One parameter has more of Adam's steps, as in a run that resumes from one with the others frozen."""

    def training_step(self, rollout, batch_idx):
        if self.rollouts_done == 2:
            next(iter(self.trainer.optimizers[0].state.values()))["step"] += 3
        super().training_step(rollout, batch_idx)


class Irregular(Tracing):
    """Iterations with fewer minibatches, without any, and with minibatches of different sizes."""

    def minibatches(self, rollout):
        first, second = super().minibatches(rollout)
        half = {key: values[:16] for key, values in second.items()}
        yield from ([first, second], [first, second], [first], [], [first, half])[self.rollouts_done - 1]


@pytest.mark.integration
def test_a_scan_takes_equal_minibatches_and_the_rest_go_one_by_one(fit, calls):
    data = CARTPOLE | {"total_timesteps": 64 * 5}
    eager, compiled = (fit(data, MODEL | {"compile": on}, ppo=Irregular) for on in (False, True))
    # The fourth of five iterations has no minibatch.
    assert [len(call) for call in calls] == [4, 4, 1, 1, 1, 1, 1, 1]
    assert [len(call[0]["action"]) for call in calls] == [32, 32, 32, 32, 32, 16, 32, 16]
    assert eager.steps == compiled.steps
    require_same_updates(eager, compiled)


class Staged(PPO):
    def on_train_batch_start(self, rollout, batch_idx):
        self.agent.actor_body.requires_grad_(self.rollouts_done < 2)


class Cycles(PPO):
    def configure_optimizers(self):
        adam = torch.optim.Adam(self.trainable_parameters())
        return [adam], [torch.optim.lr_scheduler.OneCycleLR(adam, 1e-3, total_steps=self.data.num_rollouts)]


@pytest.mark.integration
@pytest.mark.parametrize("ppo", [Staged, Cycles])
def test_a_graph_for_other_parameters_or_betas_than_those_of_the_run_is_refused(fit, ppo):
    with pytest.raises(ConfigError, match=r"parameters .* and the betas when the run starts, and these"):
        fit(REACH, MODEL | {"compile": True}, ppo=ppo)


@pytest.mark.integration
def test_the_compiled_loss_is_checked_about_every_thousandth_update(fit, monkeypatch):
    checked = []
    loss = PPO.loss

    def record(self, minibatch, evaluation):
        if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):  # as the check does
            checked.append(self.optimize._calls)
        return loss(self, minibatch, evaluation)

    monkeypatch.setattr(PPO, "loss", record)
    monkeypatch.setattr("ppo_lightning.algorithms.update.CHECK_EVERY", 5)
    fit(REACH | {"total_timesteps": 64 * 5}, MODEL | {"compile": True})
    assert checked == [0, 4, 8, 12], "20 updates, four by four, with a check at each multiple of 5"


@pytest.mark.integration
@pytest.mark.parametrize(("ppo", "model", "length"), [(Ahead, {}, 1), (Tracing, {"target_kl": 5e-6}, 2)])
def test_a_scan_is_shorter_for_different_numbers_of_steps_and_a_target_kl(fit, calls, ppo, model, length):
    """Such parameters are not one vector. The divergence may end the iteration after each epoch."""
    ends = [fit(CARTPOLE, MODEL | {"compile": on} | model, ppo=ppo) for on in (False, True)]
    assert {len(call) for call in calls[1:]} == {length}
    assert (len(ends[0].metrics) < 3 * 2 * 2) == ("target_kl" in model), "an iteration ended early"
    require_same_updates(*ends)


@pytest.mark.parametrize(
    ("size", "rows", "parts"), [(12, 12, 1), (12, 5, 3), (12, 7, 2), (13, 5, 1), (4096, 1000, 8)]
)
def test_microbatches_are_equal_and_no_more_than_needed(size, rows, parts):
    minibatch = {"action": torch.arange(size), "advantage": torch.arange(size).unsqueeze(1)}
    split = equal_parts(minibatch, rows)
    assert len(split) == parts and len({len(part["action"]) for part in split}) == 1
    assert torch.equal(torch.cat([part["advantage"] for part in split]), minibatch["advantage"])


def test_fast_tanh_and_its_gradient_are_those_of_tanh():
    x = torch.linspace(-10, 10, 10_001, requires_grad=True)
    y = FastTanh.apply(x), x.tanh()
    torch.testing.assert_close(y[0], y[1], atol=4e-7, rtol=0)
    slopes = [torch.autograd.grad(out.sum(), x)[0] for out in y]
    torch.testing.assert_close(*slopes, atol=1e-6, rtol=0)
    small = torch.tensor([1e-12, -1e-4])
    torch.testing.assert_close(FastTanh.apply(small), small, atol=0, rtol=1e-6)


@pytest.mark.integration
def test_a_second_run_in_the_process_compiles_for_images_of_another_size(fit, calls):
    """PyTorch would compile for images of all sizes, which fails for IMPALA."""
    model = MODEL | {"update_epochs": 1, "compile": True, "agent": functools.partial(CNNAgent, body="impala")}
    for size in (36, 44):
        games = {"env_id": "ALE/Breakout-v5", "env_kwargs": {"screen_size": size}}
        data = games | {"num_envs": 2, "num_steps": 8, "total_timesteps": 2 * 8 * 2}
        assert fit(data, model).env_steps == 32
    assert [len(call) for call in calls] == [1] * 8, "convolutions are not scanned"


@pytest.mark.integration
def test_a_compiled_loss_that_differs_is_abandoned_after_its_first_iteration(fit, calls, monkeypatch):
    loss = PPO.loss

    def wrong(self, minibatch, evaluation):
        total, parts = loss(self, minibatch, evaluation)
        factor = 1.1 if torch.compiler.is_compiling() else 1.0
        return total, parts | {"value_loss": parts["value_loss"] * factor}

    monkeypatch.setattr(PPO, "loss", wrong)
    with pytest.warns(UserWarning, match=r"The compiled loss is off by 0\.\d+: the run continues without it"):
        module = fit(REACH, MODEL | {"compile": True}, ppo=Tracing)
    assert len(calls) == 1
    assert len(module.metrics) == 3 * 2 * 2


class Adds:
    def __init__(self, number):
        self.number = number

    def what(self):
        return self.number

    def add(self, x):
        return x + self.what()


@pytest.mark.integration
def test_each_object_has_graphs_of_its_own(monkeypatch):
    """PyTorch compiles at most eight graphs of the same code, but a notebook may have more runs."""
    for number in range(10):
        assert compile_per_instance(Adds(number).add)(torch.zeros(2)).tolist() == [number, number]
    monkeypatch.setattr(Adds, "what", lambda self: 100)
    # Not the graph of the method before
    assert compile_per_instance(Adds(9).add)(torch.zeros(2)).tolist() == [100, 100]


OLD_GPU = SimpleNamespace(name="K80", major=3, minor=7)


@pytest.mark.parametrize(
    "error",
    [TritonMissing(None), GPUTooOldForTriton(OLD_GPU, None), OSError(30, "Read-only file system", "/cache")],
)
def test_a_machine_that_cannot_compile_ends_in_one_sentence(fit, monkeypatch, error):
    """A GPU machine without Triton raises these errors; this test needs no GPU."""

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: fail)
    with pytest.raises(ConfigError, match=r"^model\.compile does not work here \(.*\): install "):
        fit(CARTPOLE, MODEL | {"compile": True})
    with pytest.raises(ConfigError, match=r"^model\.compile"):
        compile_per_instance(Adds(1).add)(torch.zeros(2))  # as the loss is, on several ranks


@pytest.mark.slow
def test_the_annealed_coefficients_are_compiled_once(fit):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fit(REACH, MODEL | {"compile": True})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Interrupted(PPO):
    def training_step(self, rollout, batch_idx):
        self.threads = torch.get_num_threads()
        raise RuntimeError("interrupted")


def test_an_exception_leaves_nothing_of_the_run_behind(make_trainer):
    """Compiled graphs and thread counts are dropped, so that the next run is an ordinary one."""
    module = Interrupted(compile=True)
    with pytest.raises(RuntimeError, match="interrupted"):
        make_trainer(callbacks=[Threads(2)]).fit(module, RolloutDataModule(**CARTPOLE))
    assert module.threads == 2
    assert torch.get_num_threads() == 1
    assert type(module.optimize) is EagerUpdate
    assert module.optimize._loss == module.total_loss


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.AdamW,
        lambda p: torch.optim.Adam(p, weight_decay=0.1),
        lambda p: torch.optim.Adam([{"params": [x]} for x in p]),
    ],
)
def test_an_optimizer_that_the_graph_does_not_support_is_refused(fit, optimizer):
    configure = {"configure_optimizers": lambda self: optimizer(self.agent.parameters())}
    with pytest.raises(ConfigError, match=r"model.compile takes torch.optim.Adam without"):
        fit(CARTPOLE, MODEL | {"compile": True}, ppo=type("Own", (PPO,), configure))


class ByEpoch(Tracing):
    def epoch_minibatches(self, rollout):
        for _ in range(self.hparams.update_epochs):
            yield self.minibatches(rollout)


@pytest.mark.integration
def test_a_variant_whose_minibatches_depend_on_the_weights_asks_for_one_call_an_epoch(fit):
    require_drawn(fit(CARTPOLE, MODEL | {"compile": True}, ppo=ByEpoch), fresh=True)


@pytest.mark.slow
def test_without_a_compiler_one_sentence_says_so(tmp_path):
    env = os.environ | {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    flags = "--model.compile true --data.total_timesteps 2048 --trainer.logger false"
    flags += " --trainer.enable_checkpointing false --trainer.limit_val_batches 0"
    command = [sys.executable, "-m", "ppo_lightning", "fit", *flags.split()]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "error: model.compile does not work here" in done.stderr and "install g++" in done.stderr
