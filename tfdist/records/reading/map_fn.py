"""A user's ``map_fn``: what it must keep, and the specs of what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.errors import DataError
from tfdist.records.reading import graph_checks

MapFn = Callable[..., Any]
_ITEMS = {1: "(x,)", 2: "(x, y)", 3: "(x, y, sample_weight)"}


def checked(map_fn: MapFn) -> MapFn:
    """Returns ``map_fn`` with a check, at run time, that it keeps the number of rows."""

    def mapped(*batch: Any) -> Any:
        result = tuple(map_fn(*batch))
        rows = tf.shape(tf.nest.flatten(batch)[0])[0]
        found = [tf.shape(leaf)[0] for leaf in tf.nest.flatten(result)]
        kept = graph_checks.check(
            tf.reduce_all([rows == number for number in found]),
            "map_fn must keep the number of rows",
            tf.strings.join(
                [graph_checks.listed(tf.stack(found)), " for ", tf.strings.as_string(rows)]
            ),
        )
        with tf.control_dependencies([kept]):
            return tf.nest.map_structure(tf.identity, result)

    return mapped


def spec_after(map_fn: MapFn, spec: Any) -> Any:
    """Returns the specs of what ``map_fn`` returns. Raises DataError for a wrong structure."""
    # A size that is no likely dimension of anything shows where the rows went.
    rows = 7919
    sized = tf.nest.map_structure(lambda s: tf.TensorSpec([rows, *s.shape[1:]], s.dtype), spec)
    outputs = map_fn.get_concrete_function(*sized).structured_outputs
    check_items("map_fn", outputs, len(spec))
    for leaf in tf.nest.flatten(outputs):
        if leaf.shape.rank == 0 or (leaf.shape.rank and leaf.shape[0] not in (rows, None)):
            raise DataError(
                "map_fn must take a batch and return one with the same number of rows",
                received=f"shape {tuple(leaf.shape)} for {rows} rows",
                mend="Return a row for each that is given; leave records out of the data instead",
            )
    return spec_of_batch(spec_of_one(tuple(outputs)))


def spec_of_one(spec: Any) -> Any:
    """Returns the specs of one record from those of a batch; a shape may be unknown."""
    return tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), spec)


def spec_of_batch(spec: Any) -> Any:
    """Returns the specs of a batch of any number of records from those of one."""
    rows = tf.TensorShape([None])
    return tf.nest.map_structure(
        lambda leaf: tf.TensorSpec(rows.concatenate(leaf.shape), leaf.dtype), spec
    )


def check_items(function: str, outputs: Any, given: int) -> None:
    """Raises DataError unless ``function`` has returned as many items as it was given."""
    is_tuple = isinstance(outputs, (tuple, list))
    if not is_tuple or len(outputs) != given:
        raise DataError(
            f"{function} must return {_ITEMS[given]}, as it is given",
            received=f"{len(outputs)} items" if is_tuple else "no tuple",
            mend=f"End it with return {_ITEMS[given][1:-1]}",
        )
