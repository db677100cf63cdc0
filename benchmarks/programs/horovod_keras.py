"""Horovod's Keras module, ``hvd``, with the Keras that ``tf.keras`` is.

It takes the package ``keras`` for it, whose place today's Keras 3 has; a script by hand that trains
``tf.keras`` models of tf_keras needs these lines.
"""

from __future__ import annotations

import sys

import tensorflow as tf

if tf.keras.__name__.startswith("tf_keras"):
    sys.modules["keras"] = tf.keras
import horovod.tensorflow.keras as hvd

__all__ = ["hvd"]
