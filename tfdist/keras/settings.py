"""What holds for all models of a process: the types they compute in, and the names of layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.compat import keras_source
from tfdist.keras.version import IS_KERAS_3

#: Whether TensorBoard writes where it is told to on workers that are not the chief, too.
WRITES_WHERE_TOLD = IS_KERAS_3

# What Keras 3 calls the names of layers with how often each is taken.
_NAMES = "object_name_uids"


def set_policy(policy: Any) -> None:
    """Sets the types that layers compute in; None follows ``floatx``, which Keras 3 does once."""
    follows = IS_KERAS_3 and policy is None
    tf.keras.mixed_precision.set_global_policy(tf.keras.backend.floatx() if follows else policy)


def restart_names() -> None:
    """Has layers without a name of their own be named as the first ones of a process."""
    if IS_KERAS_3:
        keras_source("utils.naming").reset_uids()
    else:
        tf.keras.backend.reset_uids()


@contextlib.contextmanager
def uncounted_names() -> Iterator[None]:
    """Has layers and metrics that are made meanwhile leave no name taken."""
    if IS_KERAS_3:
        names = keras_source("backend.common.global_state")
        before = dict(names.get_global_attribute(_NAMES) or {})
        try:
            yield
        finally:
            restart_names()
            names.get_global_attribute(_NAMES).update(before)
        return
    counts = keras_source("backend").PER_GRAPH_OBJECT_NAME_UIDS
    of_operators = keras_source("backend").OBSERVED_NAMES
    before, seen = {graph: dict(names) for graph, names in counts.items()}, set(of_operators)
    try:
        yield
    finally:
        for graph, names in counts.items():
            names.clear()
            names.update(before.get(graph, {}))
        of_operators.intersection_update(seen)
