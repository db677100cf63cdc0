"""``tfdist.verify``: a strategy against one device, on the user's own model and data.

Both start from the same weights and see the same global batches, an uneven last one included.
The one device runs plain Keras: nothing of tfdist is in its steps.

Asynchronous workers do not repeat one device's weights. Of them only the loss is compared, and
within a bound (``LossComparison``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tfdist.errors import ModelError, OptionError
from tfdist.strategies import spec_of

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.strategies.base import Strategy
    from tfdist.training.feed import Feed, MergedFeed
    from tfdist.training.training_data import TrainingData

# By precision. Sixteen bits round a gradient at its third or fourth figure, in other places on
# each replica.
TOLERANCES = {"float32": 1e-5, "mixed_float16": 2e-3, "mixed_bfloat16": 1e-2}

_ROUNDING = (
    "the rounding of float32, enlarged by the model itself (an input of ReLU or of a maximum that "
    "falls on the other side of the kink, or a gradient near 0 that Adam divides by itself)"
)


@dataclass(frozen=True)
class LayerDifference:
    """The largest difference of a layer's weights; ``size`` counts them."""

    layer: str
    size: int
    difference: float


@dataclass(frozen=True)
class LossComparison:
    """The losses on all data of the comparison, each record once, of an asynchronous strategy.

    Attributes:
        initial: before the first step, the same for both.
        final: after the last step on the strategy.
        expected: after the last step on one device.
    """

    #: Part of what one device gains that the strategy may gain less or more, and part of the
    #: initial loss that is allowed besides, for trainings that gain hardly anything.
    GAIN: ClassVar[float] = 0.5
    SLACK: ClassVar[float] = 0.02

    initial: float
    final: float
    expected: float

    @property
    def bound(self) -> float:
        """How far ``final`` may be from ``expected``."""
        gain = max(self.initial - self.expected, 0.0)
        return self.GAIN * gain + self.SLACK * abs(self.initial)

    @property
    def holds(self) -> bool:
        return abs(self.final - self.expected) <= self.bound  # False for a NaN.


@dataclass(frozen=True)
class Report:
    """What a comparison found.

    Attributes:
        strategy: its name.
        num_replicas: replicas that shared each global batch.
        steps: steps that both took.
        tail: rows of the uneven last batch of each epoch, 0 when there was none.
        layers: the largest difference of each layer's weights after the last step.
        loss_difference: the largest difference of an epoch's loss; None where the model shows none.
        tolerance: what both differences may be at most.
        float64_difference: the largest difference of the same comparison in float64, made when
            float32 was not enough, and always beside mixed precision; None otherwise. Kinks and
            small divisors can enlarge rounding, on one device with another order of summation too.
            In float64 that is a billion times less; a fault stays what it is.
        precision: of both, but for that.
        causes: what explains a difference, as far as it is known; empty when exact.
        losses: what is compared of an asynchronous strategy; None where steps are in step.
        is_changed: whether the strategy has replaced layers; both then trained what it has made.
    """

    strategy: str
    num_replicas: int
    steps: int
    tail: int
    layers: tuple[LayerDifference, ...]
    loss_difference: float | None
    tolerance: float
    float64_difference: float | None = None
    causes: tuple[str, ...] = ()
    precision: str = "float32"
    losses: LossComparison | None = None
    is_changed: bool = False

    @property
    def weight_difference(self) -> float:
        return float(np.max([layer.difference for layer in self.layers], initial=0.0))

    @property
    def difference(self) -> float:
        loss = self.loss_difference or 0.0  # A NaN stays one.
        return float(np.maximum(self.weight_difference, loss))

    @property
    def exact(self) -> bool:
        within = self.difference <= self.tolerance
        if self.float64_difference is None:
            return within
        # What is as coarse as mixed precision hides faults; only float64 shows that there is none.
        return self.exact_in_float64 and (within or self.precision == "float32")

    @property
    def exact_in_float64(self) -> bool:
        # Layers that are float32 by themselves, as the last ones in mixed precision, stay so.
        limit = 1e-6 if self.precision == "float32" else TOLERANCES["float32"]
        return self.float64_difference is not None and self.float64_difference <= limit

    @property
    def passed(self) -> bool:
        """Whether the strategy does what it promises: exactness, or a loss within the bound."""
        return self.exact if self.losses is None else self.losses.holds

    def __str__(self) -> str:
        if self.losses is not None:
            return self._asynchronous_verdict(self.losses)
        loss = self.loss_difference
        of_loss = "" if loss is None else f" and the loss by {loss:.1e}"
        text = (
            f"{self.strategy} on {self.num_replicas} replicas is "
            f"{'exact' if self.exact else 'NOT exact'}: after {self.steps} steps weights differ by "
            f"at most {self.weight_difference:.1e}{of_loss} "
            f"(tolerance {self.tolerance:.0e}"
            f"{'' if self.precision == 'float32' else f', {self.precision}'})"
        )
        if self.float64_difference is not None:
            text += f"; in float64 by {self.float64_difference:.1e}"
        if self.is_changed:
            text += "; both trained the model with the layers that the strategy has replaced"
        return text if not self.causes else f"{text}. Cause: {'; '.join(self.causes)}"

    def _asynchronous_verdict(self, losses: LossComparison) -> str:
        return (
            f"{self.strategy} on {self.num_replicas} workers is asynchronous, so only its loss is "
            f"checked: from {losses.initial:.4g} to {losses.final:.4g} in {self.steps} steps, one "
            f"device to {losses.expected:.4g}; it is {'' if losses.holds else 'NOT '}within the "
            f"bound of {losses.bound:.2g}. Why weights differ: {'; '.join(self.causes)}"
        )


