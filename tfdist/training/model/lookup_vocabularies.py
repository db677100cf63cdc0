"""What layers have learned with ``adapt`` before a training: the same on all processes.

Normalization and Discretization compute with constants that they have made of their variables; a
lookup layer holds its vocabulary in a table, which is no variable at all, so that no checkpoint of
TensorFlow's has it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import uses_keras_3
from tfdist.errors import DataError
from tfdist.keras.layers import layers_in, vocabularies_in
from tfdist.keras.steps import forget_functions
from tfdist.training.engine.collective import Collective

_BY_VARIABLES = (tf.keras.layers.Normalization, tf.keras.layers.Discretization)
# What a lookup layer with output_mode="tf_idf" weighs words with.
_IDF = "idf_weights_const"
_BY_TABLE = (tf.keras.layers.StringLookup, tf.keras.layers.IntegerLookup)


def follow_variables(model: tf.keras.Model) -> None:
    """Makes the constants anew of variables that were restored, or came from the chief."""
    for layer in layers_in(model):
        has_constants = isinstance(layer, _BY_VARIABLES) or hasattr(layer, _IDF)
        # Keras 3 counts no weights of words among those of the layer.
        if not has_constants or not (layer.non_trainable_weights or hasattr(layer, _IDF)):
            continue
        before = _constants(layer)
        layer.finalize_state()
        if not all(map(np.array_equal, before, _constants(layer))):
            # Graphs hold the constants of before.
            forget_functions(model)


def learned_words(model: tf.keras.Model) -> list[np.ndarray]:
    """Returns the words that each lookup layer has adapted to; integers, or texts as bytes."""
    return [kept.get_tensors()[0].numpy() for kept in vocabularies_in(model)]


def take_words(model: tf.keras.Model, words: Sequence[np.ndarray]) -> None:
    """Gives the lookup layers of ``model`` what ``learned_words`` of another one like it has."""
    pairs = zip(vocabularies_in(model), learned_words(model), words, strict=True)
    others = [(kept, right) for kept, own, right in pairs if not np.array_equal(own, right)]
    for kept, right in others:
        kept.set_weights([right])
    if others:
        forget_functions(model)  # Graphs look words up in the tables of before.


def take_adapted(copy: tf.keras.Model, model: tf.keras.Model) -> None:
    """Has ``copy``, which has the weights of ``model``, compute with all that its layers learned.

    Keras 3 counts no vocabulary among the weights.
    """
    if uses_keras_3():
        for new, old in zip(_lookups(copy), _lookups(model), strict=True):
            words = old.get_vocabulary()
            if words != new.get_vocabulary():
                idf = getattr(old, _IDF, None)  # Padded to max_tokens, as it will be again.
                new.set_vocabulary(words, None if idf is None else idf[: len(words)])
    follow_variables(copy)


def check_vocabularies(model: tf.keras.Model, collective: Collective) -> None:
    """Raises:
    DataError: the processes have other vocabularies, of which the chief's would be saved.
    """
    layers = _lookups(model)
    if collective.num_processes == 1 or not layers:
        return
    words = [layer.get_vocabulary() for layer in layers]
    told = collective.gather([(len(each), zlib.crc32(repr(each).encode())) for each in words])
    for rank, theirs in enumerate(told):
        for layer, chiefs, own in zip(layers, told[0], theirs, strict=True):
            if own != chiefs:
                raise DataError(
                    "all ranks must have the same vocabulary",
                    received=f"layer '{layer.name}' with {chiefs[0]} words on rank 0 and "
                    f"{own[0]}{' others' if own[0] == chiefs[0] else ''} on rank {rank}",
                    mend="Adapt it to the same data on each rank, or give it vocabulary=...",
                )


def _lookups(model: tf.keras.Model) -> list[Any]:
    return [layer for layer in layers_in(model) if isinstance(layer, _BY_TABLE)]


def _constants(layer: Any) -> list[Any]:
    names = ("mean", "variance", "bin_boundaries", _IDF)
    return [np.array(getattr(layer, name)) for name in names if hasattr(layer, name)]
