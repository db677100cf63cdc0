"""Keras' masks on a mesh: which positions of a batch layers are to leave out.

Keras attaches a mask to a tensor, and each layer says what becomes of it. Here they stand in
``Context.masks``, and what a layer says is computed on the devices.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.compat import is_keras
from tfdist.strategies.mesh.context import Context, sizes_of_row
from tfdist.strategies.mesh.operations import mtf
from tfdist.strategies.mesh.registry import UnsupportedLayerError
from tfdist.training.model.layer_calls import arguments_of

#: Of a call that is given no mask: it has those of its inputs. None, where given, ends them.
OF_INPUTS = object()


def apart(layer: Any, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any], Any]:
    """Returns the arguments and options of a call without its mask, and the mask.

    Raises:
        UnsupportedLayerError: the mask is none of tensors on the mesh.
    """
    names = arguments_of(layer)
    # From there on by name, as ``training`` is read.
    places = [names.index(name) for name in ("training", "mask", "query_mask") if name in names]
    place = min([*places, len(arguments)])
    options = options | dict(zip(names[place:], arguments[place:], strict=False))
    mask = options.pop("mask", OF_INPUTS)
    if mask is not OF_INPUTS and not all(
        part is None or isinstance(part, mtf.Tensor) for part in tf.nest.flatten(mask)
    ):
        raise UnsupportedLayerError(layer, "the mask that it is called with is a constant")
    if mask is not OF_INPUTS and all(part is None for part in tf.nest.flatten(mask)):
        mask = None
    return arguments[:place], options, mask


def is_next(layer: Any, arguments: Any) -> bool:
    """Whether the mask is what the layer's ``call`` takes behind ``arguments``."""
    return arguments_of(layer)[len(arguments) :][:1] == ["mask"]


def for_call(
    context: Context, layer: Any, arguments: Any, options: dict[str, Any], mask: Any
) -> Any | None:
    """Returns the mask that Keras would hand to the layer's ``call``: given, or of its input."""
    if mask is not OF_INPUTS:
        return mask
    given = [
        each
        for each in (*arguments, *options.values())
        if any(isinstance(x, mtf.Tensor) for x in tf.nest.flatten(each))
    ]
    if keras.layers.MASKS_ONE_ARGUMENT and len(given) > 1:  # As an RNN's, with its states.
        return None
    if keras.graph.has_graph(layer) or not keras.layers.takes_mask(layer):
        return None
    tensors = (x for x in tf.nest.flatten(arguments[0]) if isinstance(x, mtf.Tensor))
    return next((context.masks[x] for x in tensors if x in context.masks), None)


def of_outputs(context: Context, layer: Any, arguments: Any, outputs: Any, mask: Any) -> None:
    """Attaches to the outputs of a layer the masks that it makes of those of its inputs.

    Args:
        mask: what the layer was called with, or ``OF_INPUTS``.
    """
    outputs = tf.nest.flatten(outputs)
    is_known = all(output in context.masks for output in outputs)
    if not arguments or is_known or keras.graph.has_graph(layer):
        return
    inputs = [x for x in tf.nest.flatten(arguments[0]) if isinstance(x, mtf.Tensor)]
    given = [context.masks.get(x) for x in inputs]
    if mask is not OF_INPUTS:  # An RNN's is that of the first input; others are its states.
        given = [*tf.nest.flatten(mask), *[None] * len(inputs)][: len(inputs)]
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


def _begins(layer: Any) -> bool:
    """Whether a layer makes a mask of what is not masked; one of a user's own may."""
    kinds = tf.keras.layers
    return (
        isinstance(layer, kinds.Masking)
        or (isinstance(layer, kinds.Embedding) and layer.mask_zero)
        or not is_keras(type(layer).compute_mask.__module__)
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

        is_masked = any(mask is not None for mask in own)
        made = layer.compute_mask(packed(values), packed(own) if is_masked else None)
        return made[number] if isinstance(made, (list, tuple)) else made

    inputs = [context.whole(x) for x in inputs]
    tensors = [*inputs, *(mask for mask in masks if mask is not None)]
    with tf.init_scope():  # To see whether there is one, and its shape.
        example = run(*(tf.zeros([1, *sizes_of_row(x)], x.dtype) for x in tensors))
    if example is None:
        return None
    dims = context.dimensions(list(example.shape[1:]))
    return context.local(run, tensors, dims, dtype=tf.bool, name=f"{layer.name}_mask")
