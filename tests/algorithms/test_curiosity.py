"""Networks and statistics of novelty."""

import numpy as np
import pytest
import torch
from torchrl.data import Categorical, Composite, Unbounded

from ppo_lightning import CNNAgent, MLPAgent
from ppo_lightning.algorithms.rnd import Curiosity
from ppo_lightning.models import normalizers
from ppo_lightning.models.normalizers import Moments, merge_rows

ACTIONS = Categorical(3, shape=())
PARTS = Composite(kind=Categorical(3, shape=()), place=Unbounded((2, 2)))


def picture(channels):
    return Unbounded((channels, 36, 36), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("spec", "agent", "shape"),
    [
        (Unbounded((5,)), MLPAgent, (5,)),
        (PARTS, MLPAgent, (5,)),
        (picture(4), CNNAgent, (1, 36, 36)),
        (picture(3), CNNAgent, (3, 36, 36)),
        (picture(12), CNNAgent, (3, 36, 36)),  # four frames in colours
    ],
)
def test_the_networks_fit_the_observations(spec, agent, shape):
    made = agent(spec, ACTIONS)
    curiosity = Curiosity(spec, made.critic.in_features)
    assert curiosity.shape == shape
    stored = torch.zeros(2, 3, *(spec.shape if isinstance(spec, Unbounded) else (5,)))
    seen = curiosity.view(stored.to(getattr(spec, "dtype", None) or torch.float32))
    assert seen.shape == (2, 3, *shape)
    assert curiosity.error(seen.flatten(0, 1)).shape == (6,)
    assert curiosity.value(torch.zeros(6, made.critic.in_features)).shape == (6,)


@pytest.mark.parametrize(("channels", "seen"), [(4, [3]), (2, [1]), (6, [3, 4, 5])])
def test_the_view_of_a_picture_is_its_last_frame(channels, seen):
    pixels = torch.arange(channels, dtype=torch.uint8).view(1, 1, -1, 1, 1).expand(1, 1, -1, 36, 36)
    assert Curiosity(picture(channels), 8).view(pixels).unique().tolist() == seen


def test_values_of_novelty_start_near_0_and_hidden_layers_keep_the_scale():
    curiosity = Curiosity(Unbounded((5,)), critic_features=64)
    assert curiosity.critic.weight.norm().item() == pytest.approx(0.01)
    assert curiosity.critic.bias.item() == 0
    first = curiosity.target[0].weight
    torch.testing.assert_close(first.T @ first, 2 * torch.eye(5), atol=1e-5, rtol=0)


def test_networks_for_rows_bend_away_from_the_mean():
    """Without biases they are linear along rays, and the predictor extrapolates to places it never saw."""
    torch.manual_seed(0)
    target = Curiosity(Unbounded((2,)), critic_features=8).target
    near, far = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 2.0]])
    bend = (target(torch.zeros(1, 2)) + target(far) - 2 * target(near)).square().mean()
    assert bend > 0.01 * target(near).square().mean()


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
@pytest.mark.parametrize("part", [1, 7, 1000])
def test_rows_are_merged_part_by_part(monkeypatch, shape, part):
    monkeypatch.setattr(normalizers, "PART", part)
    rows = torch.randn(23, *shape) * 5 + 3
    moments = Moments(shape)
    for rows_of_rollout in rows.split([10, 0, 13]):
        merge_rows(moments, rows_of_rollout)
    assert moments.count == 23
    np.testing.assert_allclose(moments.mean, rows.double().mean(0), rtol=1e-9)
    np.testing.assert_allclose(moments.m2 / 23, rows.double().var(0, correction=0), rtol=1e-9)


def test_bytes_are_merged_as_numbers():
    moments = Moments((1,))
    merge_rows(moments, torch.tensor([[255], [0], [255], [0]], dtype=torch.uint8))
    assert moments.mean.item() == 127.5
    assert moments.m2.item() == 4 * 127.5**2
