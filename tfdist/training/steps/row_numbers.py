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
_FIXED, _ROWS, _COUNT, _PART = "fixed", "rows", "count", "one over a count"
_OVER_ROWS = {"Mean": MEAN, "Sum": "sum", "Max": "maximum", "Min": "minimum"}
_PASSING = (
    "Cast", "CheckNumerics", "EnsureShape", "ExpandDims", "Identity", "IdentityN", "Reshape",
    "Squeeze", "StopGradient",
)  # fmt: skip
_TAKING = ("Slice", "Split", "SplitV", "StridedSlice", "Tile", "Transpose", "Unpack")
_ADDING = ("Add", "AddN", "AddV2", "ConcatV2", "GatherV2", "Mean", "Neg", "Pack", "Sub", "Sum")
_PRODUCTS, _QUOTIENTS = ("MatMul", "Mul", "MulNoNan"), ("DivNoNan", "RealDiv")
# What a count of rows stays one in, as it is guarded against 0.
_OF_COUNTS = ("ConcatV2", "GatherV2", "Maximum", "Pack", "Prod")
_HIDING = ("Call", "Case", "If", "PyFunc", "While")


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
        if kind == _ROWS and value.shape.is_fully_defined():
            return HIDDEN  # Its shape is what somebody has said of it.
        if kind in (_FIXED, _ROWS):
            return None
        return OTHER if kind in (_COUNT, _PART) else kind

    def is_off(self, loss: tf.Tensor) -> bool:
        """Whether the gradient of a loss, of all its numbers together, is no mean over rows."""
        if loss.shape.is_fully_defined():
            return self.join_of(loss) not in (MEAN, HIDDEN, None)
        is_known = tf.is_symbolic_tensor(loss) and loss.shape.rank is not None
        return is_known and self._of(loss) == _ROWS

    def _of(self, tensor: tf.Tensor) -> str:
        waiting, begun = [tensor], set()
        while waiting:  # A chain of operations may be longer than Python's stack.
            one = waiting[-1]
            unknown = [each for each in self._asks(one) if each.ref() not in self._known]
            if one.ref() in self._known or one.ref() in begun or not unknown:
                self._known.setdefault(one.ref(), self._found(waiting.pop()))
            else:
                begun.add(one.ref())
                waiting += unknown
        return self._known[tensor.ref()]

    def _asks(self, tensor: tf.Tensor) -> Sequence[tf.Tensor]:
        """Returns the tensors that tell what ``tensor`` is."""
        running = self._running
        is_told = any(
            id(tensor) in told for told in (running.results, running.settled, running.gradients)
        )
        return () if is_told or not tensor.shape.is_fully_defined() else tensor.op.inputs

    def _found(self, tensor: tf.Tensor) -> str:
        operation, running = tensor.op, self._running
        if id(tensor) in running.results:
            return OTHER  # Of a metric, which has counted this replica's rows.
        if id(tensor) in running.settled:
            return running.settled[id(tensor)]
        if id(tensor) in running.gradients:
            return MEAN  # As the loss is, of which ``is_off`` tells.
        if not tensor.shape.is_fully_defined():
            return _ROWS if self._has_own_rows(tensor) else _FIXED
        kinds = [self._known.get(each.ref(), HIDDEN) for each in operation.inputs]
        if any(part in operation.type for part in _HIDING):
            return _FIXED if set(kinds) <= {_FIXED} else HIDDEN
        is_taken = operation.type in _TAKING and _ROWS not in kinds
        if operation.type in _PASSING or is_taken:
            return kinds[tensor.value_index if operation.type == "IdentityN" else _first(kinds)]
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


def _first(kinds: Sequence[str]) -> int:
    """Returns the input that an operation passes on: of Split the axis comes before it."""
    return next((place for place, kind in enumerate(kinds) if kind != _FIXED), 0)


def _computed(operation: str, kinds: Sequence[str]) -> str:
    """Returns what an operation makes of numbers."""
    moving = [kind for kind in kinds if kind != _FIXED]
    if not moving:
        return _FIXED
    scales = operation in _PRODUCTS and len(moving) == 1
    if set(moving) == {_COUNT}:
        if operation in _QUOTIENTS and kinds[0] == _FIXED:
            return _PART
        return _COUNT if scales or operation in _OF_COUNTS else OTHER
    if operation in _QUOTIENTS:
        if kinds == ["sum", _COUNT]:
            return MEAN
        scales = kinds[1] == _FIXED
    if operation in _PRODUCTS and sorted(kinds) == sorted(["sum", _PART]):
        return MEAN
    chooses = operation == "SelectV2" and kinds[0] == _FIXED
    if set(moving) == {"sum"} and (scales or operation in _ADDING):
        # A number that all have is added once on each replica.
        adds_alike = operation in ("Add", "AddV2", "Sub", "AddN", "Pack", "ConcatV2")
        return OTHER if adds_alike and len(moving) < _terms_of(operation, kinds) else "sum"
    is_linear = scales or chooses or operation in _ADDING
    if is_linear and set(moving) <= {MEAN, HIDDEN}:
        return HIDDEN if HIDDEN in moving else MEAN
    return OTHER


def _terms_of(operation: str, kinds: Sequence[str]) -> int:
    return len(kinds) - (operation == "ConcatV2")  # Its last input is the axis.
