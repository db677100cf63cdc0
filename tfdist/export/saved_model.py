"""The SavedModel that TensorFlow Serving loads, with signatures for tensors and for records."""

from __future__ import annotations

import itertools
import keyword
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.records.format.schema import Schema

if TYPE_CHECKING:
    import tensorflow as tf

RECORDS_SIGNATURE = "serving_records"


def signature_names(schema: Schema) -> dict[str, str]:
    """Returns by the name of each input what a signature of TensorFlow calls it.

    That is its own where a signature can have it beside the others; else one that is made of it, as
    "sepal_length__cm_" of "sepal length (cm)".
    """
    names = [feature.name for feature in schema.of_role("input")]
    found: dict[str, str] = {}
    taken: set[str] = set()
    first = {_in_python(name): name for name in reversed(names) if _is_allowed(name)}
    # First those that can keep theirs.
    for name in sorted(names, key=lambda name: name not in first.values()):
        own = name
        if not _is_allowed(name):
            own = re.sub(r"[^\w./>-]", "_", name, flags=re.ASCII)
            own = next(n for n in (own, f"{own}_", f"x{own}") if _is_allowed(n))
        each = itertools.chain([own], (f"{own}_{number}" for number in itertools.count(2)))
        found[name] = next(n for n in each if _in_python(n) not in taken)
        taken.add(_in_python(found[name]))
    return {name: found[name] for name in names}


def _is_allowed(name: str) -> bool:
    is_word = re.fullmatch(r"[A-Za-z0-9.][\w./>-]*", name, re.ASCII)
    return bool(is_word) and not keyword.iskeyword(name) and name != "self"


def _in_python(name: str) -> str:
    """Returns what TensorFlow makes of a name, by which it must differ from all others."""
    return re.sub(r"\W", "_", name.lower(), flags=re.ASCII)


def from_tensors(model: tf.keras.Model, schema: Schema, made: Callable[[Any], Any]) -> Any:
    """Returns the inference of ``model`` on the inputs of ``schema``, traced, by the names that
    ``signature_names`` gives.

    Args:
        made: what its outputs are handed to.
    """
    import tensorflow as tf

    names = signature_names(schema)
    specs = {
        f.name: tf.TensorSpec((None, *f.read_shape), f.dtype, name=names[f.name])
        for f in schema.of_role("input")
    }

    # By place: TensorFlow would make names of Python of keywords as "native-country".
    def infer(*tensors: tf.Tensor) -> Any:
        x = dict(zip(specs, tensors, strict=True)) if len(specs) > 1 else tensors[0]
        return made(model(x, training=False))

    return tf.function(infer).get_concrete_function(*specs.values())


def write(model: tf.keras.Model, schema: Schema, path: Path) -> None:
    """Writes a SavedModel under a temporary name beside ``path``, then renames it.

    Signatures: ``serving_default`` takes the inputs of the schema, [batch, *shape], by the names
    of ``signature_names``. ``serving_records`` takes ``examples``, string [batch], serialised
    tf.train.Examples as the shards hold them, and decodes them itself. Both return ``outputs``, or
    the model's outputs by name.
    """
    import tensorflow as tf

    from tfdist.records.reading.decode import make_decoder

    renamed = {name: own for name, own in signature_names(schema).items() if name != own}
    if renamed:
        said = ", ".join(f"'{name}' is {own}" for name, own in renamed.items())
        print(
            f"tfdist: in the signature serving_default of the SavedModel {said}: TensorFlow takes "
            "letters, digits and _.-/, and names that differ in more",
            flush=True,
        )
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
