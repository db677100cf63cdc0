"""Numbers out of their little-endian bytes."""

from __future__ import annotations

import numpy as np
import tensorflow as tf


def from_bytes(digits: tf.Tensor, dtype: str) -> tf.Tensor:
    """Returns the numbers of a dtype, [batch, n], of uint8 [batch, n * bytes of a number]."""
    if dtype == "uint8":
        return digits
    if dtype == "bool":
        return tf.cast(digits, tf.bool)
    item_bytes = np.dtype(dtype).itemsize
    if item_bytes == 1:
        return tf.bitcast(digits, dtype)
    count = digits.shape[1] // item_bytes
    return tf.bitcast(tf.reshape(digits, (-1, count, item_bytes)), dtype)