def verify(
    model_fn: Callable[[], tf.keras.Model] | tf.keras.Model,
    data: Any,
    strategy: Strategy,
    *,
    steps: int = 20,
    global_batch_size: int = 64,
    seed: int = 0,
    tolerance: float | None = None,
    batched: bool | None = None,
) -> Report | None:
    """Trains ``steps`` steps on ``strategy`` and on one device, and compares.

    Args:
        model_fn: as in ``strategy.build``.
        data: as in ``strategy.dataset``.
        strategy: a started strategy; under a launcher every rank calls this.
        steps: steps to take, the last of each epoch on an uneven batch.
        global_batch_size: rows of one step.
        seed: of the weights and of the order of records.
        tolerance: the largest difference that counts as exact. None: 1e-5 in float32, 2e-3 in
            mixed_float16, 1e-2 in mixed_bfloat16.
        batched: as in ``strategy.dataset``.

    Returns:
        The report on the chief; None on other ranks.

    Raises:
        OptionError: ``steps`` is less than 1.
    """
    import tensorflow as tf

    if steps < 1:
        raise OptionError("steps must be at least 1", received=steps)
    feed = strategy.dataset(data, global_batch_size=global_batch_size, seed=seed, batched=batched)
    feed = feed.limited(steps)
    precision = strategy.precision or tf.keras.mixed_precision.global_policy().name
    if tolerance is None:
        tolerance = TOLERANCES.get(precision, TOLERANCES["float32"])

    def compare(tolerance: float) -> Report:
        # Every rank trains the reference too: none then waits for the chief, and all know alike.
        tf.keras.utils.set_random_seed(seed)
        return _compare_once(model_fn, feed, strategy, math.ceil(steps / len(feed)), tolerance)

    report = replace(compare(tolerance), precision=precision)
    is_mixed = precision.startswith("mixed")
    if report.losses is None and (is_mixed or not strategy.from_chief(report.exact)):
        if not report.causes and not isinstance(model_fn, tf.keras.Model):
            with _floatx("float64"):
                again = compare(1e-6)
            report = replace(report, float64_difference=again.difference, causes=again.causes)
        if report.exact:
            if report.difference > report.tolerance:
                report = replace(report, causes=(_ROUNDING,))
        elif not report.causes:
            report = replace(report, causes=(_unexplained(report),))
    return report if strategy.topology.is_chief else None


def _unexplained(report: Report) -> str:
    if report.precision == "float32" or not report.exact_in_float64:
        return "none known"
    return f"the rounding of {report.precision}, or updates that its loss scale has skipped"


def _compare_once(
    model_fn: Any, feed: TrainingData, strategy: Strategy, epochs: int, tolerance: float
) -> Report:
    from tfdist.strategies.base import clone
    from tfdist.training.keras_api import restart_names
    from tfdist.training.precision import policy

    # Layers without a name of their own get the same in both, so that options can name them.
    restart_names()
    with policy(strategy.precision):
        reference = _independent(model_fn)
    restart_names()
    model = strategy.build(model_fn)
    is_changed = _shapes(model) != _shapes(reference)
    if is_changed:  # The strategy has replaced layers: one device trains what is left, too.
        reference = clone(model)
    else:
        model.set_weights(reference.get_weights())
    is_in_step = not spec_of(strategy.name).is_asynchronous or strategy.num_replicas == 1
    initial = None if is_in_step else _loss(model, feed.in_record_order())
    found = model.fit(feed, epochs=epochs, verbose=0).history
    expected = _train_reference(reference, feed.on_one_device(), epochs, strategy.scaling)
    report = Report(
        strategy=strategy.name,
        num_replicas=strategy.num_replicas,
        steps=epochs * feed.steps_per_epoch,
        tail=feed.tail,
        layers=_layer_differences(reference, model.get_weights()),
        loss_difference=_loss_difference(found, expected),
        tolerance=tolerance,
        is_changed=is_changed,
    )
    if initial is not None:
        same = feed.in_record_order()
        on_one_device = _loss(reference, same.on_one_device().epochs(0, 1))
        losses = LossComparison(initial, _loss(model, same), on_one_device)
        report = replace(report, losses=losses)
    elif report.exact:
        return report
    element_spec = feed.on_one_device().epochs(0, 1).element_spec
    return replace(report, causes=_known_causes(reference, strategy, element_spec))


