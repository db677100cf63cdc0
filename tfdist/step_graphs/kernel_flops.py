"""Floating-point operations of the products in a step: a multiplication and an addition are two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfdist.step_graphs.step_graph import Operation

_Shape = tuple[int, ...]
_MATRIX = ("MatMul", "_FusedMatMul")
_BATCHED = ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "_FusedBatchMatMulV2")
# Convolutions; one backward costs as much as the forward one.
_FORWARD = ("Conv2D", "Conv3D", "_FusedConv2D", "_FusedConv3D", "DepthwiseConv2dNative")
_FORWARD += ("_FusedDepthwiseConv2dNative",)


def flops_of(operation: Operation, inputs: Sequence[_Shape]) -> float:
    """Returns the operations of one kernel; 0 of what is no product.

    Args:
        inputs: the shapes of the operation's inputs.
    """
    kind = operation.kind
    if kind in _MATRIX:
        inner = inputs[0][0 if operation.attributes.get("transpose_a") else 1]
        return 2.0 * math.prod(operation.shapes[0]) * inner
    if kind in _BATCHED:
        inner = inputs[0][-2 if operation.attributes.get("adj_x") else -1]
        return 2.0 * math.prod(operation.shapes[0]) * inner
    if kind == "Einsum":
        return _of_einsum(operation.attributes["equation"].decode(), inputs)
    if kind in _FORWARD:
        return _of_convolution(operation.shapes[0], inputs[1], kind)
    if "BackpropInput" in kind:
        return _of_convolution(inputs[2], inputs[1], kind)
    if "BackpropFilter" in kind:
        return _of_convolution(inputs[2], operation.shapes[0], kind)
    return 0.0


def _of_convolution(output: _Shape, kernel: _Shape, kind: str) -> float:
    """Each element of the output is a sum over the kernel's places and its input channels.

    Args:
        kernel: [*places, input channels, output channels]; of a depthwise one, whose elements see
            one channel, [*places, input channels, multiplier].
    """
    sees = kernel[:-2] if "Depthwise" in kind else kernel[:-1]
    return 2.0 * math.prod(output) * math.prod(sees)


def _of_einsum(equation: str, inputs: Sequence[_Shape]) -> float:
    """Each index that is named runs over its size: a product of all of them."""
    sizes: dict[str, int] = {}
    terms = equation.partition("->")[0].split(",")
    if len(terms) < 2:  # A transposition or a sum.
        return 0.0
    for term, shape in zip(terms, inputs, strict=True):
        before, dots, behind = term.partition("...")
        sizes |= dict(zip(before, shape, strict=False))
        if dots:
            within = shape[len(before) : len(shape) - len(behind)]
            sizes |= {f".{len(within) - place}": size for place, size in enumerate(within)}
            sizes |= dict(zip(reversed(behind), reversed(shape), strict=False))
    return 2.0 * math.prod(sizes.values())
