"""The KL divergence of each head, against ``torch.distributions.kl_divergence``."""

import pytest
import torch
from torch.distributions import Categorical, Normal, TransformedDistribution, kl_divergence
from torch.distributions.transforms import AffineTransform, TanhTransform
from torchrl import data

from ppo_lightning.models.composite import CompositeHead, MultiCategoricalHead, make_head
from ppo_lightning.models.heads import CategoricalHead, GaussianHead, TanhGaussianHead

BATCH, FEATURES = 11, 6
DISCRETE = data.Categorical(4, shape=(), dtype=torch.int64)
VECTOR = data.Bounded(-2, 3, shape=(3,), dtype=torch.float32)
SEVERAL = data.MultiCategorical([3, 2, 5])
BINARY = data.Binary(4, shape=(4,), dtype=torch.int8)
MIXED = data.Composite(choice=DISCRETE, force=VECTOR, several=SEVERAL)
HEADS = {
    "categorical": (None, DISCRETE, CategoricalHead),
    "gaussian": ("gaussian", VECTOR, GaussianHead),
    "tanh_gaussian": ("tanh_gaussian", VECTOR, TanhGaussianHead),
    "multi-categorical": (None, SEVERAL, MultiCategoricalHead),
    "multi-binary": (None, BINARY, MultiCategoricalHead),
    "composite with gaussian": ("gaussian", MIXED, CompositeHead),
    "composite with tanh_gaussian": ("tanh_gaussian", MIXED, CompositeHead),
}


@pytest.fixture(params=HEADS)
def heads(request):
    """Two heads with the same actions and different weights: the old policy and the new one."""
    torch.manual_seed(0)
    name, spec, head_class = HEADS[request.param]
    old, new = (make_head(name, FEATURES, spec) for _ in range(2))
    for head in (old, new):
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    assert type(old) is head_class
    return old, new


def distributions(head, features):
    """Yield PyTorch's distributions with the head's weights; their divergences [B] or [B, A] add up."""
    if isinstance(head, CompositeHead):
        for part in head.parts:
            yield from distributions(part, features)
    elif isinstance(head, MultiCategoricalHead):
        sizes = (head.index < head.num_choices).sum(-1).tolist()
        for logits in head.linear(features).split(sizes, dim=-1):
            yield Categorical(logits=logits)
    elif isinstance(head, CategoricalHead):
        yield Categorical(logits=head.linear(features))
    else:
        normal = Normal(head.linear(features), head.log_std.exp())
        if isinstance(head, TanhGaussianHead):
            middle, half_width = (head.low + head.high) / 2, (head.high - head.low) / 2
            squash = [TanhTransform(), AffineTransform(middle, half_width)]
            normal = TransformedDistribution(normal, squash, validate_args=False)
        yield normal


def reference_kl(old, new, features):
    """Return KL(old || new) [B] by PyTorch."""
    pairs = zip(distributions(old, features), distributions(new, features), strict=True)
    return sum(kl_divergence(one, other).reshape(BATCH, -1).sum(-1) for one, other in pairs)


def parameters(head, features):
    action, _ = head.sample(features, head.noise((BATCH,)))
    return head.evaluate(features, action)[2]


@torch.no_grad()
def test_kl_is_pytorchs(heads):
    old, new = heads
    features = torch.randn(BATCH, FEATURES)
    kl = old.kl(parameters(old, features), parameters(new, features))
    assert kl.shape == (BATCH,)
    assert kl.min() > 1e-3
    torch.testing.assert_close(kl, reference_kl(old, new, features), atol=1e-5, rtol=1e-5)
    reverse = old.kl(parameters(new, features), parameters(old, features))
    torch.testing.assert_close(reverse, reference_kl(new, old, features), atol=1e-5, rtol=1e-5)
    assert (kl - reverse).abs().max() > 1e-3, "the order of the arguments matters"
    itself = old.kl(parameters(old, features), parameters(old, features))
    torch.testing.assert_close(itself, torch.zeros(BATCH), atol=1e-6, rtol=0)


@pytest.mark.parametrize("spec", [DISCRETE, SEVERAL], ids=["categorical", "multi-categorical"])
@torch.no_grad()
def test_kl_counts_allowed_actions_only(spec):
    """An action that the mask forbids has no probability in either policy."""
    torch.manual_seed(0)
    old, new = (make_head(None, FEATURES, spec) for _ in range(2))
    for head in (old, new):
        torch.nn.init.normal_(head.linear.weight, std=0.5)
    features = torch.randn(BATCH, FEATURES)
    mask = torch.ones(BATCH, old.num_choices, dtype=torch.bool)
    mask[:, 1] = False
    action, _ = old.sample(features, old.noise((BATCH,)), mask)
    kl = old.kl(old.evaluate(features, action, mask)[2], new.evaluate(features, action, mask)[2])
    # Without action 1 of the first component.
    sizes = [old.num_choices - 1] if spec is DISCRETE else [2, 2, 5]
    allowed = [head.linear(features)[mask].view(BATCH, -1).split(sizes, dim=-1) for head in (old, new)]
    expected = sum(
        kl_divergence(Categorical(logits=one), Categorical(logits=other))
        for one, other in zip(*allowed, strict=True)
    )
    torch.testing.assert_close(kl, expected, atol=1e-5, rtol=1e-5)