def _loss_difference(found: dict[str, list], expected: dict[str, list]) -> float | None:
    if "loss" not in expected:  # A compute_loss of the user's own may show none.
        return None
    return float(np.max(np.abs(np.subtract(found["loss"], expected["loss"]))))


def _shapes(model: tf.keras.Model) -> list[tuple[int, ...]]:
    return [weight.shape for weight in model.get_weights()]


def _loss(model: tf.keras.Model, data: Any) -> float:
    found = model.evaluate(data, verbose=0, return_dict=True)
    if "loss" not in found:
        raise ModelError(
            "a model whose workers are asynchronous must show its loss, for that is compared",
            received=f"{type(model).__name__} with a compute_loss that shows none",
            mend="Keep a tf.keras.metrics.Mean(name='loss') in the model, and update it there",
        )
    return float(found["loss"])


@contextlib.contextmanager
def _floatx(dtype: str) -> Iterator[None]:
    import tensorflow as tf

    from tfdist.training.keras_api import set_policy

    before, policy = tf.keras.backend.floatx(), tf.keras.mixed_precision.global_policy()
    tf.keras.backend.set_floatx(dtype)
    set_policy(None)  # It follows floatx.
    try:
        yield
    finally:
        tf.keras.backend.set_floatx(before)
        set_policy(None if policy.name == before else policy)


def _independent(model_fn: Any) -> tf.keras.Model:
    """Returns a model of its own, whatever the strategy does with ``model_fn``."""
    import tensorflow as tf

    from tfdist.strategies.base import called, clone

    model = called(model_fn)
    return clone(model) if isinstance(model_fn, tf.keras.Model) else model


def _train_reference(
    model: tf.keras.Model, feed: Feed | MergedFeed, epochs: int, scaling: Any
) -> dict[str, list[float]]:
    from tfdist.training import early_variables
    from tfdist.training.scaling import ScaleLearningRate

    callbacks = []
    if not scaling.is_off:
        scale = ScaleLearningRate(scaling, model.optimizer)
        scale.prepare(model.optimizer, feed.steps_per_epoch)
        callbacks.append(scale)
    batches = feed.epochs(0, epochs)
    early_variables.make_slots(model)
    early_variables.make_known_metrics(model, batches.element_spec)
    history = model.fit(
        batches,
        epochs=epochs,
        steps_per_epoch=feed.steps_per_epoch,
        callbacks=callbacks,
        shuffle=False,  # The feed does.
        verbose=0,
    )
    return history.history


def _layer_differences(
    reference: tf.keras.Model, weights: list[np.ndarray]
) -> tuple[LayerDifference, ...]:
    import tensorflow as tf

    from tfdist.training.keras_api import path_of, raw
    from tfdist.training.metrics import state_of

    largest: dict[str, float] = {}
    sizes: dict[str, int] = {}
    # A model's own metrics are among its weights; each process has its part of them.
    of_metrics = {variable.ref() for variable in state_of(reference)}
    for weight, value in zip(reference.weights, weights, strict=True):
        variable = raw(weight)
        # A vocabulary is no variable.
        if not isinstance(variable, tf.Variable) or variable.ref() in of_metrics:
            continue
        expected = variable.numpy()
        if not np.issubdtype(expected.dtype, np.floating) or not expected.size:
            continue
        layer = path_of(weight).rpartition("/")[0] or path_of(weight)
        difference = float(np.max(np.abs(expected - value)))
        largest[layer] = float(np.fmax(largest.get(layer, 0.0), difference))
        if np.isnan(difference):
            largest[layer] = math.nan
        sizes[layer] = sizes.get(layer, 0) + expected.size
    return tuple(LayerDifference(name, sizes[name], worst) for name, worst in largest.items())


def _known_causes(
    model: tf.keras.Model, strategy: Strategy, element_spec: tuple[Any, ...]
) -> tuple[str, ...]:
    import tensorflow as tf

    from tfdist.training import coupling
    from tfdist.training.keras_api import layers_in
    from tfdist.training.options import OfBatchNorm
    from tfdist.training.randomness import drawing_layers
    from tfdist.training.text import padded_by_batch

    norms = any(isinstance(layer, tf.keras.layers.BatchNormalization) for layer in layers_in(model))
    causes = [c for c in strategy.approximations if norms or not isinstance(c, OfBatchNorm)]
    causes += [
        f"layer '{layer.name}' draws other random numbers on each replica"
        for layer in drawing_layers(model)
    ]
    causes += [
        f"layer '{name}' pads texts to the longest that a replica sees"
        for name in padded_by_batch(model)
    ]
    for layer in layers_in(model):
        if getattr(layer, "activity_regularizer", None) is not None:
            causes.append(f"the activity regularizer of '{layer.name}' is taken per replica")
    causes += coupling.explained(coupling.coupled(model, element_spec))
    return tuple(causes)
