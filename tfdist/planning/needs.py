"""What one step of a strategy needs, as its own traced graph tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Needs:
    """A step of a model on a strategy, for any global batch: numbers are a + b * rows.

    Attributes:
        strategy, options: what it was traced with.
        devices: over how many the strategy divides the model or the batch.
        weights, gradients, slots: bytes on the device that holds most.
        fixed: bytes there of all else at the peak of a step that do not depend on the batch.
        per_row: bytes there for each row of the global batch: activations, for the most part.
        least: bytes there of a step of few rows, whose peak is that of its gradients, and does not
            grow with them; 0 where even the least batch that was traced is beyond that.
        flops: operations of a step, on all devices, that do not depend on the batch.
        flops_per_row: operations for each row of the global batch, forward, backward and again.
        half: the share of the operations that is done in 16 bits.
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
    least: float = 0.0
    flops: float
    flops_per_row: float
    half: float = 0.0
    summed: int
    crossing: float = 0.0
    crossing_per_row: float = 0.0

    @property
    def computes(self) -> bool:
        """Whether it has products, whose time can be told."""
        return bool(self.flops or self.flops_per_row)

    def peak(self, rows: int) -> float:
        """Returns the most bytes on a device in a step of a global batch of ``rows``."""
        return max(self.least, self._without_rows + self.per_row * rows)

    def largest_batch(self, room: float) -> int | None:
        """Returns the rows of the largest global batch whose step fits in ``room`` bytes.

        None where it fits, and does not grow with the rows, as far as it was traced.
        """
        left = room - self._without_rows
        if left < 0 or room < self.least:
            return 0
        return int(left / self.per_row) if self.per_row > 0 else None

    @property
    def _without_rows(self) -> float:
        return self.weights + self.gradients + self.slots + self.fixed
