"""The model that an endpoint serves, and what stands beside it in model.tar.gz."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.aws.evaluation import ARCHIVE
from tfdist.errors import OptionError, cannot_write
from tfdist.records.format.manifest import Manifest, load_manifest
from tfdist.runs.files import write_json
from tfdist.strategies.base import called, clone

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

    from tfdist.export.versions import Served
    from tfdist.records.format.schema import Feature
    from tfdist.training.feed.training_data import TrainingData

# That tfdist init --sagemaker copies.
_SCRIPTS = Path(__file__).with_name("scripts")
# Files beside the scripts that a serving container runs, and their names in model.tar.gz.
_SERVING_FILES = {
    "inference.py": "code/inference.py",
    "serving-requirements.txt": "code/requirements.txt",
}


# Keras' losses, beside those of logits, of outputs that are on both sides of 0.
_AROUND_0 = ("hinge", "squared_hinge")
# Keras' loss of outputs that are one for each class, whose labels are numbers of classes.
_OF_CLASSES = "sparse_categorical_crossentropy"


def plain(model_fn: Any, weights: list[np.ndarray], feed: TrainingData) -> tf.keras.Model:
    """Returns an ordinary Keras model with ``weights``, untouched by any strategy.

    Args:
        feed: what it was trained on, which may have to build it.
    """
    import tensorflow as tf

    from tfdist.training.model.deferred_build import build_now
    from tfdist.training.model.lookup_vocabularies import follow_variables

    if isinstance(model_fn, tf.keras.Model):
        model = clone(model_fn)
    else:
        model = called(model_fn, may_be_unbuilt=True)
    build_now(model, feed)
    model.set_weights(weights)
    follow_variables(model)
    return model


def describe(model: tf.keras.Model, manifest: Manifest) -> dict[str, Any]:
    """Returns what evaluation must know of the outputs: problem, classes, and whether logits.

    ``problem`` is "multiclass", "binary", "regression", or None for anything else. Logits are
    around 0, and so are outputs of a hinge loss.
    """
    import tensorflow as tf

    from tfdist.export.saved_model import from_tensors
    from tfdist.keras.losses import compiled_losses, function_of

    # As compiled: a user may have given one loss in a list or by the name of its output.
    losses = tf.nest.flatten(compiled_losses(model))
    names = {getattr(function_of(loss), "__name__", None) for loss in losses}
    schema = manifest.schema
    label = schema.class_label
    labels = schema.of_role("label")
    # A model of a class of its own may know no shape of its outputs.
    shape = from_tensors(model, schema, lambda outputs: outputs).output_shapes
    problem = None
    if isinstance(shape, tf.TensorShape) and shape.rank == 2 and shape[-1] is not None:
        if label is not None and shape[-1] > 1:
            # A model may have been trained on classes to tell something else, as an embedding.
            tells_classes = _OF_CLASSES in names or shape[-1] == _num_classes(label, manifest)
            problem = "multiclass" if tells_classes else None
        elif label is not None and _are_two(label, manifest):
            problem = "binary"
        elif len(labels) == 1 and set(labels[0].read_shape) <= {1}:
            problem = "regression" if shape[-1] == 1 else None
    return {
        "problem": problem,
        "from_logits": any(getattr(loss, "from_logits", False) for loss in losses)
        or not names.isdisjoint(_AROUND_0),
        "classes": None if label is None or label.classes is None else list(label.classes),
    }


def _num_classes(label: Feature, manifest: Manifest) -> int | None:
    """Returns how many classes there are, or ids up to the largest one; None where unknown."""
    if label.classes is not None:
        return len(label.classes)
    counts = [split.class_counts for split in manifest.splits.values()]
    ids = [number for of_split in counts if of_split for number in of_split]
    return max(ids) + 1 if ids and None not in counts else None


def _are_two(label: Feature, manifest: Manifest) -> bool:
    """Whether the class ids are 0 and 1: else they are whole numbers that a model tells."""
    if label.classes is not None:
        return len(label.classes) == 2
    counts = [split.class_counts for split in manifest.splits.values()]
    return all(of_split is not None and set(of_split) <= {0, 1} for of_split in counts)


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
    write_json(about / "model.json", describe(model, manifest))
    for file, target in _SERVING_FILES.items():
        (folder / target).parent.mkdir(exist_ok=True)
        shutil.copyfile(code_folder / file, folder / target)


def write_archive(model: tf.keras.Model, folder: Path, data: str) -> tuple[Path, Served]:
    """Writes ``folder``/model.tar.gz for endpoints, batch transforms and evaluations of AWS.

    In it are 1/, a SavedModel that gives Keras' answers, code/ that AWS runs around each request,
    and tfdist/, what an evaluation must know.

    Args:
        model: with its weights.
        folder: which may be new; its folder must be there.
        data: the shards that it was trained on.

    Returns:
        The archive, and the version that is in it.

    Raises:
        OptionError: the archive is there already, or the folder's folder is not.
        ModelError, DataError, ExportError: as in ``export.tf_serving``.
        WriteError: the disk is full, or the folder cannot be written.
    """
    from tfdist.export.versions import tf_serving
    from tfdist.export.warmup import WARMUP

    path = folder / ARCHIVE
    if path.exists() or not folder.absolute().parent.is_dir():
        raise OptionError(
            f"{ARCHIVE} must be a new file, in a folder whose own folder exists",
            received=f"{path}, which is there" if path.exists() else f"{folder}, which cannot be",
            mend="Give another one: --to sagemaker DIR",
        )
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as place:
            content, packed = Path(place) / "model", Path(place) / ARCHIVE
            version = tf_serving(model, content, data=data)
            # Its requests are for another name of the model.
            shutil.rmtree((version.path / WARMUP).parent)
            version.config.unlink()
            write_about(content, model, load_manifest(Path(data)), _SCRIPTS)
            with tarfile.open(packed, "w:gz") as archive:
                archive.add(content, arcname=".")
            packed.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path, version
