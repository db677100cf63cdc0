"""Convolutions, pooling and padding: channels may be split, heights and widths are whole."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.keras.layers import causal_padding, depthwise_kernel_of, replaced
from tfdist.strategies.mesh.context import Context, last_is_split, sizes_after
from tfdist.strategies.mesh.operations import MODEL
from tfdist.strategies.mesh.registry import (
    UnsupportedLayerError,
    check_channels_last,
    register_layer,
)
from tfdist.strategies.mesh.rules.dense import product_and_bias
from tfdist.strategies.mesh.rules.reshaping import activate, check

L = tf.keras.layers


@register_layer(L.Conv1D, L.Conv2D)
def convolution(context: Context, layer: Any, x: Any) -> Any:
    """Filters are split where the input's channels are whole, input channels where not."""
    check_channels_last(layer)
    check(layer, layer.activation)
    rank = len(layer.kernel.shape)
    axes = context.layout.asked_for(layer.kernel)
    if axes is None:
        axes = [None] * rank
        if layer.groups == 1 and last_is_split(x):
            axes[-2] = MODEL
        elif layer.groups == 1 and context.layout.can_split(layer.filters):
            axes[-1] = MODEL
    if any(axes[:-2]) or (layer.groups > 1 and any(axes)):
        raise UnsupportedLayerError(
            layer,
            "a layout that splits its kernel otherwise than by channels, or a kernel with groups",
        )
    x = context.with_last(x, split=axes[-2] is not None)
    output = context.dimensions(sizes_after(layer, x), split_last=axes[-1] is not None)
    inputs = [x, context.weight(layer.kernel, axes)]

    def convolve(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        if layer.padding == "causal":
            x = tf.pad(x, causal_padding(layer, x))
            with replaced(layer, padding="valid"):
                return layer.convolution_op(x, kernel)
        return layer.convolution_op(x, kernel)

    return product_and_bias(context, layer, inputs, output, axes, convolve)


@register_layer(L.DepthwiseConv2D)
def depthwise_convolution(context: Context, layer: Any, x: Any) -> Any:
    """Each device convolves the channels it holds."""
    check_channels_last(layer)
    split = last_is_split(x)
    kernel = depthwise_kernel_of(layer)
    axes = context.layout.asked_for(kernel)
    if axes is not None:
        if any((axes[0], axes[1], axes[3])):
            raise UnsupportedLayerError(
                layer, "a layout that splits its depthwise kernel otherwise than by channels"
            )
        split = axes[2] is not None
        x = context.with_last(x, split=split)
    axis = MODEL if split else None
    weights = [context.weight(kernel, (None, None, axis, None))]
    if layer.use_bias:
        weights.append(context.weight(layer.bias, (axis,)))

    def convolve(x: tf.Tensor, kernel: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
        y = tf.keras.backend.depthwise_conv2d(
            x,
            kernel,
            strides=layer.strides,
            padding=layer.padding,
            dilation_rate=layer.dilation_rate,
            data_format="channels_last",
        )
        return tf.nn.bias_add(y, bias[0]) if bias else y

    output = context.dimensions(sizes_after(layer, x), split_last=split)
    y = context.local(convolve, [x, *weights], output, name=layer.name)
    return activate(context, layer, layer.activation, y)


@register_layer(
    L.AveragePooling1D,
    L.AveragePooling2D,
    L.GlobalAveragePooling2D,
    L.GlobalMaxPooling1D,
    L.GlobalMaxPooling2D,
    L.MaxPooling1D,
    L.MaxPooling2D,
    L.UpSampling2D,
    L.ZeroPadding1D,
    L.ZeroPadding2D,
)
def each_channel(context: Context, layer: Any, x: Any) -> Any:
    """Layers without weights that treat each channel by itself: Keras' own call, on each device."""
    check_channels_last(layer)
    output = context.dimensions(sizes_after(layer, x), split_last=last_is_split(x))
    return context.local(layer.call, [x], output, name=layer.name)


@register_layer(L.GlobalAveragePooling1D)
def average_over_time(context: Context, layer: Any, x: Any, mask: Any = None) -> Any:
    """x: [batch, time, channels]; mask: [batch, time]."""
    if mask is None:
        return each_channel(context, layer, x)
    check_channels_last(layer)
    sizes = [1, x.shape.dims[-1].size][0 if layer.keepdims else 1 :]
    output = context.dimensions(sizes, split_last=last_is_split(x))
    return context.local(
        lambda x, mask: layer.call(x, mask=mask), [x, mask], output, name=layer.name
    )
