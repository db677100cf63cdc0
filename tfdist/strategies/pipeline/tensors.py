"""What chunks hand to each other: tensors forward, gradients back.

One chunk makes them of microbatches where the next reads a whole batch, or the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdist.keras.tensors import mask_of, with_mask
from tfdist.strategies.pipeline.microbatches import Microbatch
from tfdist.strategies.pipeline.schedule import WHOLE
from tfdist.training.layers.gradients import added
from tfdist.training.model.logits import changed

Place = tuple[int, int]  # (key of a tensor, number of a microbatch or WHOLE)


class Values:
    """The tensors of one step, by key.

    Args:
        parts: all microbatches, and the whole batch.
        given: key -> tensor of the whole batch.
    """

    def __init__(self, parts: Mapping[int, Microbatch], given: Mapping[int, tf.Tensor]):
        self._parts = parts
        #: As they were made, on the device that made them.
        self._made: dict[Place, tf.Tensor] = {(key, WHOLE): t for key, t in given.items()}

    def put(self, key: int, number: int, tensor: tf.Tensor) -> None:
        self._made[key, number] = tensor

    def inputs(self, key: int, number: int) -> tf.Tensor:
        """Returns a copy of the rows of one part on the present device, its mask attached."""
        return self._rows(_plainly, key, number)

    def outputs(self, key: int, number: int) -> tf.Tensor:
        """Returns the same with the logits that a loss looks for."""
        return self._rows(changed, key, number)

    def _rows(self, how: Callable, key: int, number: int) -> tf.Tensor:
        if (key, number) in self._made:
            return _carried(how, tf.identity, self._made[key, number])
        if number != WHOLE:
            return _carried(how, self._parts[number].cut, self._made[key, WHOLE])
        numbers = [each for each in self._parts if each != WHOLE]

        def joined(*tensors: tf.Tensor) -> tf.Tensor:
            pairs = zip(numbers, tensors, strict=True)
            return tf.concat([self._parts[each].held_rows(t) for each, t in pairs], axis=0)

        return _carried(how, joined, *(self._made[key, each] for each in numbers))


class Upstream:
    """The gradients of tensors, added up as those that read the tensors send them."""

    def __init__(self, parts: Mapping[int, Microbatch]):
        self._parts = parts
        self._sums: dict[Place, tf.Tensor] = {}

    def send(self, key: int, number: int, gradient: Any) -> tf.Tensor:
        """Adds the gradient of one part; returns the new sum."""
        dense = tf.convert_to_tensor(gradient)
        self._sums[key, number] = added(self._sums.get((key, number)), dense)
        return self._sums[key, number]

    def take(self, key: int, number: int) -> tf.Tensor | None:
        """Returns the gradient of what a chunk made of one part; None where there is none."""
        own = self._sums.pop((key, number), None)
        other = self._joined(key) if number == WHOLE else self._cut(key, number)
        total = added(own, other)
        return None if total is None else tf.identity(total)

    def _joined(self, key: int) -> tf.Tensor | None:
        found = [
            part.held_rows(self._sums.pop((key, number)))
            for number, part in self._parts.items()
            if (key, number) in self._sums
        ]
        return tf.concat(found, axis=0) if found else None

    def _cut(self, key: int, number: int) -> tf.Tensor | None:
        whole, part = self._sums.get((key, WHOLE)), self._parts[number]
        if whole is None or part.is_real is True:
            return None if whole is None else part.cut(whole)
        rows = part.cut(whole)
        return tf.where(part.is_real, rows, tf.zeros_like(rows))  # Of padding there is none.


def _plainly(change: Callable, *tensors: tf.Tensor) -> tf.Tensor:
    return change(*tensors)


def _carried(how: Callable, change: Callable, *tensors: tf.Tensor) -> tf.Tensor:
    """Returns the tensors changed; masks that Keras attached are changed likewise."""
    masks = [mask_of(tensor) for tensor in tensors]
    copy = how(change, *tensors)
    return copy if masks[0] is None else with_mask(copy, change(*masks))
