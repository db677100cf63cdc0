"""The SavedModel that TensorFlow Serving loads, with signatures for tensors and for records."""

from __future__ import annotations

import keyword
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.errors import DataError
from tfdist.records.format.schema import Schema

if TYPE_CHECKING:
    import tensorflow as tf

RECORDS_SIGNATURE = "serving_records"


def check_names(schema: Schema) -> None:
    """Raises:
    DataError: the inputs have names that no signature of TensorFlow can have beside each other.
    """
    names = [feature.name for feature in schema.of_role("input")]
    # As TensorFlow makes names of Python of them.
    made = [re.sub(r"\W", "_", name.lower(), flags=re.ASCII) for name in names]
    wrong = [
        name
        for name, own in zip(names, made, strict=True)
        if not re.fullmatch(r"[A-Za-z0-9.][\w./>-]*", name, re.ASCII)
        or keyword.iskeyword(name)
        or name == "self"
        or made.count(own) > 1
    ]
    if wrong:
        raise DataError(
            "the inputs of a SavedModel must be called by letters, digits and any of _.-/, and "
            "differ in more than these and capitals",
            received=", ".join(map(repr, wrong)),
            mend="Rename the columns, shard them again, and train on them",
        )


def from_tensors(model: tf.keras.Model, schema: Schema, made: Callable[[Any], Any]) -> Any:
    """Returns the inference of ``model`` on the inputs of ``schema``, traced, by their names.

    Args:
        made: what its outputs are handed to.
    """
    import tensorflow as tf

    inputs = schema.of_role("input")
    specs = {f.name: tf.TensorSpec((None, *f.read_shape), f.dtype, name=f.name) for f in inputs}

    # By place: TensorFlow would make names of Python of keywords as "native-country".
    def infer(*tensors: tf.Tensor) -> Any:
        x = dict(zip(specs, tensors, strict=True)) if len(specs) > 1 else tensors[0]
        return made(model(x, training=False))

    return tf.function(infer).get_concrete_function(*specs.values())


def write(model: tf.keras.Model, schema: Schema, path: Path) -> None:
    """Writes a SavedModel under a temporary name beside ``path``, then renames it.

    Signatures: ``serving_default`` takes the inputs of the schema, [batch, *shape]; an only input
    is called by its feature's name. ``serving_records`` takes ``examples``, string [batch],
    serialised tf.train.Examples as the shards hold them, and decodes them itself. Both return
    ``outputs``, or the model's outputs by name.

    Raises:
        DataError: see ``check_names``.
    """
    import tensorflow as tf

    from tfdist.records.reading.decode import make_decoder

    check_names(schema)
    inputs = schema.of_role("input")
    # Labels need not be in a record that is to be predicted.
    decode = make_decoder(Schema(inputs), layout=None)

    def named(outputs: Any) -> dict[str, tf.Tensor]:
        if isinstance(outputs, dict):
            return outputs
        if isinstance(outputs, (list, tuple)):
            return dict(zip(model.output_names, outputs, strict=True))
        return {"outputs": outputs}

    def from_records(examples: tf.Tensor) -> dict[str, tf.Tensor]:
        return named(model(decode(examples)[0], training=False))

    examples = tf.TensorSpec([None], tf.string, name="examples")
    signatures = {
        "serving_default": from_tensors(model, schema, named),
        RECORDS_SIGNATURE: tf.function(from_records).get_concrete_function(examples),
    }
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        written = Path(folder) / path.name
        tf.saved_model.save(model, str(written), signatures=signatures)
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(written, path)
