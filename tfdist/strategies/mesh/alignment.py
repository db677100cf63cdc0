"""Brings the operands of an elementwise operation to one layout."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.strategies.mesh.context import Context, is_split
from tfdist.strategies.mesh.operations import mtf


def aligned(context: Context, operands: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns operands whose slices broadcast as the whole tensors would, and the output's dims.

    Args:
        operands: tensors on the mesh, at least one of them a batch; weights (tf.Variable) and
            constants beside them.
    """
    on_mesh = [x for x in operands if isinstance(x, mtf.Tensor)]
    rank = max(len(x.shape.dims) for x in on_mesh)
    widths = {x.shape.dims[-1].size for x in on_mesh}
    full = max(widths)
    # The last dimension stays split only where every full operand is split alike.
    keep = all(is_split(x.shape.dims[-1]) for x in on_mesh if x.shape.dims[-1].size == full)
    keep = keep and widths <= {1, full}
    tensors = [x if keep else context.whole(x) for x in on_mesh]
    sizes = [max(_size(x, place, rank) for x in tensors) for place in range(1, rank)]
    for x in operands:
        if isinstance(x, mtf.Tensor):
            continue
        shape = x.shape if isinstance(x, tf.Variable) else tf.convert_to_tensor(x).shape
        assert len(shape) <= rank, shape
        for place, size in enumerate(reversed(shape), 1):
            if place < rank:
                sizes[-place] = max(sizes[-place], size)
    output = context.dimensions(sizes, split_last=keep)
    moved = iter(tensors)
    result = []
    for x in operands:
        if isinstance(x, mtf.Tensor):
            result.append(next(moved))
        elif isinstance(x, tf.Variable):
            dims = context.dims_like(x.shape, output)
            result.append(context.weight(x, tuple("model" if is_split(d) else None for d in dims)))
        else:
            result.append(context.constant(x, output))
    return result, output


def _size(x: Any, place: int, rank: int) -> int:
    """Returns the size of ``x`` at ``place`` of a tensor of ``rank``, as broadcasting reads it."""
    own = place - (rank - len(x.shape.dims))
    return x.shape.dims[own].size if own > 0 else 1
