"""Files of checkpoints that several processes write together, each what it has.

A weight or a slot that replicas divide becomes slices of one tensor, as TensorFlow's own format
keeps variables that parameter servers divide. Whoever reads the tensor sees it whole, and may read
other slices of it than were written: any number of replicas, and any other strategy.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph
from tensorflow.python.checkpoint.graph_view import ObjectGraphView
from tensorflow.python.trackable.base import OBJECT_GRAPH_PROTO_KEY, VARIABLE_VALUE_KEY
from tensorflow.python.trackable.trackable_utils import checkpoint_key, object_path_to_string

from tfdist.errors import CheckpointError
from tfdist.keras.layers import replaced
from tfdist.keras.tensors import uncast
from tfdist.keras.trackables import descendants_of
from tfdist.training.memory.flat_parts import Division

#: Where a rectangle of a tensor begins, and how long it is, in each dimension.
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]


def rectangles(shape: Sequence[int], begin: int, end: int) -> list[Rectangle]:
    """Returns the rectangles that hold the elements ``begin`` to ``end`` of a tensor laid flat.

    They follow each other in that order: part of a row, whole rows, part of a row.

    Args:
        shape: of at least one dimension.
    """
    if begin >= end:
        return []
    if len(shape) == 1:
        return [((begin,), (end - begin,))]
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row

    def within(number: int) -> list[Rectangle]:
        before = number * row
        found = rectangles(shape[1:], max(begin - before, 0), min(end - before, row))
        return [((number, *starts), (1, *lengths)) for starts, lengths in found]

    if first > last:
        return within(last)
    whole = ((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    head = within(first - 1) if begin % row else []
    tail = within(last) if end % row else []
    return [*head, *([whole] if first < last else []), *tail]


@dataclass(frozen=True)
class _Slice:
    """What a file keeps of a part: the rectangle of the tensor, as TensorFlow writes it."""

    spec: str
    shape: tuple[int, ...]
    part: tf.Variable
    begin: int

    def value(self) -> tf.Tensor:
        end = self.begin + math.prod(self.shape)
        with tf.device("CPU:0"):
            # All of a part is read where it lies; of less TensorFlow makes a copy.
            is_all = end - self.begin == self.part.shape[0]
            elements = self.part.read_value() if is_all else self.part[self.begin : end]
            return tf.reshape(elements, self.shape)


@dataclass(frozen=True)
class Divided:
    """A variable that replicas divide, and what this process has of it.

    Attributes:
        whole: has its name, its shape and its place in a checkpoint; its own value is not read.
        division: of it.
        parts: number of a replica of this process -> its part, [part_size].
    """

    whole: tf.Variable
    division: Division
    parts: Mapping[int, tf.Variable]

    @property
    def dtype(self) -> tf.DType:
        """Of its elements."""
        return self.whole.dtype

    def slices(self) -> list[_Slice]:
        """Returns those of this process, in the order of the elements of its parts."""
        shape, size = self.division.shape, self.division.size
        if not shape or not size:  # No slice can be cut of it: the first replica has it.
            return [_Slice("", shape, part, 0) for number, part in self.parts.items() if not number]
        found = []
        for number, part in self.parts.items():
            before = begin = number * self.division.part_size
            for starts, lengths in rectangles(
                shape, before, min(before + self.division.part_size, size)
            ):
                pairs = zip(starts, lengths, strict=True)
                spec = f"{' '.join(map(str, shape))} {':'.join(f'{s},{n}' for s, n in pairs)}"
                found.append(_Slice(spec, lengths, part, begin - before))
                begin += math.prod(lengths)
        return found

    def take(self, values: Sequence[tf.Tensor]) -> None:
        """Gives the parts the values of ``slices``."""
        of_parts: dict[int, list[tf.Tensor]] = {}
        for own, value in zip(self.slices(), values, strict=True):
            of_parts.setdefault(id(own.part), []).append(tf.reshape(value, [-1]))
        for part in self.parts.values():
            flat = tf.concat(of_parts.get(id(part), [tf.zeros([0], part.dtype)]), 0)
            part.assign(tf.pad(flat, [[0, self.division.part_size - flat.shape[0]]]))


# Writing --------------------------------------------------------------------------------------


def keys(checkpoint: tf.train.Checkpoint, divided: Sequence[Divided]) -> list[str]:
    """Returns the names in the file of ``divided`` variables; alike in all processes of a job."""
    return [key for _, key, _ in _places(checkpoint, divided)]


def num_bytes(checkpoint: tf.train.Checkpoint) -> int:
    """Returns the bytes of all values of a checkpoint; alike in all processes of a job."""
    nodes = map(uncast, descendants_of(checkpoint))
    # Of one that is divided, too: it keeps its shape when it holds nothing.
    found = {id(node): node for node in nodes if isinstance(node, tf.Variable)}
    return sum((one.shape.num_elements() or 0) * one.dtype.size for one in found.values())


def write(
    checkpoint: tf.train.Checkpoint, prefix: str, divided: Sequence[Divided], *, with_rest: bool
) -> bool:
    """Writes what this process has of a checkpoint; ``merge`` makes one of all.

    Args:
        prefix: of the names of the files.
        with_rest: whether all that is not divided is written, too, by one of the processes.

    Returns:
        Whether there was anything to write.
    """
    places = _places(checkpoint, divided)
    if with_rest:
        with _instead(
            (node, _given({own.spec: own.value() for own in each.slices()}), None)
            for node, _, each in places
        ):
            checkpoint.write(prefix)
        return True
    found = [(key, own) for _, key, each in places for own in each.slices()]
    if found:
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[key for key, _ in found],
            shape_and_slices=[own.spec for _, own in found],
            tensors=[own.value() for _, own in found],
        )
    return bool(found)


def merge(prefixes: Sequence[str], prefix: str) -> None:
    """Makes one checkpoint of what processes have written; its index comes last."""
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=list(prefixes), destination_prefix=prefix, delete_old_dirs=False
    )


def _places(
    checkpoint: tf.train.Checkpoint, divided: Sequence[Divided]
) -> list[tuple[Any, str, Divided]]:
    """Returns (object, its name in the file, what it is divided into) of all that is divided."""
    known = {id(uncast(each.whole)): each for each in divided}
    nodes, paths = ObjectGraphView(checkpoint).breadth_first_traversal()
    return [
        (node, checkpoint_key(object_path_to_string(paths[node]), VARIABLE_VALUE_KEY), own)
        for node in nodes
        if (own := known.get(id(uncast(node)))) is not None
    ]


# Reading --------------------------------------------------------------------------------------


def read(
    checkpoint: tf.train.Checkpoint,
    path: str,
    divided: Sequence[Divided],
    read_rest: Callable[[tf.train.Checkpoint, str], None],
) -> None:
    """Reads a checkpoint, of whatever slices: of ``divided`` variables what this process has.

    Args:
        read_rest: reads the checkpoint, and raises unless all that is in ``checkpoint`` got values.

    Raises:
        CheckpointError: it is of another model.
        Exception: whatever TensorFlow raises of damaged files.
    """
    reader = tf.train.load_checkpoint(path)
    shapes = reader.get_variable_to_shape_map()
    places = _places_in(reader, checkpoint, divided)
    for each in divided:
        key = next((key for _, key, own in places if own is each), None)
        if key is None or tuple(shapes[key]) != each.division.shape:
            found = "no values" if key is None else f"values of shape {list(shapes[key])}"
            raise CheckpointError(
                "a checkpoint must be resumed by the model that wrote it",
                received=f"{path}: {found} for '{each.whole.name}', whose shape is "
                f"{list(each.division.shape)}",
                mend="Give the same model and optimizer, or start anew in another folder",
            )
    # TensorFlow must find something for each variable: one slice, which is read and let go.
    with _instead((node, _given(_one_of(own)), lambda _: None) for node, _, own in places):
        read_rest(checkpoint, path)
    keys_of = {id(own): key for _, key, own in places}
    for each in divided:
        own = each.slices()
        each.take(_slices_of(path, keys_of[id(each)], own, each.dtype) if own else [])


def _places_in(
    reader: Any, checkpoint: tf.train.Checkpoint, divided: Sequence[Divided]
) -> list[tuple[Any, str, Divided]]:
    """Returns what ``_places`` does, with the names that a file has, found as TensorFlow does."""
    known = {id(uncast(each.whole)): each for each in divided}
    graph = TrackableObjectGraph.FromString(reader.get_tensor(OBJECT_GRAPH_PROTO_KEY)).nodes
    found, waiting, seen = [], [(checkpoint, 0)], {id(checkpoint)}
    while waiting:
        node, number = waiting.pop()
        own = known.get(id(uncast(node)))
        if own is not None and graph[number].attributes:
            found.append((node, graph[number].attributes[0].checkpoint_key, own))
        children = tf.train.TrackableView.children(node)
        for child in graph[number].children:
            there = children.get(child.local_name)
            if there is not None and id(there) not in seen:
                seen.add(id(there))
                waiting.append((there, child.node_id))
    return found


def _one_of(divided: Divided) -> dict[str, tf.Tensor]:
    smallest = min(divided.slices(), key=lambda own: math.prod(own.shape), default=None)
    return {"" if smallest is None else smallest.spec: tf.zeros([0], divided.dtype)}


def _slices_of(path: str, key: str, own: Sequence[_Slice], dtype: tf.DType) -> list[tf.Tensor]:
    with tf.device("CPU:0"):
        return tf.raw_ops.RestoreV2(
            prefix=path,
            tensor_names=[key] * len(own),
            shape_and_slices=[each.spec for each in own],
            dtypes=[dtype] * len(own),
        )


# What TensorFlow asks of a variable -----------------------------------------------------------


def _given(slices: dict[str, tf.Tensor]) -> Callable[[], dict[str, dict[str, tf.Tensor]]]:
    return lambda: {VARIABLE_VALUE_KEY: slices}


@contextlib.contextmanager
def _instead(
    ways: Iterator[tuple[Any, Callable[[], Any], Callable[[Any], None] | None]],
) -> Iterator[None]:
    """Has TensorFlow write, and read, other values of variables than they have.

    Args:
        ways: (variable, what returns its slices, what takes those that were read).
    """
    with contextlib.ExitStack() as meanwhile:
        for variable, write_it, read_it in ways:
            given = {"_serialize_to_tensors": write_it, "_restore_from_tensors": read_it}
            known = {name: way for name, way in given.items() if way is not None}
            meanwhile.enter_context(replaced(variable, **known))
        yield
