"""Texts that a layer pads to the longest of the rows it sees, which are others on each replica."""

from __future__ import annotations

import tensorflow as tf

from tfdist.errors import notice
from tfdist.keras.layers import layers_in


def padded_by_batch(model: tf.keras.Model) -> list[str]:
    """Returns the names of layers whose output depends on the other texts of a batch."""
    found = []
    for layer in layers_in(model):
        if isinstance(layer, tf.keras.layers.TextVectorization):
            config = layer.get_config()
            is_padded = config["output_mode"] == "int" and not config["ragged"]
            if is_padded and config["output_sequence_length"] is None:
                found.append(layer.name)
    return found


def warn_of_padding(model: tf.keras.Model, *, is_chief: bool) -> None:
    names = padded_by_batch(model)
    if names and is_chief:
        notice(
            "warning: texts must be padded to one length for a divided batch to be exact, "
            f"but found layer '{names[0]}' without output_sequence_length, which pads to the "
            "longest text that a replica sees. Give it output_sequence_length, or mask the padding",
        )
