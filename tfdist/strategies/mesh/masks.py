"""Keras' masks on a mesh: which positions of a batch layers are to leave out.

Keras attaches a mask to a tensor, and each layer says what becomes of it. Here they stand in
``Context.masks``, and what a layer says is computed on the devices.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.strategies.mesh.context import Context
from tfdist.strategies.mesh.operations import mtf


def for_call(context: Context, layer: Any, arguments: Any, options: dict[str, Any]) -> Any | None:
    """Returns the mask that Keras would hand to the layer's ``call``: given, or of its input."""
    if "mask" in options:
        return options.pop("mask")
    if keras.graph.has_graph(layer) or not keras.layers.takes_mask(layer):
        return None
    return next(iter(_of(context, arguments[0])), None)


def of_outputs(context: Context, layer: Any, arguments: Any, outputs: Any) -> None:
    """Attaches to the outputs of a layer the masks that it makes of those of its inputs."""
    outputs = tf.nest.flatten(outputs)
    is_known = all(output in context.masks for output in outputs)
    if not arguments or is_known or keras.graph.has_graph(layer):
        return
    inputs = [x for x in tf.nest.flatten(arguments[0]) if isinstance(x, mtf.Tensor)]
    given = [context.masks.get(x) for x in inputs]
    makes_own = keras.layers.makes_mask(layer)
    if makes_own is None or not (any(m is not None for m in given) or _begins(layer)):
        return
    if not makes_own:  # It hands on what it is given.
        pairs = zip(outputs, given, strict=False)
        context.masks.update({output: mask for output, mask in pairs if mask is not None})
        return
    structure = tf.nest.pack_sequence_as(arguments[0], range(len(inputs)))
    for number, output in enumerate(outputs):
        mask = _made(context, layer, structure, inputs, given, number)
        if mask is not None:
            context.masks[output] = mask


def _of(context: Context, value: Any) -> list[Any]:
    return [
        context.masks[x]
        for x in tf.nest.flatten(value)
        if isinstance(x, mtf.Tensor) and x in context.masks
    ]


def _begins(layer: Any) -> bool:
    """Whether a layer makes a mask of what is not masked."""
    kinds = tf.keras.layers
    return isinstance(layer, kinds.Masking) or (
        isinstance(layer, kinds.Embedding) and layer.mask_zero
    )


def _made(
    context: Context,
    layer: Any,
    structure: Any,
    inputs: list[Any],
    masks: list[Any | None],
    number: int,
) -> Any | None:
    """Returns what the layer's own ``compute_mask`` gives for one output."""

    def run(*slices: tf.Tensor) -> tf.Tensor | None:
        slices = list(slices)
        values = [slices.pop(0) for _ in inputs]
        own = [None if mask is None else slices.pop(0) for mask in masks]

        def packed(flat: list[Any]) -> Any:
            return tf.nest.map_structure(lambda place: flat[place], structure)

        made = layer.compute_mask(packed(values), packed(own))
        return made[number] if isinstance(made, (list, tuple)) else made

    inputs = [context.whole(x) for x in inputs]
    tensors = [*inputs, *(mask for mask in masks if mask is not None)]
    with tf.init_scope():  # To see whether there is one, and its shape.
        example = run(
            *(tf.zeros([1, *(d.size for d in x.shape.dims[1:])], x.dtype) for x in tensors)
        )
    if example is None:
        return None
    dims = context.dimensions(list(example.shape[1:]))
    return context.local(run, tensors, dims, dtype=tf.bool, name=f"{layer.name}_mask")
