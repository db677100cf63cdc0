"""Which Keras ``tf.keras`` is: Keras 2 (``tf_keras``) or Keras 3 (``keras``).

TensorFlow takes Keras 3, unless a variable of the environment says otherwise.
Keras 3 knows no parameter servers (keras#18624), so tfdist takes Keras 2 unless it is told not to.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import MutableMapping
from types import ModuleType

VARIABLE = "TF_USE_LEGACY_KERAS"
#: What TensorFlow takes for a wish of Keras 2.
KERAS_2 = ("1", "true", "True")
#: What tfdist takes for a wish of Keras 3; nothing at all may be an oversight.
KERAS_3 = ("0", "false", "False")
_ROOTS = ("keras", "tf_keras")


def prefer_keras_2(environ: MutableMapping[str, str]) -> None:
    """Has TensorFlow take tf_keras, where that is installed, for ``tf.keras``.

    TensorFlow looks when ``tf.keras`` is first used, in this process and in those that it starts.
    """
    if importlib.util.find_spec("tf_keras") is not None:
        environ.setdefault(VARIABLE, "1")


def is_keras(module: str) -> bool:
    """Whether the module of this name is one of Keras' own."""
    return module.partition(".")[0] in _ROOTS


def keras_source(name: str) -> ModuleType:
    """Imports a private module of Keras, such as "layers.core.tf_op_layer"."""
    import tensorflow as tf

    return importlib.import_module(f"{tf.keras.Model.__module__.partition('.')[0]}.src.{name}")
