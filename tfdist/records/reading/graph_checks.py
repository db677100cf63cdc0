"""Checks inside a tf.data graph whose failure can be told from TensorFlow's own errors."""

from __future__ import annotations

import re

import tensorflow as tf

from tfdist.errors import DataError

# They enclose the rule in the message of the InvalidArgumentError that a failed check becomes.
_BEGIN, _END = "<tfdist>", "</tfdist>"
_FAILED = re.compile(rf"{_BEGIN}(.*?){_END}\] \[(.*?)\](?: *\[\[\{{\{{|$)")
_VALUES_SHOWN = 8


def check(condition: tf.Tensor, rule: str, received: tf.Tensor) -> tf.Operation:
    """Returns the operation that fails unless ``condition`` holds; make results depend on it.

    Args:
        received: what was found instead, scalar string.
    """
    return tf.debugging.Assert(condition, [f"{_BEGIN}{rule}{_END}", received])


def listed(numbers: tf.Tensor) -> tf.Tensor:
    """Returns the first numbers of a vector as one string."""
    return tf.strings.reduce_join(tf.strings.as_string(numbers[:_VALUES_SHOWN]), separator=", ")


def failed_check(message: str) -> DataError | None:
    """Returns the error of the check that failed with ``message``; None for any other message."""
    found = _FAILED.search(" ".join(message.split()))
    if found is None:
        return None
    # TensorFlow escapes quotes.
    rule, received = (text.replace("\\'", "'").replace('\\"', '"') for text in found.groups())
    return DataError(rule, received=received)
