"""What a comparison with one device found, and how it is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

# Two runs that round differ from each other by chance, too.
_SEVERAL = 3


def _is_rounding(difference: float, rounding: float | None, tolerance: float) -> bool:
    """Whether a difference is at most what rounding alone leads to; False for a NaN."""
    return difference <= max(tolerance, _SEVERAL * (rounding or 0.0))


def _by(weights: float, loss: float | None) -> str:
    return f"{weights:.1e}" + ("" if loss is None else f" and the loss by {loss:.1e}")


@dataclass(frozen=True)
class LayerDifference:
    """The largest difference of a layer's weights.

    Attributes:
        layer: its name.
        size: counts its weights.
        difference: as a part of the largest of them, where that is more than 1.
        rounding: how far from one device the same steps on it lead from weights that are a
            rounding off; None where it was not measured.
    """

    layer: str
    size: int
    difference: float
    rounding: float | None = None

    def is_rounding(self, tolerance: float) -> bool:
        return _is_rounding(self.difference, self.rounding, tolerance)


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
        tolerance: what counted as equal, where rounding alone leads no further.
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
        return next((each for each in last if not each.is_rounding(self.tolerance)), None)

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
        loss_difference: the largest difference of an epoch's loss, as a part of the largest where
            that is more than 1; None where the model shows none.
        tolerance: what counts as equal.
        loss_rounding: as ``LayerDifference.rounding``.
        causes: what explains that the strategy differs, as far as it is known; empty otherwise.
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
    loss_rounding: float | None = None
    causes: tuple[str, ...] = ()
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
    def verdict(self) -> str:
        """Returns "equal", "rounds" or "differs".

        A layer that rounding leads far hides no fault in another: each is compared for itself.
        """
        if self.difference <= self.tolerance:
            return "equal"
        is_rounding = all(layer.is_rounding(self.tolerance) for layer in self.layers)
        of_loss = _is_rounding(self.loss_difference or 0.0, self.loss_rounding, self.tolerance)
        return "rounds" if is_rounding and of_loss else "differs"

    @property
    def exact(self) -> bool:
        """Whether nothing but rounding lies between the strategy and one device."""
        return self.verdict != "differs"

    @property
    def passed(self) -> bool:
        """Whether the strategy does what it promises: exactness, or a loss within the bound."""
        return self.exact if self.losses is None else self.losses.holds

    @property
    def is_explained(self) -> bool:
        """Whether the weights are others, as was to be expected: finite, and the cause is known."""
        return not self.exact and math.isfinite(self.difference) and bool(self.causes)

    @property
    def is_rounding_known(self) -> bool:
        return any(layer.rounding is not None for layer in self.layers)

    def beside(self, rounded: Sequence[tuple[tuple[LayerDifference, ...], float | None]]) -> Report:
        """Returns the report with what rounding alone leads to, the largest of several trainings.

        Args:
            rounded: what each gives for ``layers`` and ``loss_difference``.
        """
        of_layers = np.fmax.reduce([[each.difference for each in layers] for layers, _ in rounded])
        of_loss = [loss for _, loss in rounded if loss is not None]
        return replace(
            self,
            layers=tuple(
                replace(layer, rounding=float(by))
                for layer, by in zip(self.layers, of_layers, strict=True)
            ),
            loss_rounding=float(np.fmax.reduce(of_loss)) if of_loss else None,
        )

    def __str__(self) -> str:
        if self.losses is not None:
            return self._asynchronous_verdict(self.losses)
        text = (
            f"{self.strategy} on {self.num_replicas} replicas {self._verdict()}: after "
            f"{self.steps} steps weights differ from one device's by at most "
            f"{_by(self.weight_difference, self.loss_difference)} (tolerance {self.tolerance:.0e})"
        )
        if self.is_rounding_known:
            by = float(np.fmax.reduce([layer.rounding for layer in self.layers]))
            text += f"; rounding alone makes one device's differ by {_by(by, self.loss_rounding)}"
        if self.is_changed:
            text += "; both trained the model with the layers that the strategy has replaced"
        if self.exact:
            return text
        if self.is_rounding_known:
            text += self._furthest()
        others = [cause for cause in self.causes if cause not in self.by_nature]
        if not self.causes:
            others = ["none known"]
        return text if not others else f"{text}. Cause: {'; '.join(others)}"

    def _verdict(self) -> str:
        if self.exact:
            return "is equal" if self.verdict == "equal" else "rounds as one device does"
        if not self.by_nature:
            return "differs"
        return f"differs, and must as it is set up ({'; '.join(self.by_nature)})"

    def _furthest(self) -> str:
        """Returns a clause on the layer that is furthest beyond rounding, if one is."""
        beyond = [each for each in self.layers if not each.is_rounding(self.tolerance)]
        if not beyond:
            return ""
        each = max(beyond, key=lambda each: each.difference / max(self.tolerance, each.rounding))
        return (
            f", and furthest beyond that is layer '{each.layer}' with {each.difference:.1e} where "
            f"rounding makes {each.rounding:.1e}"
        )

    def _asynchronous_verdict(self, losses: LossComparison) -> str:
        return (
            f"{self.strategy} on {self.num_replicas} workers is asynchronous, so only its loss is "
            f"checked: from {losses.initial:.4g} to {losses.final:.4g} in {self.steps} steps, one "
            f"device to {losses.expected:.4g}; it is {'' if losses.holds else 'NOT '}within the "
            f"bound of {losses.bound:.2g}. Why weights differ: {'; '.join(self.causes)}"
        )
