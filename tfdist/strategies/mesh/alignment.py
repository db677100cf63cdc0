"""Brings the operands of an elementwise operation to one layout."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.strategies.mesh.context import Context, has_batch, is_split
from tfdist.strategies.mesh.operations import MODEL, mtf


def aligned(context: Context, operands: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns operands whose slices broadcast as the whole tensors would, and the output's dims.

    Args:
        operands: tensors on the mesh, at least one of them a batch; weights (tf.Variable) and
            constants beside them.
    """
    on_mesh = [x for x in operands if isinstance(x, mtf.Tensor)]
    shapes = [_shape(x) for x in operands]
    rank = max(len(shape) for shape in shapes)
    sizes = [
        max(shape[-place] if place <= len(shape) else 1 for shape in shapes)
        for place in range(rank, 0, -1)
    ]
    # The last dimension stays split only where every operand is split alike, or repeats it.
    lasts = [x.shape.dims[-1] for x in on_mesh if x.shape.dims]
    keep = all(is_split(d) for d in lasts if d.size == sizes[-1])
    keep = keep and any(is_split(d) for d in lasts)
    if not keep:
        on_mesh = [context.whole(x) for x in on_mesh]
    if any(has_batch(x) for x in on_mesh):
        output = context.dimensions(sizes[1:], split_last=keep)
    else:
        output = context.dims_like(sizes, list(on_mesh[0].shape.dims))
    moved = iter(on_mesh)
    result = []
    for x in operands:
        if isinstance(x, mtf.Tensor):
            result.append(next(moved))
        elif isinstance(x, tf.Variable):
            dims = context.dims_like(x.shape, output)
            axes = tuple(MODEL if is_split(d) else None for d in dims)
            result.append(context.weight(x, axes))
        else:
            result.append(context.constant(x, output))
    return result, output


def _shape(x: Any) -> list[int]:
    if isinstance(x, mtf.Tensor):
        return [dimension.size for dimension in x.shape.dims]
    return list(x.shape if isinstance(x, tf.Variable) else tf.convert_to_tensor(x).shape)
