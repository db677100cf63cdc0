"""Which layer calls of a model are computed again, as models of their own: see ``recompute``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.errors import unknown_choice
from tfdist.keras.layers import layers_in
from tfdist.training.layers import randomness
from tfdist.training.memory.balanced_cuts import balance
from tfdist.training.memory.flat_parts import BYTES_OF_A_BUCKET
from tfdist.training.model.layer_calls import Call, Graph, crossing_bytes, model_of


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive layer calls, as a model of their own that shares the layers.

    Tensors of the whole model are known by a key, the ``id`` of the symbolic tensor.

    Attributes:
        model: inputs -> outputs, both lists.
        inputs, outputs: keys.
        repeats: whether it is computed once more: not what augments, nor what has no gradients.
        name: for people.
    """

    model: tf.keras.Model
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    repeats: bool
    name: str


Bounds = list[tuple[int, int, bool]]  # (first call, the one after the last, computed again)


def named(graph: Graph, names: Sequence[str]) -> Bounds:
    """Returns the layers and nested models of these names as blocks.

    Raises:
        OptionError: there is no layer of a name.
    """
    calls = graph.calls
    block_of: dict[int, int] = {}
    for number, name in enumerate(names):
        found = [index for index, call in enumerate(calls) if call.is_called(name)]
        if not found:
            known = ["none", "blocks", *dict.fromkeys(graph.names)]
            raise unknown_choice("layer in recompute", name, known)
        for index in found:
            block_of.setdefault(index, number)
    return _runs(calls, block_of.get)


def _runs(calls: Sequence[Call], block_of: Callable[[int], Any]) -> Bounds:
    """Returns the calls that follow each other and are of one block, or of none."""
    bounds, start = [], 0
    for block, items in itertools.groupby(range(len(calls)), block_of):
        stop = start + len(list(items))
        bounds.append((start, stop, block is not None))
        start = stop
    return bounds


def chosen(graph: Graph) -> Bounds:
    """Returns the blocks of a model that is made of blocks, else about as many as their layers."""
    calls = graph.calls
    runs = _runs_of_blocks(calls)
    sizes = [_bytes(calls[start:stop]) for start, stop, is_block in runs if is_block]
    if len(sizes) > 1 and max(sizes) <= sum(sizes) / 2 and 2 * sum(sizes) >= _bytes(calls):
        bounds = runs
    else:
        parts = max(1, round(math.sqrt(len(calls))))
        costs = [float(call.row_bytes) for call in calls]
        crossing = [crossing_bytes(calls, cut) for cut in range(len(calls))]
        cuts = [0, *balance(costs, crossing, parts), len(calls)]
        bounds = [(start, stop, True) for start, stop in itertools.pairwise(cuts)]
    # The way back begins with the last calls: nothing is gained by dropping what it needs at once.
    start, stop, _ = bounds[-1]
    bounds[-1] = (start, stop, False)
    return bounds


def to_divide(graph: Graph) -> Bounds:
    """Returns the blocks of a model whose weights replicas divide.

    They are those of a model that is made of blocks. Else calls are taken together until they have
    the weights of a bucket, or of the largest call: what is whole at a time is little.
    """
    calls = graph.calls
    runs = _runs_of_blocks(calls)
    if sum(is_block for _, _, is_block in runs) > 1:
        return runs
    limit = max([BYTES_OF_A_BUCKET, *(call.weight_bytes for call in calls)])
    bounds: Bounds = []
    for number, call in enumerate(calls):
        start, _, _ = bounds[-1] if bounds else (0, 0, True)
        together = sum(each.weight_bytes for each in calls[start:number]) + call.weight_bytes
        if bounds and together <= limit:
            bounds[-1] = (start, number + 1, True)
        else:
            bounds.append((number, number + 1, True))
    return bounds


def _runs_of_blocks(calls: Sequence[Call]) -> Bounds:
    def block_of(index: int) -> Any:
        call = calls[index]
        if len(call.path) > 1:
            return call.path[0]
        return index if len(layers_in(call.layer)) > 1 else None

    return _runs(calls, block_of)


def _bytes(calls: Sequence[Call]) -> int:
    """Returns an estimate of what calls leave behind: a layer made of layers leaves of each."""
    return sum(call.row_bytes * len(layers_in(call.layer)) for call in calls)


def segments_of(graph: Graph, bounds: Bounds) -> list[Segment]:
    """Returns the calls within ``bounds`` as models, in their order."""
    calls, results = graph.calls, {id(tensor) for tensor in graph.outputs}
    segments = []
    for start, stop, repeats in bounds:
        own = calls[start:stop]
        made = {id(tensor): tensor for call in own for tensor in call.outputs}
        read = {id(t): t for call in own for t in call.inputs if id(t) not in made}
        wanted = results | {id(tensor) for call in calls[stop:] for tensor in call.inputs}
        given = {key: tensor for key, tensor in made.items() if key in wanted}
        augments = any(randomness.augments(part) for call in own for part in layers_in(call.layer))
        flows = any(tf.as_dtype(tensor.dtype).is_floating for tensor in given.values())
        segments.append(
            Segment(
                model=model_of(own, list(read.values()), list(given.values())),
                inputs=tuple(read),
                outputs=tuple(given),
                repeats=repeats and flows and not augments,
                name=own[0].name if len(own) == 1 else f"{own[0].name} to {own[-1].name}",
            )
        )
    return segments
