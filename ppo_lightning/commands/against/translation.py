"""Translation of a library's settings into a recipe: a row for each setting, and what remains different."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.bodies import ACTIVATIONS

LARGEST_ROLLOUT = 1_000_000_000  # steps
NO_LIMIT = 1e6  # a bound that nothing reaches, where a library has no bound
KEEPS_ONE_PERMUTATION = (
    "Minibatches: {library} {order} in each of the epochs; here each epoch draws a new permutation."
)
NORMALIZES_ROLLOUT = (
    "Advantage normalization: {library} normalizes the whole rollout once; here each minibatch is normalized."
)
BOOTSTRAPS_CURRENT = (
    "Time limits: {library} adds gamma * V(s_t), the value before the last step, to the reward; here the"
    " value of the final observation is used."
)

MINIBATCH_STATISTICS = (
    "Statistics of observations: {library} updates them from minibatches; here from every step."
)
INITIAL_WEIGHTS = "Initial weights: those of nn.Linear; here they are orthogonal, and 0.01 in the last layer."
VALUE_NORMALIZATION = (
    "Value normalization: {library} learns normalized returns, so that its value loss, {clip} and {weight}"
    " are in units of the returns' standard deviation; here the critic learns returns. model.norm_reward"
    " true brings rewards to a similar scale."
)
VALUE_CLIPPING = (
    "Value clipping: {library} takes the clipped error, within {clip}; here the larger of both errors, within"
    " clip_coef."
)


class Row(NamedTuple):
    """One setting of a library and its counterpart here.

    Attributes:
        theirs: Name in the library.
        value: Value in the library.
        given: Whether the file has the setting. If not, the value is the library's default.
        ours: Name here, as a flag of ``fit``. Empty: there is no counterpart.
        our_value: Value here with the same meaning.
        note: How the meanings differ. Empty: they do not.
    """

    theirs: str
    value: Any
    given: bool
    ours: str
    our_value: Any
    note: str


class Translation:
    """Rows, recipe and remaining differences, which a library's module fills in.

    Args:
        library: Name of the library.
        settings: Settings of the file, by name.
        defaults: The library's own values of settings that the file leaves out.
        overrides: Values of our settings that the user gave, by flag, for example ``data.num_envs``.
    """

    def __init__(
        self,
        library: str,
        settings: Mapping[str, Any],
        defaults: Mapping[str, Any],
        overrides: Mapping[str, Any],
    ) -> None:
        self.library = library
        self.settings = settings
        self.defaults = defaults
        self.overrides = overrides
        self.rows: list[Row] = []
        self.recipe: dict[str, Any] = {}
        self.remaining: list[str] = []
        self.classes = {"model": "ppo_lightning.PPO", "model.agent": "ppo_lightning.MLPAgent"}
        self.read: set[str] = set()

    def get(self, name: str) -> Any:
        """Return the value of a setting: of the file, or the library's default."""
        self.read.add(name)
        return plain(self.settings.get(name, self.defaults.get(name)))

    def number(self, name: str) -> float:
        """Return the number of a setting.

        Raises:
            ConfigError: The value is not a number.
        """
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"--against: {name} is {value!r}, and this command needs a number.")
        return value

    def same(self, name: str, ours: str) -> None:
        """Copy a setting whose meaning is the same here."""
        self.convert(name, ours, self.get(name))

    def convert(self, name: str, ours: str, our_value: Any, note: str = "") -> None:
        """Add a row whose value here is ``our_value``, and set this value in the recipe."""
        value = self.get(name)
        self.rows.append(Row(name, value, name in self.settings, ours, our_value, note))
        if ours:
            self.recipe[ours] = our_value

    def implicit(self, theirs: str, ours: str, our_value: Any, note: str = "") -> None:
        """Add a row for what a library does without a setting for it."""
        self.rows.append(Row(theirs, "", False, ours, our_value, note))
        self.recipe[ours] = our_value

    def differ(self, sentence: str, **words: str) -> None:
        """Add a difference that no setting removes."""
        self.remaining.append(sentence.format(library=self.library, **words))

    def sizes(self, steps: str, num_envs: int | None, epochs: str, iterations: str | None = None) -> None:
        """Translate the size of the rollouts, the epochs and the length of the run.

        Args:
            steps: Name of the setting with the steps of each environment in a rollout.
            num_envs: Number of environments in the file, if it says.
            epochs: Name of the setting with the passes over a rollout.
            iterations: Name of the setting with the number of iterations, if the library counts them.
        """
        self.num_envs = self.overrides.get("data.num_envs", num_envs)
        self.same(steps, "data.num_steps")
        self.same(epochs, "model.update_epochs")
        if self.num_envs is not None:
            self.recipe["data.num_envs"] = self.num_envs
            if iterations is not None and self.get(iterations):
                total = int(self.number(iterations) * self.number(steps) * self.num_envs)
                note = f"counts iterations; here environment steps, with {self.num_envs} environments"
                self.convert(iterations, "data.total_timesteps", total, note)

    def minibatches_of(self, name: str, size: float, steps: str) -> None:
        """Translate the size of a minibatch into the number of minibatches."""
        if self.num_envs is None:
            return
        rollout = int(self.number(steps) * self.num_envs)
        if not (0 < rollout < LARGEST_ROLLOUT and size > 0):
            raise ConfigError(f"--against: {name} {size:g} of {rollout:g} steps is no size of a minibatch.")
        small = [count for count in range(1, math.isqrt(rollout) + 1) if rollout % count == 0]
        divisors = [*small, *(rollout // count for count in small if 2 * count <= rollout)]
        count = min(divisors, key=lambda count: abs(count - rollout / size))
        note = f"size of a minibatch; here their number, of {rollout} steps"
        if rollout % size:
            note += f". {size:g} does not divide {rollout}: minibatches of {rollout // count} instead"
        self.convert(name, "model.num_minibatches", count, note)

    def squared_error(self, name: str) -> None:
        """Translate the weight of a value loss that is the mean squared error."""
        note = f"{self.library}'s value loss is the mean squared error, here half of it"
        self.convert(name, "model.vf_coef", 2 * self.number(name), note)

    def hidden_layers(self, name: str, actor: Any, critic: Any) -> None:
        """Translate the widths of the hidden layers."""
        self.read.add(name)
        actor = list(actor)
        self.rows.append(Row(name, actor, name in self.settings, "model.agent.hidden_sizes", actor, ""))
        self.recipe["model.agent.hidden_sizes"] = actor
        if list(critic) != actor:
            self.implicit("layers of the critic", "model.agent.critic_hidden_sizes", list(critic))

    def activation(self, name: Any) -> None:
        """Translate the activation function of the bodies."""
        name = str(name).lower()
        if name in ACTIVATIONS:
            self.implicit("activation of the bodies", "model.agent.activation", name)
        else:
            self.differ(
                f"Network: {name} after each layer; MLPAgent has {', '.join(ACTIVATIONS)}."
                " Subclass ActorCritic for another."
            )

    def log_std(self, value: float) -> None:
        """Translate the initial logarithm of the standard deviation."""
        if value:
            self.implicit("initial log standard deviation", "model.agent.log_std_init", value)

    def unread(self) -> list[str]:
        """Return the names of settings in the file that the translation did not read."""
        return sorted(name for name in self.settings if name not in self.read)


def scaled_rewards(scale: float) -> list[dict[str, Any]]:
    """Return the value of ``data.transforms`` that multiplies rewards by a number."""
    init_args = {"loc": 0.0, "scale": float(scale)}
    return [{"class_path": "torchrl.envs.RewardScaling", "init_args": init_args}]


def plain(value: Any) -> Any:
    """Return the number in a text like ``3e-4``, which YAML 1.1 reads as a text; other values unchanged."""
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        return number if math.isfinite(number) else value
    return value


def chosen(settings: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """Return the mapping at a path of keys, or an empty one."""
    for key in path:
        found = settings.get(key)
        settings = found if isinstance(found, Mapping) else {}
    return dict(settings)


def require(settings: Mapping[str, Any], names: Sequence[str], library: str, form: str) -> None:
    """Check that a file has at least one of the settings that a library's files have.

    Raises:
        ConfigError: It has none.
    """
    if not any(name in settings for name in names):
        raise ConfigError(f"--against {library}: the file has none of {', '.join(names)}: it must be {form}.")
