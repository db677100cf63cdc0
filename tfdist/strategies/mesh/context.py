"""What the conversion of a layer works with: tensors on the mesh, and how to make more of them.

An activation is a Mesh-TensorFlow tensor [batch, ...]. Its first dimension lies on mesh axis
"batch"; its last may be split on "model"; all others are whole.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.keras.layers import replaced
from tfdist.keras.tensors import casts
from tfdist.strategies.mesh.layout import Axes, Layout
from tfdist.strategies.mesh.operations import BATCH, MODEL, LocalOperation, mtf
from tfdist.strategies.mesh.ranks import Ranks


class Context:
    """One conversion of a model.

    Args:
        mesh: of the graph that is being built.
        layout: where weights are split.
        training: whether this is a training step.
        read: (weight, its mtf dimensions) -> the weight as a tensor on the mesh.
        num_rows: true rows of the batch; ``padded_rows`` counts those added to divide it evenly.
        is_divided: whether devices hold parts of the batch, not all of it.
        seed: int64 tensor [2], new in each training step; None outside of training.
        ranks: those that each hold such a mesh, and share global batches; None: this is all.

    Attributes:
        updates: weight id -> (weight, its new value on the mesh) of weights that are not trained.
        losses: scalars on the mesh that belong to the loss.
        batch: the dimension of the rows, padding included.
    """

    def __init__(
        self,
        mesh: Any,
        layout: Layout,
        *,
        training: bool,
        read: Callable[[Any, list[Any]], Any],
        num_rows: int,
        padded_rows: int = 0,
        is_divided: bool = True,
        seed: tf.Tensor | None = None,
        ranks: Ranks | None = None,
    ):
        self.mesh = mesh
        self.ranks = ranks
        self.layout = layout
        self.training = training
        self.num_rows = num_rows
        self.is_divided = is_divided
        self.seed = seed
        self.updates: dict[int, tuple[Any, Any]] = {}
        self.losses: list[Any] = []
        #: Of the layer that is being converted; what Keras reads its weights in.
        self.compute_dtype: tf.DType | None = None
        #: tensor on the mesh -> the mask that Keras would attach to it, bool [batch, ...].
        self.masks: dict[Any, Any] = {}
        #: weight id -> what was looked up in it, and how often it was used at all.
        self._look_ups: dict[int, list[Any]] = {}
        self._num_uses: Counter[int] = Counter()
        self.batch = mtf.Dimension(BATCH, num_rows + padded_rows)
        self._padded_rows = padded_rows
        self._read = read
        #: Those that were used: weight id -> tensor on the mesh.
        self.weights: dict[int, Any] = {}
        self._cast_weights: dict[tuple, Any] = {}
        self._num_dimensions = 0
        self._num_random = 0

    # Dimensions ---------------------------------------------------------------------------------

    @property
    def model(self) -> int:
        """Devices on the model axis."""
        return self.layout.model

    def dimension(self, size: int, *, split: bool = False) -> Any:
        """Returns a new dimension, split on the model axis or whole."""
        self._num_dimensions += 1
        suffix = f"@{MODEL}" if split and self.model > 1 else ""
        return mtf.Dimension(f"d{self._num_dimensions}{suffix}", int(size))

    def dimensions(self, sizes: Sequence[int], *, split_last: bool = False) -> list[Any]:
        """Returns the dimensions of an activation: [batch, *sizes]."""
        whole = [self.dimension(size) for size in sizes]
        if split_last:
            whole[-1] = self.dimension(sizes[-1], split=True)
        return [self.batch, *whole]

    # Tensors ------------------------------------------------------------------------------------

    def activation(self, tensor: tf.Tensor) -> Any:
        """Brings a batch onto the mesh. tensor: [num_rows + padded rows, ...]."""
        return self._import(tensor, self.dimensions(tensor.shape[1:]))

    def constant(self, tensor: Any, like: Sequence[Any] | None = None) -> Any:
        """Brings a tensor without a batch onto the mesh, split as the last dimensions ``like``."""
        tensor = tf.convert_to_tensor(tensor)
        dims = self.dims_like(tensor.shape, like or [])
        return self._import(tensor, dims)

    def dims_like(self, sizes: Sequence[int], like: Sequence[Any]) -> list[Any]:
        """Returns dimensions of ``sizes``, split where the last ones of ``like`` are."""
        like = [None] * (len(sizes) - len(like)) + list(like)[max(0, len(like) - len(sizes)) :]
        return [
            self.dimension(size, split=d is not None and d.size == size and is_split(d))
            for size, d in zip(sizes, like, strict=True)
        ]

    def _import(self, tensor: tf.Tensor, dims: list[Any]) -> Any:
        return mtf.import_tf_tensor(self.mesh, tensor, mtf.Shape(dims))

    def weight(self, variable: Any, axes: Axes | None = None) -> Any:
        """Returns a weight on the mesh, in the precision that its layer computes in.

        Args:
            variable: of the Keras layer.
            axes: "model" or None for each of its dimensions; None: whole.
        """
        axes = tuple(axes or [None] * len(variable.shape))
        settled = self.layout.settle(variable, axes)

        def dims(axes: Axes) -> list[Any]:
            return [
                self.dimension(size, split=axis is not None)
                for size, axis in zip(variable.shape, axes, strict=True)
            ]

        self._num_uses[id(variable)] += 1
        if id(variable) not in self.weights:
            self.weights[id(variable)] = self._read(variable, dims(settled))
        tensor = self._read_as(self.dtype_of(variable), variable)
        return tensor if settled == axes else mtf.reshape(tensor, mtf.Shape(dims(axes)))

    def looked_up(self, table: Any, found: Any) -> None:
        """Notes what was looked up in a weight."""
        self._look_ups.setdefault(id(table), []).append(found)

    @property
    def look_ups(self) -> dict[int, list[Any]]:
        """weight id -> what was looked up in it, of weights that are only looked up."""
        uses = self._num_uses
        return {key: found for key, found in self._look_ups.items() if uses[key] == len(found)}

    def dtype_of(self, variable: Any) -> tf.DType:
        """Returns what the layer that is being converted reads a weight in."""
        return self.compute_dtype if casts(variable) else tf.as_dtype(variable.dtype)

    def _read_as(self, dtype: tf.DType, variable: Any) -> Any:
        key = (id(variable), dtype)
        if key not in self._cast_weights:
            self._cast_weights[key] = self.cast(self.weights[id(variable)], dtype)
        return self._cast_weights[key]

    def cast(self, x: Any, dtype: tf.DType) -> Any:
        """Returns ``x`` in another precision."""
        if x.dtype == dtype:
            return x
        return self.local(lambda x: tf.cast(x, dtype), [x], x.shape.dims, dtype=dtype, name="cast")

    def as_numbers(self, x: Any) -> Any:
        """Returns whole numbers in the precision of the layer, for one that casts these, too."""
        return x if x.dtype.is_floating else self.cast(x, self.compute_dtype)

    def computing_as(self, layer: Any) -> contextlib.AbstractContextManager:
        """Encloses the conversion of ``layer``: its precision, Keras' mixed ones included."""
        own = layer.compute_dtype
        return replaced(self, compute_dtype=tf.as_dtype(own) if own else self.compute_dtype)

    def whole(self, x: Any) -> Any:
        """Brings the last dimension together, where it is split."""
        return self.with_last(x, split=False)

    def with_last(self, x: Any, *, split: bool) -> Any:
        """Returns ``x`` with its last dimension split or whole, as asked."""
        last = x.shape.dims[-1]
        if is_split(last) == (split and self.model > 1):
            return x
        return mtf.reshape(
            x, mtf.Shape([*x.shape.dims[:-1], self.dimension(last.size, split=split)])
        )

    # Operations ---------------------------------------------------------------------------------

    def local(
        self,
        fn: Callable,
        inputs: Sequence[Any],
        dims: Sequence[Any],
        *,
        dtype: tf.DType | None = None,
        name: str = "local",
        partial_over: Sequence[str] = (),
        slice_number_of: Sequence[Any] | None = None,
        model_coordinate: bool = False,
        with_back: bool = False,
        beside: Sequence[tuple[Sequence[Any], tf.DType]] = (),
    ) -> Any:
        """Runs ``fn`` on each device's slices of ``inputs``; see ``LocalOperation``.

        Args:
            fn: tf.Tensors -> tf.Tensor; it must not mix rows of the batch.
            dims: of the whole output.
            beside: dims and dtype of further outputs; a tuple of all is returned then.
        """
        operation = LocalOperation(
            fn,
            inputs,
            mtf.Shape(list(dims)),
            tf.as_dtype(dtype or inputs[0].dtype),
            name=name,
            partial_over=[axis for axis in partial_over if axis == BATCH or self.model > 1],
            slice_number_of=None if slice_number_of is None else mtf.Shape(list(slice_number_of)),
            model_coordinate=model_coordinate,
            with_back=with_back,
            beside=[(mtf.Shape(list(of)), kind) for of, kind in beside],
        )
        return tuple(operation.outputs) if beside else operation.outputs[0]

    def random_seed(self, slice_number: Any, number: int) -> tf.Tensor:
        """Returns the seed of one slice: equal on devices that hold the same slice."""
        own = tf.stack([tf.cast(number, tf.int64), tf.cast(slice_number, tf.int64)])
        return self.seed + own * tf.constant([1_000_003, 1], tf.int64)

    def next_random(self) -> int:
        """Returns the number of one use of random numbers within a step."""
        self._num_random += 1
        return self._num_random

    def row_mask(self, dtype: tf.DType) -> Any | None:
        """Returns [batch] with 1 for true rows and 0 for padding; None where all are true.

        Ranks must make the same operations, whichever of them has padding: there it is never None.
        """
        if not self._padded_rows and self.ranks is None:
            return None
        mask = tf.concat([tf.ones([self.num_rows]), tf.zeros([self._padded_rows])], 0)
        return self._import(tf.cast(mask, dtype), [self.batch])


def is_split(dimension: Any) -> bool:
    """Whether a dimension is split on the model axis."""
    return dimension.name.endswith(f"@{MODEL}")


def has_batch(x: Any) -> bool:
    """Whether a tensor on the mesh has a row for each record."""
    return bool(x.shape.dims) and x.shape.dims[0].name == BATCH


def last_is_split(x: Any) -> bool:
    return is_split(x.shape.dims[-1])


def sizes_of_row(x: Any) -> list[int]:
    return [dimension.size for dimension in x.shape.dims[1:]]


def sizes_after(layer: Any, x: Any) -> list[int]:
    """Returns the sizes of a row of what a layer makes of ``x``."""
    return keras.layers.sizes_after(layer, sizes_of_row(x))
