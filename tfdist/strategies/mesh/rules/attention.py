"""Attention, split by heads. Vaswani et al. 2017, arXiv:1706.03762, section 3.2."""

from __future__ import annotations

import functools
import math
from typing import Any

import tensorflow as tf

from tfdist.keras.layers import attention_of
from tfdist.strategies.mesh.context import Context
from tfdist.strategies.mesh.operations import MODEL, mtf
from tfdist.strategies.mesh.registry import UnsupportedLayerError, register_layer
from tfdist.strategies.mesh.rules.dense import drop_out


@register_layer(tf.keras.layers.MultiHeadAttention)
def multi_head_attention(
    context: Context,
    layer: Any,
    query: Any,
    value: Any,
    key: Any = None,
    attention_mask: Any = None,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
    **masks_of_keras_3: Any,
) -> Any:
    """query: [batch, targets, n]; key, value: [batch, sources, n]; mask: [batch, targets, sources].

    Each device computes its heads, and their outputs add up.
    """
    _check(layer, query, return_attention_scores)
    key = value if key is None else key
    masked = [x for x in (query, value, key) if x in context.masks]
    masked += [mask for mask in masks_of_keras_3.values() if mask is not None]
    if attention_of(layer).ends_masks and masked:
        raise UnsupportedLayerError(
            layer,
            "it follows a mask, which it ends for all that reads its inputs later, in Keras 3",
            "Leave the mask out, and give it an attention_mask",
        )
    by_heads = _by_heads(context, layer)
    heads = MODEL if by_heads else None
    # One operation on distinct inputs: self-attention then sums its input's gradient once.
    given = [context.whole(x) for x in dict.fromkeys([query, value, key])]
    places = [list(dict.fromkeys([query, value, key])).index(x) for x in (query, key, value)]
    parts = attention_of(layer)
    weights = [context.weight(p.kernel, (None, heads, None)) for p in parts.projections]
    weights.append(context.weight(parts.output.kernel, (heads, None, None)))
    biases = []
    if parts.use_bias:
        biases = [context.weight(p.bias, (heads, None)) for p in parts.projections]
    masks = _masks(context, layer, query, value, attention_mask)
    if key is not value:
        masks += _of_keys(context, key)
    rate = parts.dropout if context.training else 0.0
    number = context.next_random() if rate else 0
    structure = (given, weights, biases, masks)
    scores = [
        query.shape.dims[0],
        context.dimension(parts.num_heads, split=by_heads),
        query.shape.dims[1],
        value.shape.dims[1],
    ]

    def attend(*slices: Any) -> tf.Tensor:
        slices = list(slices)
        slice_number = slices.pop() if rate else 0
        given, kernels, biases, masks = tf.nest.pack_sequence_as(structure, slices)
        projected = [
            tf.einsum("btn,nhd->bthd", given[place], kernel)
            for place, kernel in zip(places, kernels, strict=False)
        ]
        if biases:
            projected = [x + bias for x, bias in zip(projected, biases, strict=True)]
        q, k, v = projected
        q *= 1.0 / math.sqrt(float(parts.key_dim))
        logits = tf.einsum("bshd,bthd->bhts", k, q)
        allowed = _allowed(masks, logits, use_causal_mask)
        if allowed is not None:  # As Keras' Softmax layer masks.
            lowest = tf.float16.min / 2 if logits.dtype == tf.float16 else -1e9
            logits += (1.0 - tf.cast(allowed, logits.dtype)) * lowest
        attention = tf.nn.softmax(logits)
        if allowed is not None and parts.zeroes_masked:
            attention = tf.where(allowed, attention, tf.zeros([], attention.dtype))
        if rate:
            attention = drop_out(attention, rate, context.random_seed(slice_number, number))
        context_vectors = tf.einsum("bhts,bshd->bthd", attention, v)
        return tf.einsum("bthd,hdn->btn", context_vectors, kernels[3])

    width = parts.output.kernel.shape[-1]
    output = [*query.shape.dims[:2], context.dimension(width)]
    y = context.local(
        attend,
        tf.nest.flatten(structure),
        output,
        name=layer.name,
        partial_over=[MODEL] if by_heads else [],
        slice_number_of=scores if rate else None,
    )
    if not parts.use_bias:
        return y
    bias = context.weight(parts.output.bias)
    return context.local(lambda y, bias: y + bias, [y, bias], output, name=layer.name)


def _check(layer: Any, query: Any, return_attention_scores: Any) -> None:
    if return_attention_scores:
        raise UnsupportedLayerError(layer, "it is called with return_attention_scores=True")
    if len(query.shape.dims) != 3 or list(attention_of(layer).axes or [1]) != [1]:
        raise UnsupportedLayerError(
            layer, "its attention is over another axis than time of [batch, time, features]"
        )
    if attention_of(layer).more:
        raise UnsupportedLayerError(layer, f"it has {attention_of(layer).more}")


def _by_heads(context: Context, layer: Any) -> bool:
    parts = attention_of(layer)
    asked = context.layout.asked_for(parts.projections[0].kernel)
    if asked is not None:
        return asked == (None, MODEL, None)
    # A head is wide: any number of them that divides evenly is worth splitting.
    return context.model > 1 and parts.num_heads % context.model == 0


def _masks(context: Context, layer: Any, query: Any, value: Any, mask: Any) -> list[Any]:
    """Returns all that leave positions out, [batch or 1, targets or 1, sources or 1]."""
    asked = _mask(context, layer, query, value, mask)
    masks = [] if asked is None else [asked]
    if query in context.masks:
        dims = [*query.shape.dims[:2], context.dimension(1)]
        masks.append(
            context.local(lambda m: m[:, :, None], [context.masks[query]], dims, dtype=tf.bool)
        )
    return masks + _of_keys(context, value)


def _of_keys(context: Context, sources: Any) -> list[Any]:
    if sources not in context.masks:
        return []
    dims = [sources.shape.dims[0], context.dimension(1), sources.shape.dims[1]]
    own = context.masks[sources]
    return [context.local(lambda m: m[:, None], [own], dims, dtype=tf.bool)]


def _mask(context: Context, layer: Any, query: Any, value: Any, mask: Any) -> Any | None:
    if mask is None or isinstance(mask, mtf.Tensor):
        if mask is not None and len(mask.shape.dims) != 3:
            raise UnsupportedLayerError(
                layer, "its attention_mask is not [batch, targets, sources]"
            )
        return mask
    mask = tf.convert_to_tensor(mask)
    if mask.shape.rank == 3 and mask.shape[0] == context.batch.size > 1:
        return context.activation(mask)  # Made for tf.shape(x)[0] rows.
    sizes = [query.shape.dims[1].size, value.shape.dims[1].size]
    return context.constant(tf.broadcast_to(mask, [1, *sizes]))


def _allowed(masks: list[tf.Tensor], logits: tf.Tensor, causal: bool) -> tf.Tensor | None:
    """Returns what each target may look at, bool [batch or 1, 1, targets, sources]."""
    allowed = [tf.cast(mask, tf.bool)[:, None] for mask in masks]
    if causal:
        targets, sources = logits.shape[2], logits.shape[3]
        past = tf.range(targets)[:, None] >= tf.range(sources)[None]
        allowed.append(past[None, None])
    return functools.reduce(tf.logical_and, allowed) if allowed else None
