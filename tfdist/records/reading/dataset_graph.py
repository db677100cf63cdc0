"""What a tf.data.Dataset was made of: every name of tf.data that is not public stands here.

Where a later TensorFlow has other names, the answers are those for an unknown dataset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Ops that TensorFlow calls stateful, and that give the same for the same.
_PURE = ("Assert", "EagerPyFunc", "PyFunc", "ReadFile", "ReadVariableOp")

# What runs a function of which nothing is known here.
_OF_FUNCTIONS = ("StatefulPartitionedCall", "If", "While", "Case")


def operation(dataset: tf.data.Dataset) -> str:
    """Returns the last operation of a dataset, such as "Batch", "ParallelMap" or "TensorSlice"."""
    name = type(dataset).__name__.strip("_")
    for suffix in ("V1", "V2", "Dataset"):
        name = name.removesuffix(suffix)
    return name


def inputs(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the datasets that the last operation reads; none when that is not known."""
    try:
        return list(dataset._inputs())
    except (AttributeError, NotImplementedError):
        return []


def keeps_elements(dataset: tf.data.Dataset) -> bool:
    """Whether the last operation gives elements of its one input as they are."""
    bases = (base.__name__ for base in type(dataset).__mro__)
    return operation(dataset) == "Restructured" or "UnaryUnchangedStructureDataset" in bases


def reshuffles(dataset: tf.data.Dataset) -> bool:
    """Whether the last operation is a shuffle that gives each pass an order of its own."""
    if operation(dataset) not in ("Shuffle", "ShuffleAndRepeat"):
        return False
    return getattr(dataset, "_reshuffle_each_iteration", True) is not False


def mapped_function(dataset: tf.data.Dataset) -> Callable | None:
    """Returns the user's function of a map; None when it cannot be had."""
    return getattr(getattr(dataset, "_map_func", None), "_func", None)


def is_pure_map(dataset: tf.data.Dataset) -> bool:
    """Whether the last operation is a map that keeps the order, by a function of which nothing is
    known to give other results for the same element; False when that is not known."""
    if operation(dataset) not in ("Map", "ParallelMap") or mapped_function(dataset) is None:
        return False
    if getattr(dataset, "_deterministic", "default") not in ("default", "true"):
        return False
    try:
        operations = dataset._map_func.function.graph.get_operations()
    except AttributeError:
        return False
    # Python functions that give something else each time are refused beforehand: a second pass over
    # the first records gives others. Random numbers of an op may be the same in each pass.
    return all(op.type in _PURE or not op.op_def.is_stateful for op in operations)


def draws(dataset: tf.data.Dataset) -> bool:
    """Whether an operation of a dataset has a function that may draw random numbers, which begin
    anew in a new iterator alone; False when that is not known."""
    try:
        functions = dataset._functions()
        operations = [op for f in functions for op in f.function.graph.get_operations()]
    except (AttributeError, NotImplementedError):
        operations = []
    return any(map(_may_draw, operations)) or any(map(draws, inputs(dataset)))


def _may_draw(op: tf.Operation) -> bool:
    is_random = any(attribute.name == "seed" for attribute in op.op_def.attr)
    return op.op_def.is_stateful and (is_random or op.type in _OF_FUNCTIONS)


def parallel_calls(dataset: tf.data.Dataset) -> int | None:
    """Returns how many calls of a map may run at once; None for one."""
    calls = getattr(dataset, "_num_parallel_calls", None)
    return None if calls is None else int(tf.get_static_value(calls))


def batch_size(dataset: tf.data.Dataset) -> tf.Tensor | None:
    """Returns the size of a batch operation, int64 []; None when it cannot be had."""
    return getattr(dataset, "_batch_size", None)


def drops_remainder(dataset: tf.data.Dataset) -> bool:
    """Whether a batch operation leaves out a smaller last batch; True when that is not known."""
    return bool(getattr(dataset, "_drop_remainder", True))


def padding_values(dataset: tf.data.Dataset) -> Any:
    """Returns what a padded batch is padded with, in the structure of its elements; None if not
    known."""
    return getattr(dataset, "_padding_values", None)
