"""What a comparison with one device found, and how it is told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

# By precision. Sixteen bits round a gradient at its third or fourth figure, in other places on
# each replica.
TOLERANCES = {"float32": 1e-5, "mixed_float16": 2e-3, "mixed_bfloat16": 1e-2}

UNKNOWN = "none known"
UNTRIED = (
    f"{UNKNOWN}; it may be rounding, for nothing could be compared in float64: the model is given "
    "as it is, or makes tensors of float32 itself"
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
class Explanation:
    """Where the weights of a strategy part from those of one device.

    Attributes:
        parted: layers whose outputs of the same rows are others when the batch is divided, in the
            order of the forward pass, with the difference as a part of the largest output.
        num_parts: parts that the batch was divided into to see that.
        steps: after how many steps weights were compared: 1, 2, 4, ..., until they parted.
        layers: for each of ``steps``, the largest difference of each layer's weights.
        tolerance: what counted as equal.
    """

    parted: tuple[tuple[str, float], ...]
    num_parts: int
    steps: tuple[int, ...]
    layers: tuple[tuple[LayerDifference, ...], ...]
    tolerance: float

    @property
    def first_layer(self) -> LayerDifference | None:
        """The first layer of the model, in its order, whose weights part."""
        last = self.layers[-1] if self.layers else ()
        # Not "greater": a NaN has parted, too.
        return next((each for each in last if not each.difference <= self.tolerance), None)

    def __str__(self) -> str:
        return f"{self._of_outputs()}\n{self._of_weights()}"

    def _of_outputs(self) -> str:
        if not self.parted:
            return (
                f"Outputs: no layer gives other rows when the batch is in {self.num_parts} parts, "
                "as far as could be tried"
            )
        (name, difference), *others = self.parted
        text = (
            f"Outputs: layer '{name}' is the first that gives other rows when the batch is in "
            f"{self.num_parts} parts (by {difference:.1e} of its largest)"
        )
        return text + "".join(f", then '{name}' ({by:.1e})" for name, by in others)

    def _of_weights(self) -> str:
        first = self.first_layer
        if first is None:
            return f"Weights: equal to {self.tolerance:.0e} after {self.steps[-1]} steps"
        last = self.steps[-1]
        equal = f"equal after {self.steps[-2]} steps, apart" if len(self.steps) > 1 else "apart"
        return (
            f"Weights: {equal} after {last} step{'s' if last > 1 else ''}, first those of layer "
            f"'{first.layer}' (by {first.difference:.1e})"
        )


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
        by_nature: of ``causes``, those that lie in the strategy as it was set up, on any model.
        explanation: where the weights part, when it was asked for and they do; None otherwise.
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
    by_nature: tuple[str, ...] = ()
    explanation: Explanation | None = None

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

    @property
    def is_explained(self) -> bool:
        """Whether the weights are others, as was to be expected: finite, and the cause is known."""
        is_known = bool(self.causes) and not {UNKNOWN, UNTRIED}.intersection(self.causes)
        return not self.exact and math.isfinite(self.difference) and is_known

    def __str__(self) -> str:
        if self.losses is not None:
            return self._asynchronous_verdict(self.losses)
        loss = self.loss_difference
        of_loss = "" if loss is None else f" and the loss by {loss:.1e}"
        text = (
            f"{self.strategy} on {self.num_replicas} replicas is "
            f"{self._verdict()}: after {self.steps} steps weights differ by "
            f"at most {self.weight_difference:.1e}{of_loss} "
            f"(tolerance {self.tolerance:.0e}"
            f"{'' if self.precision == 'float32' else f', {self.precision}'})"
        )
        if self.float64_difference is not None:
            text += f"; in float64 by {self.float64_difference:.1e}"
        if self.is_changed:
            text += "; both trained the model with the layers that the strategy has replaced"
        others = [cause for cause in self.causes if cause not in self.by_nature]
        return text if not others else f"{text}. Cause: {'; '.join(others)}"

    def _verdict(self) -> str:
        if self.exact:
            return "exact"
        if not self.by_nature:
            return "NOT exact"
        return f"NOT exact, and cannot be as it is set up ({'; '.join(self.by_nature)})"

    def _asynchronous_verdict(self, losses: LossComparison) -> str:
        return (
            f"{self.strategy} on {self.num_replicas} workers is asynchronous, so only its loss is "
            f"checked: from {losses.initial:.4g} to {losses.final:.4g} in {self.steps} steps, one "
            f"device to {losses.expected:.4g}; it is {'' if losses.holds else 'NOT '}within the "
            f"bound of {losses.bound:.2g}. Why weights differ: {'; '.join(self.causes)}"
        )
