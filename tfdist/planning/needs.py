"""What one step of a strategy needs, as its own traced graph tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Needs:
    """A step of a model on a strategy, for any global batch: each number is a + b * rows.

    Attributes:
        strategy, options: what it was traced with.
        devices: over how many the strategy divides the model or the batch.
        weights, gradients, slots: bytes on the device that holds most.
        fixed: bytes there of all else at the peak of a step that do not depend on the batch.
        per_row: bytes there for each row of the global batch: activations, for the most part.
        flops: operations of a step, on all devices, that do not depend on the batch.
        flops_per_row: operations for each row of the global batch, forward, backward and again.
        summed: bytes of gradients that data-parallel ranks add up in a step.
        crossing, crossing_per_row: bytes that go from one device to another within the step of a
            strategy that divides a model: boundaries of stages, sums of a mesh.
    """

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    devices: int = 1
    weights: int
    gradients: int
    slots: int
    fixed: float
    per_row: float
    flops: float
    flops_per_row: float
    summed: int
    crossing: float = 0.0
    crossing_per_row: float = 0.0

    def peak(self, rows: int) -> float:
        """Returns the most bytes on a device in a step of a global batch of ``rows``."""
        held = self.weights + self.gradients + self.slots
        return held + self.fixed + self.per_row * rows

    def largest_batch(self, room: float) -> int:
        """Returns the rows of the largest global batch whose step fits in ``room`` bytes."""
        left = room - self.peak(0)
        if left <= 0 or self.per_row <= 0:
            return 0
        return int(left / self.per_row)
