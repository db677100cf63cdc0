"""The SavedModel that TensorFlow Serving loads, with signatures for tensors and for records."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.records.format.schema import Schema

if TYPE_CHECKING:
    import tensorflow as tf

RECORDS_SIGNATURE = "serving_records"


def write(model: tf.keras.Model, schema: Schema, path: Path) -> None:
    """Writes a SavedModel under a temporary name beside ``path``, then renames it.

    Signatures: ``serving_default`` takes the inputs of the schema, [batch, *shape]; an only input
    is called by its feature's name. ``serving_records`` takes ``examples``, string [batch],
    serialised tf.train.Examples as the shards hold them, and decodes them itself. Both return
    ``outputs``, or the model's outputs by name.
    """
    import tensorflow as tf

    from tfdist.records.reading.decode import make_decoder

    inputs = schema.of_role("input")
    specs = {f.name: tf.TensorSpec((None, *f.read_shape), f.dtype, name=f.name) for f in inputs}
    # Labels need not be in a record that is to be predicted.
    decode = make_decoder(Schema(inputs), layout=None)

    def named(outputs: Any) -> dict[str, tf.Tensor]:
        if isinstance(outputs, dict):
            return outputs
        if isinstance(outputs, (list, tuple)):
            return dict(zip(model.output_names, outputs, strict=True))
        return {"outputs": outputs}

    def from_tensors(**tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        x = tensors if len(tensors) > 1 else next(iter(tensors.values()))
        return named(model(x, training=False))

    def from_records(examples: tf.Tensor) -> dict[str, tf.Tensor]:
        return named(model(decode(examples)[0], training=False))

    examples = tf.TensorSpec([None], tf.string, name="examples")
    signatures = {
        "serving_default": tf.function(from_tensors).get_concrete_function(**specs),
        RECORDS_SIGNATURE: tf.function(from_records).get_concrete_function(examples),
    }
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        written = Path(folder) / path.name
        tf.saved_model.save(model, str(written), signatures=signatures)
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(written, path)
