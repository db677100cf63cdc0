"""The model that an endpoint serves, and what stands beside it in model.tar.gz."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.records.format.manifest import Manifest
from tfdist.records.format.schema import Schema
from tfdist.runs.files import write_json
from tfdist.strategies.base import called, clone

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

# Files beside the scripts that a serving container runs, and their names in model.tar.gz.
_SERVING_FILES = {
    "inference.py": "code/inference.py",
    "serving-requirements.txt": "code/requirements.txt",
}


def plain(model_fn: Any, weights: list[np.ndarray]) -> tf.keras.Model:
    """Returns an ordinary Keras model with ``weights``, untouched by any strategy."""
    import tensorflow as tf

    model = clone(model_fn) if isinstance(model_fn, tf.keras.Model) else called(model_fn)
    model.set_weights(weights)
    return model


def describe(model: tf.keras.Model, schema: Schema) -> dict[str, Any]:
    """Returns what evaluation must know of the outputs: problem, classes, and whether logits.

    ``problem`` is "multiclass", "binary", "regression", or None for anything else.
    """
    label = schema.class_label
    labels = schema.of_role("label")
    outputs = model.output_shape
    problem = None
    if isinstance(outputs, tuple) and len(outputs) == 2:
        if label is not None:
            problem = "multiclass" if outputs[-1] > 1 else "binary"
        elif len(labels) == 1 and set(labels[0].read_shape) <= {1}:
            problem = "regression" if outputs[-1] == 1 else None
    return {
        "problem": problem,
        "from_logits": bool(getattr(model.loss, "from_logits", False)),
        "classes": None if label is None or label.classes is None else list(label.classes),
    }


def write_about(folder: Path, model: tf.keras.Model, manifest: Manifest, code_folder: Path) -> None:
    """Writes what stands beside the SavedModel in model.tar.gz: code/ for serving, and tfdist/.

    Args:
        folder: what becomes the archive.
        manifest: of the shards of the training.
        code_folder: where the scripts are.
    """
    about = folder / "tfdist"
    about.mkdir(exist_ok=True)
    manifest.save(about)
    write_json(about / "model.json", describe(model, manifest.schema))
    for file, target in _SERVING_FILES.items():
        (folder / target).parent.mkdir(exist_ok=True)
        shutil.copyfile(code_folder / file, folder / target)
