"""What numbers of a user's own step are over the rows of a batch, as far as its graph shows it.

Nothing is run for it, and nothing traced. Rows are what has a dimension of no known length.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.training.layers.replica_step import RunningStep

#: Of a number: a mean over rows; none, and nothing that replicas make up; and what a function, a
#: branch or a loop hides.
MEAN, OTHER, HIDDEN = "mean", "other", "hidden"
_FIXED, _ROWS, _COUNT = "fixed", "rows", "count"
_OVER_ROWS = {"Mean": MEAN, "Sum": "sum", "Max": "maximum", "Min": "minimum"}
_PASSING = (
    "Cast", "CheckNumerics", "EnsureShape", "ExpandDims", "Identity", "IdentityN", "Reshape",
    "Squeeze", "StopGradient",
)  # fmt: skip
_LINEAR = ("Add", "AddN", "AddV2", "ConcatV2", "Mean", "Neg", "Pack", "StridedSlice", "Sub", "Sum")
_PRODUCTS, _QUOTIENTS = ("Mul", "MulNoNan"), ("DivNoNan", "RealDiv")
_HIDING = ("Call", "Case", "If", "While")


class RowNumbers:
    """Tells what tensors of a step are, each looked at once."""

    def __init__(self, running: RunningStep):
        self._running = running
        self._known: dict[object, str] = {}

    def join_of(self, value: tf.Tensor) -> str | None:
        """Returns how replicas' numbers make up that of all rows; None where all have the same.

        MEAN, one of ``replica_step.JOINS``, or, where nothing does, OTHER or HIDDEN.
        """
        kind = self._of(value) if tf.is_symbolic_tensor(value) else _FIXED
        if kind in (_FIXED, _ROWS):
            return None
        return OTHER if kind == _COUNT else kind

    def _of(self, tensor: tf.Tensor) -> str:
        ref = tensor.ref()
        if ref not in self._known:
            self._known[ref] = self._found(tensor)
        return self._known[ref]

    def _found(self, tensor: tf.Tensor) -> str:
        operation, running = tensor.op, self._running
        if id(tensor) in running.results:
            return OTHER  # Of a metric, which has counted this replica's rows.
        if id(tensor) in running.settled:
            return running.settled[id(tensor)]
        if not tensor.shape.is_fully_defined():
            return _ROWS if self._has_own_rows(tensor) else _FIXED
        if any(part in operation.type for part in _HIDING):
            return HIDDEN
        if operation.type in _PASSING:
            passed = tensor.value_index if operation.type == "IdentityN" else 0
            return self._of(operation.inputs[passed])
        kinds = [self._of(each) for each in operation.inputs]
        if _ROWS in kinds:
            counts = operation.type in ("Shape", "Size")
            return _COUNT if counts else _OVER_ROWS.get(operation.type, OTHER)
        return _computed(operation.type, kinds)

    def _has_own_rows(self, tensor: tf.Tensor) -> bool:
        """Whether rows of a tensor are this replica's, not those that all have gathered."""
        if not self._running.settled:
            return True
        waiting, seen = [tensor], set()
        while waiting:
            one = waiting.pop()
            if one.ref() in seen or id(one) in self._running.settled:
                continue
            seen.add(one.ref())
            inputs = [each for each in one.op.inputs if each.dtype != tf.resource]
            if not inputs and not one.shape.is_fully_defined():
                return True
            waiting += inputs
        return False


def _computed(operation: str, kinds: Sequence[str]) -> str:
    """Returns what an operation makes of numbers."""
    moving = [kind for kind in kinds if kind != _FIXED]
    if not moving:
        return _FIXED
    if set(moving) == {_COUNT}:
        return _COUNT
    if operation == "Sum" and moving == ["sum"]:  # As Keras' losses add up.
        return "sum"
    is_linear = operation in _LINEAR or (operation in _PRODUCTS and len(moving) == 1)
    if operation in _QUOTIENTS:
        if kinds == ["sum", _COUNT]:
            return MEAN
        is_linear = kinds[1] == _FIXED
    if is_linear and set(moving) <= {MEAN, HIDDEN}:
        return HIDDEN if HIDDEN in moving else MEAN
    return OTHER
