"""Records of several shapes, of which tf.data makes no batch: told in the terms of the data."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdist.errors import DataError

# TensorFlow's words, where it batches records.
_SHAPES_DIFFER = re.compile(
    r"Cannot batch tensors with different shapes in component (\d+)\. "
    r"First element had shape (\[[^]]*\]) and element \d+ had shape (\[[^]]*\])"
)
# Its words where it maps them in the same step, which name no component.
_SHAPES_DIFFER_MAPPED = re.compile(
    r"Cannot add tensor to the batch: number of elements does not match\. "
    r"Shapes are: \[tensor\]: (\[[^]]*\]), \[batch\]: (\[[^]]*\])"
)

_MEND_OF_IMAGES = (
    "Bring images to one size before they are batched, as in data.map(lambda x, y: "
    "(tf.image.resize(x, [224, 224]), y)), or batch with data.padded_batch(size); "
    "tfdist.records.write takes files of images of any size, with resize='224x224'"
)
_MEND_OF_ROWS = (
    "Bring all to one length in data.map, or batch with data.padded_batch(size), or write "
    "shards with tfdist.records.write, which takes records of any length"
)


def explain_shape_error(error: Exception, element_spec: Any) -> DataError | None:
    """Returns what an error about records of several shapes means, None when it is another.

    Args:
        element_spec: of a batch, (x[, y[, sample_weight]]).
    """
    names = dict(enumerate(_names(element_spec)))
    if found := _SHAPES_DIFFER.search(str(error)):
        component, one, other = found.groups()
        named = [int(component)]
    elif found := _SHAPES_DIFFER_MAPPED.search(str(error)):
        one, other = found.groups()
        specs = enumerate(tf.nest.flatten(element_spec))
        named = [number for number, spec in specs if not spec.shape[1:].is_fully_defined()]
    else:
        return None
    # Several could be meant, and one that is not known by its name, too.
    name = names.get(named[0] if len(named) == 1 else None, "each part of a record")
    return DataError(
        f"{name} must have one shape in all records, for a batch to be made of them",
        received=f"shapes {one} and {other}",
        mend=_MEND_OF_IMAGES if one.count(",") == other.count(",") == 2 else _MEND_OF_ROWS,
    )


def with_shapes_explained(batches: tf.data.Dataset, element_spec: Any) -> tf.data.Dataset:
    """Has iterators of ``batches`` raise DataError where records of several shapes meet.

    What is made of the batches by tf.data raises TensorFlow's own error again.

    Args:
        element_spec: see ``explain_shape_error``. Where it tells all shapes, nothing is changed.

    Returns:
        The same dataset.
    """
    leaves = tf.nest.flatten(element_spec)
    if not all(leaf.shape[1:].is_fully_defined() for leaf in leaves):
        _put(batches, "__iter__", functools.partialmethod(_begun, type(batches), element_spec))
    return batches


def _begun(batches: tf.data.Dataset, kind: type, element_spec: Any) -> Any:
    iterator = kind.__iter__(batches)
    _put(iterator, "__next__", functools.partialmethod(_taken, type(iterator), element_spec))
    return iterator


def _taken(iterator: Any, kind: type, element_spec: Any) -> Any:
    try:
        return kind.__next__(iterator)
    except tf.errors.InvalidArgumentError as error:
        explained = explain_shape_error(error, element_spec)
        if explained is None:
            raise
        raise explained from error


def _put(thing: Any, name: str, method: Any) -> None:
    """Gives ``thing`` another method of a name that Python looks for in its class.

    It becomes one of a class of its own: Keras' loops take what is of TensorFlow's own classes, and
    nothing around it.
    """
    kind = type(thing)
    thing.__class__ = type(kind.__name__, (kind,), {name: method})


def _names(element_spec: Any) -> list[str]:
    """Returns what people call the parts of (x[, y[, sample_weight]]), in the order of tf.nest."""
    names = []
    for kind, item in zip(("feature", "label", "sample weight"), element_spec, strict=False):
        if isinstance(item, Mapping):
            parts = [(f"{kind} '{key}'", item[key]) for key in sorted(item)]
        elif isinstance(item, (tuple, list)):
            parts = [(f"{kind} {number}", part) for number, part in enumerate(item, 1)]
        else:
            parts = [(f"the {kind}", item)]
        names += [name for name, part in parts for _ in tf.nest.flatten(part)]
    return names
