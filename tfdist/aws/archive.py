"""The model.tar.gz of a model that was trained elsewhere, as a training job here leaves it."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist.aws import saved_model
from tfdist.aws.evaluation import ARCHIVE
from tfdist.errors import OptionError, cannot_write
from tfdist.export.versions import Served, tf_serving
from tfdist.export.warmup import WARMUP
from tfdist.records.format.manifest import load_manifest

if TYPE_CHECKING:
    import tensorflow as tf

# That tfdist init --sagemaker copies.
_SCRIPTS = Path(__file__).with_name("scripts")


def write(model: tf.keras.Model, folder: Path, data: str) -> tuple[Path, Served]:
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
            saved_model.write_about(content, model, load_manifest(Path(data)), _SCRIPTS)
            with tarfile.open(packed, "w:gz") as archive:
                archive.add(content, arcname=".")
            packed.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path, version
