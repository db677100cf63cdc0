"""The maps at the end of a tf.data.Dataset, apart from what they read.

A map gives one element for each that it reads. So a part of a dataset is the maps of that part of
what they read: only a function that keeps a state, or draws random numbers, could tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.records.reading import dataset_graph as graph

# They give the elements that they read, in their order.
_AS_THEY_ARE = ("Prefetch", "Options")
# What they give costs nothing but its memory, which is taken already.
_IN_MEMORY = ("TensorSlice", "Range")
# Below the maps, they pass over what is not wanted as if it were.
_CHEAP = (*_IN_MEMORY, *_AS_THEY_ARE, "Zip", "Take", "Skip", "AssertCardinality", "Concatenate")


@dataclass(frozen=True)
class Elementwise:
    """A dataset as maps over another.

    Attributes:
        base: what the first map reads; the whole dataset where there is no map.
        maps: the first one first; each takes a dataset of its elements.
    """

    base: tf.data.Dataset
    maps: tuple[Callable[[tf.data.Dataset], tf.data.Dataset], ...] = ()

    def mapped(self, part: tf.data.Dataset) -> tf.data.Dataset:
        """Returns what the maps make of elements of the base."""
        for each in self.maps:
            part = each(part)
        return part

    @property
    def is_in_memory(self) -> bool:
        return graph.operation(self.base) in _IN_MEMORY

    @property
    def is_costly(self) -> bool:
        """Whether more than passing over elements is done for those that are not wanted."""
        below = [self.base]
        while below:
            dataset = below.pop()
            if graph.operation(dataset) not in _CHEAP:
                return True
            below += graph.inputs(dataset)
        return False


def begun_anew(dataset: tf.data.Dataset, count: Any) -> tf.data.Dataset:
    """Returns the first elements of an iterator of its own: its functions draw what they drew in
    the last one, which they do not in a dataset that is read within another. Called in a function
    of tf.data.
    """
    iterator = iter(dataset)
    return tf.data.Dataset.range(count).map(lambda _: iterator.get_next())


def elementwise(dataset: tf.data.Dataset) -> Elementwise:
    """Takes maps off the end of a dataset, as many as give the same of any part."""
    base, maps = dataset, []
    while len(below := graph.inputs(base)) == 1:
        if graph.operation(base) not in _AS_THEY_ARE:
            if not graph.is_pure_map(base):
                break
            maps.insert(0, _again(base))
        (base,) = below
    found = Elementwise(base, tuple(maps))
    if not maps or found.mapped(base).element_spec != dataset.element_spec:
        return Elementwise(dataset)
    return found


def _again(dataset: tf.data.Dataset) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    """Returns what maps as a dataset does."""
    # AutoGraph is for the user's code, wherever this is called.
    function = tf.function(graph.mapped_function(dataset))
    calls = graph.parallel_calls(dataset)
    in_parallel = {} if calls is None else {"num_parallel_calls": calls, "deterministic": True}

    def again(part: tf.data.Dataset) -> tf.data.Dataset:
        return part.map(lambda *element: function(*element), **in_parallel)

    return again
