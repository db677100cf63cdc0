"""Decoding in two steps: what is cheaper for many records at once, and images one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tfdist.records.format.manifest import Layout
from tfdist.records.format.schema import AS_STORED, STRING, Schema
from tfdist.records.reading.decode import Decoder, make_decoder
from tfdist.records.reading.images import decode_image


def make_record_decoder(
    schema: Schema, layout: Layout | None, *, framed: bool = False
) -> tuple[Decoder, Callable[[Any], Any]]:
    """Returns graph-safe functions that together do what ``make_decoder`` does, and its arguments.

    Returns:
        From Examples, string [batch], to the schema's structure with the files of images, string
        [batch], in place of the images; and from one record of that to its tensors. Images may
        have sizes of their own: no batch is made of them.
    """
    images = {feature.name: feature for feature in schema.features if feature.is_image}
    as_files = replace(
        schema,
        features=tuple(
            replace(feature, dtype=STRING, shape=(), encoding="bytes", reading=AS_STORED)
            if feature.is_image
            else feature
            for feature in schema.features
        ),
    )
    names = schema.nest({feature.name: feature.name for feature in schema.features})

    def finish(record: Any) -> Any:
        def decode(name: str, tensor: tf.Tensor) -> tf.Tensor:
            return decode_image(images[name], tensor) if name in images else tensor

        return tf.nest.map_structure(decode, names, record)

    return make_decoder(as_files, layout, framed=framed), finish
