"""tfdist: write a Keras model once, name a strategy, call ``model.fit``.

Nothing heavy is imported here: TensorFlow and the engines come when they are first used.
"""

from __future__ import annotations

import importlib
import os

from tfdist.compat import follow_program, prefer_keras_2

__version__ = "0.2.0"

# Before TensorFlow is used: Keras 3 would be too late to leave.
prefer_keras_2(os.environ)

_LAZY = {
    "records": ("tfdist.records", None),
    "errors": ("tfdist.errors", None),
    "strategy": ("tfdist.strategies", "strategy"),
    "Checkpoints": ("tfdist.training.checkpoints.checkpoint", "Checkpoints"),
    "all_gather": ("tfdist.training.steps.gathering", "all_gather"),
    "reduce": ("tfdist.training.steps.gathering", "reduce"),
    "NoiseScale": ("tfdist.training.loops.noise_scale", "NoiseScale"),
    "on_chief": ("tfdist.training.loops.chief_only", "on_chief"),
    "augment": ("tfdist.records.reading.augmentation", "augment"),
    "plan": ("tfdist.runs.planning", "plan"),
    "train": ("tfdist.runs.training", "train"),
    "tune": ("tfdist.tuning.tune", "tune"),
    "evaluate": ("tfdist.runs.evaluating", "evaluate"),
    "predict": ("tfdist.runs.predicting", "predict"),
    "verify": ("tfdist.runs.verifying", "verify"),
    "decompose": ("tfdist.export", "decompose"),
    "text_vectorizer": ("tfdist.records.reading.vocabulary", "text_vectorizer"),
    "export": ("tfdist.export", None),
    "notebook_launch": ("tfdist.launch.notebook", "notebook_launch"),
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    follow_program(os.environ)
    module, attribute = _LAZY[name]
    loaded = importlib.import_module(module)
    value = loaded if attribute is None else getattr(loaded, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
