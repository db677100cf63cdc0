"""From a Keras model to a file for a phone or a microcontroller, proved to be the same model.

Nothing is imported before it is used.
"""

from __future__ import annotations

import importlib
import os

from tfdist.compat import follow_program, refuse_keras_3

_LAZY = {
    "tflite": "tfdist.export.exporting",
    "tf_serving": "tfdist.export.versions",
    "QUANTIZATIONS": "tfdist.export.kinds",
    "ParityError": "tfdist.export.reports",
    "prune": "tfdist.export.smaller.pruning",
    "cluster": "tfdist.export.smaller.clustering",
    "quantize_aware": "tfdist.export.smaller.rounding",
    "distill": "tfdist.export.smaller.distillation",
    "decompose": "tfdist.export.smaller.decomposing",
}

__all__ = list(_LAZY)


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'tfdist.export' has no attribute {name!r}")
    follow_program(os.environ)
    if ".smaller." in _LAZY[name]:
        refuse_keras_3(f"tfdist.export.{name}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
