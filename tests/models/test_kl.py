"""Log-probability, entropy and KL divergence of each head, against ``torch.distributions``."""

import pytest
import torch
from torch.distributions import Categorical, Normal, TransformedDistribution, kl_divergence
from torch.distributions.transforms import AffineTransform, TanhTransform
from torchrl import data

from ppo_lightning.models.composite import CompositeHead, MultiCategoricalHead, make_head
from ppo_lightning.models.heads import CategoricalHead, GaussianHead, TanhGaussianHead

BATCH, FEATURES = 11, 6
DISCRETE = data.Categorical(4, shape=(), dtype=torch.int64)
VECTOR = data.Bounded(torch.tensor([-2.0, 0.0, -1.0]), torch.tensor([3.0, 4.0, 1.0]), shape=(3,))
SEVERAL = data.MultiCategorical([3, 2, 5])
BINARY = data.Binary(4, shape=(4,), dtype=torch.int8)
MIXED = data.Composite(choice=DISCRETE, force=VECTOR, several=SEVERAL)


def distributions(head, features, mask):
    """Yield PyTorch's distributions with the head's weights; their divergences [B] or [B, A] add up."""
    if isinstance(head, CompositeHead):
        for part in head.parts:
            yield from distributions(part, features, None)
    elif isinstance(head, MultiCategoricalHead | CategoricalHead):
        logits, sizes = head.linear(features), [head.num_choices]
        if isinstance(head, MultiCategoricalHead):
            sizes = (head.index < head.num_choices).sum(-1).tolist()
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        for component in logits.split(sizes, dim=-1):
            yield Categorical(logits=component)
    else:
        normal = Normal(head.linear(features), head.log_std.exp())
        if isinstance(head, TanhGaussianHead):
            middle, half_width = (head.low + head.high) / 2, (head.high - head.low) / 2
            squash = [TanhTransform(), AffineTransform(middle, half_width)]
            normal = TransformedDistribution(normal, squash, validate_args=False)
        yield normal


@pytest.mark.detail("23")
@pytest.mark.detail("25")
@pytest.mark.detail("37")
@pytest.mark.parametrize(
    ("name", "spec", "masked"),
    [
        (None, DISCRETE, False),
        (None, DISCRETE, True),
        ("gaussian", VECTOR, False),
        ("tanh_gaussian", VECTOR, False),
        (None, SEVERAL, False),
        (None, SEVERAL, True),
        (None, BINARY, False),
        ("gaussian", MIXED, False),
        ("tanh_gaussian", MIXED, False),
    ],
)
@torch.no_grad()
def test_a_head_is_the_product_of_pytorchs_distributions(name, spec, masked):
    """The divergence is that of two heads. An action that the mask forbids has no probability in either."""
    torch.manual_seed(0)
    heads = [make_head(name, FEATURES, spec) for _ in range(2)]
    for head in heads:
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    features, mask = torch.randn(BATCH, FEATURES), None
    if masked:
        mask = torch.ones(BATCH, heads[0].num_choices, dtype=torch.bool)
        mask[:, 1] = False
    references = [list(distributions(head, features, mask)) for head in heads]
    # Half of the noise keeps squashed actions off their bounds.
    action, log_prob = heads[0].sample(features, 0.5 * heads[0].noise((BATCH,)), mask)
    (again, entropy, old), (*_, new) = (head.evaluate(features, action, mask) for head in heads)
    torch.testing.assert_close(again, log_prob)
    widths = [1 if isinstance(part, Categorical) else VECTOR.shape[0] for part in references[0]]
    actions = action.reshape(BATCH, -1).split(widths, dim=1)
    log_probs = [
        part.log_prob(columns[:, 0] if isinstance(part, Categorical) else columns).reshape(BATCH, -1).sum(-1)
        for part, columns in zip(references[0], actions, strict=True)
    ]
    tolerance = {"atol": 1e-3, "rtol": 1e-3} if name == "tanh_gaussian" else {}
    torch.testing.assert_close(log_prob, sum(log_probs), **tolerance)
    if name != "tanh_gaussian":  # whose entropy has no closed form
        entropies = [part.entropy().reshape(BATCH, -1).sum(-1) for part in references[0]]
        torch.testing.assert_close(entropy, sum(entropies))
    if name == "gaussian" and spec is VECTOR:
        assert torch.equal(heads[0].sample(features, None)[0], references[0][0].mean), "the mode"
    for one, other, (p, q) in ((old, new, references), (new, old, references[::-1])):
        expected = [kl_divergence(*pair).reshape(BATCH, -1).sum(-1) for pair in zip(p, q, strict=True)]
        kl = heads[0].kl(one, other)
        assert kl.shape == (BATCH,)
        torch.testing.assert_close(kl, sum(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(heads[0].kl(old, old), torch.zeros(BATCH), atol=1e-6, rtol=0)


class UnitVariance(GaussianHead):
    """A head of a user, whose distribution has one parameter."""

    num_parameters = 1

    def evaluate(self, features, action, mask=None):
        log_prob, entropy, (mean, _) = super().evaluate(features, action, mask)
        return log_prob, entropy, (mean,)

    def kl(self, old, new):
        return (old[0] - new[0]).square().sum(-1) / 2


def test_the_divergence_of_a_dictionary_has_the_parameters_of_a_users_head():
    torch.manual_seed(0)
    spec = data.Composite(force=VECTOR, choice=DISCRETE)
    head, given = CompositeHead(FEATURES, spec, UnitVariance), CompositeHead(FEATURES, spec, "gaussian")
    given.load_state_dict(head.state_dict())
    features = torch.randn(2, BATCH, FEATURES) * 100
    action, _ = head.sample(features[0], None)
    old, new = (head.evaluate(rows, action)[2] for rows in features)
    expected = given.kl(*(given.evaluate(rows, action)[2] for rows in features))
    torch.testing.assert_close(head.kl(old, new), expected)
