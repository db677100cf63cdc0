"""The way back from an output to its logits, which Keras' crossentropies look for.

Keras marks what its own softmax and sigmoid return, and knows TensorFlow's operations by their
type. From either its crossentropies go back to the logits. A copy or a part of the output has lost
them: its probabilities are clipped at 1e-7, and the loss and gradient of a saturated one are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

_MARK = "_keras_logits"
#: The operations that Keras looks for -> how to make one.
_OPERATIONS = {
    "Softmax": lambda logits: tf.raw_ops.Softmax(logits=logits),
    "Sigmoid": lambda logits: tf.raw_ops.Sigmoid(x=logits),
}


@dataclass(frozen=True, eq=False)
class Logits:
    """What an output was made of.

    Attributes:
        tensor: the logits, of the shape of the output.
        operation: what made the output of them, Softmax or Sigmoid; None: unknown, as when eager.
        is_marked: whether Keras knows them by a mark of its own, else by the operation.
    """

    tensor: tf.Tensor
    operation: str | None
    is_marked: bool

    def behind(self, output: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        """Returns ``output`` such that Keras finds ``logits`` as it found these.

        Args:
            output: changed as ``logits`` are.
        """
        if not self.is_marked:
            return _OPERATIONS[self.operation](logits)
        setattr(output, _MARK, logits)
        return output

    def activated(self, logits: tf.Tensor) -> tf.Tensor:
        """Returns the output of other ``logits``, behind which Keras finds them."""
        assert self.operation is not None
        return self.behind(_OPERATIONS[self.operation](logits), logits)


def logits_of(output: Any) -> Logits | None:
    """Returns the logits that Keras finds behind ``output``; None where it finds none."""
    made_by = None
    if isinstance(output, tf.Tensor) and tf.is_symbolic_tensor(output):
        made_by = output.op if output.op.type in _OPERATIONS else None
    operation = None if made_by is None else made_by.type
    marked = getattr(output, _MARK, None)
    if marked is not None:
        return Logits(marked, operation, is_marked=True)
    return None if made_by is None else Logits(made_by.inputs[0], operation, is_marked=False)


def changed(change: Callable[..., tf.Tensor], *outputs: tf.Tensor) -> tf.Tensor:
    """Returns ``change(*outputs)`` with the logits of ``outputs``, changed likewise.

    Args:
        change: cuts, joins or copies rows, and looks at no value.
    """
    result = change(*outputs)
    found = [logits_of(output) for output in outputs]
    if any(logits is None for logits in found):
        return result
    return found[0].behind(result, change(*(logits.tensor for logits in found)))
