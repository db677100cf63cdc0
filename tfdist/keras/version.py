"""Which Keras ``tf.keras`` is."""

from __future__ import annotations

import tensorflow as tf

#: tf_keras does not say.
IS_KERAS_3: bool = (getattr(tf.keras, "__version__", None) or "2").startswith("3.")
