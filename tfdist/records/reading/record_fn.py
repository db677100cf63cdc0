"""A user's ``record_fn``: one record at a time, before batching, with random numbers of its own.

The numbers are a function of the seed of the dataset, the epoch and the number of the record alone:
whoever reads a record, in whatever batch and however often an epoch was broken off, sees the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.errors import DataError
from tfdist.records.reading.map_fn import check_items, spec_of_batch, spec_of_one

RecordFn = Callable[..., Any]

_NAMES = ("x", "y", "sample_weight")
_ONE_SHAPE = "record_fn must return tensors of one known shape each, since they become batches"
# Seeds are made for so many records at once: one by one they take longer than a small record does.
_BLOCK = 256
# What tf.data says of records whose shapes turn out to differ.
_DIFFER = ("Cannot batch tensors with different shapes", "Cannot add tensor to the batch")


class PerRecord:
    """A ``record_fn`` over the records of one spec.

    Args:
        of_any_length: whether the first dimension of what it returns may be unknown.

    Attributes:
        spec: of a batch of what it returns: (x,), (x, y) or (x, y, sample_weight).

    Raises:
        DataError: it returns another number of items than it is given, or something that cannot
            be batched.
    """

    def __init__(self, record_fn: RecordFn, spec: Any, *, of_any_length: bool = False):
        self._of_any_length = of_any_length
        # AutoGraph is for the user's code, as in Dataset.map.
        self._function = tf.function(record_fn)
        self._takes_seed = _takes_seed(record_fn)
        self.spec = self._spec_after(spec_of_one(spec))

    def __call__(self, record: tuple[Any, ...], seed: tf.Tensor) -> tuple[Any, ...]:
        options = {"seed": seed} if self._takes_seed else {}
        return tuple(self._function(*record, **options))

    def map(
        self,
        records: tf.data.Dataset,
        numbers: tf.data.Dataset,
        order: tf.Tensor,
        decode: Callable[..., tuple[Any, ...]],
    ) -> tf.data.Dataset:
        """Returns what it makes of each record, in the order of the records.

        Args:
            records: what ``decode`` takes, one element a record.
            numbers: int64 [], the numbers of the same records.
            order: int64 [2], the key of the epoch; see ``source.order_seed``.
            decode: graph-safe, returns a record as the tuple that the function takes; runs beside
                it, in parallel.
        """
        if not self._takes_seed:  # Nor does anybody count then.
            seeds = tf.data.Dataset.from_tensors(tf.zeros([2], tf.int32)).repeat()
        else:
            seeds = numbers.batch(_BLOCK).map(lambda block: seeds_of(block, order)).unbatch()

        def finished(record: Any, seed: tf.Tensor) -> tuple[Any, ...]:
            return self(decode(record), seed)

        return tf.data.Dataset.zip((records, seeds)).map(
            finished, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
        )

    def explain(self, error: tf.errors.OpError) -> DataError | None:
        """Returns what an error met while batching its results means; None for any other."""
        message = " ".join(str(error.message).split())
        said = next((sign for sign in _DIFFER if sign in message), None)
        if said is None:
            return None
        found = message[message.index(said) :].split(" [[{{")[0].split(" [Op:")[0]
        return DataError(_ONE_SHAPE, received=found, mend="Resize, crop or pad in record_fn")

    def _spec_after(self, given: Any) -> Any:
        options = {"seed": tf.TensorSpec([2], tf.int32)} if self._takes_seed else {}
        outputs = self._function.get_concrete_function(*given, **options).structured_outputs
        check_items("record_fn", outputs, len(given))
        outputs = tuple(outputs)
        for name, item in zip(_NAMES, outputs, strict=False):
            for path, leaf in _leaves(name, item):
                _check_dense(path, leaf, of_any_length=self._of_any_length)
        _check_not_batched(given, outputs)
        if len(outputs) == 3:
            _check_weights(outputs[2])
        return spec_of_batch(outputs)


def is_of_one_shape(spec: Any) -> bool:
    """Whether all records that the specs of a batch tell of have the same shapes."""
    return all(leaf.shape[1:].is_fully_defined() for leaf in tf.nest.flatten(spec))


def seeds_of(numbers: tf.Tensor, order: tf.Tensor) -> tf.Tensor:
    """Returns the seeds of records in one epoch, int32 [n, 2].

    SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2714064.2660195) of the numbers, int64 [n],
    from where the key ``order`` says: neighbours share nothing, and a few operations do for all.
    """
    begin = tf.random.stateless_uniform([], order, minval=None, maxval=None, dtype=tf.int64)
    bits = tf.bitcast(numbers, tf.uint64) * _wide(0x9E3779B97F4A7C15)
    bits += tf.bitcast(begin, tf.uint64)
    bits = _shifted_onto(bits, 30) * _wide(0xBF58476D1CE4E5B9)
    bits = _shifted_onto(bits, 27) * _wide(0x94D049BB133111EB)
    return tf.bitcast(_shifted_onto(bits, 31), tf.int32)


def _wide(number: int) -> tf.Tensor:
    return tf.constant(number, tf.uint64)


def _shifted_onto(bits: tf.Tensor, places: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(bits, tf.bitwise.right_shift(bits, _wide(places)))


def _takes_seed(record_fn: RecordFn) -> bool:
    try:
        parameters = inspect.signature(record_fn).parameters
    except (TypeError, ValueError):  # Not every callable tells.
        return False
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return "seed" in parameters and parameters["seed"].kind in named


def _leaves(name: str, item: Any) -> list[tuple[str, Any]]:
    """Returns the tensors of an item, each with what a user would call it."""
    if isinstance(item, dict):
        return [leaf for key in item for leaf in _leaves(f"{name}[{key!r}]", item[key])]
    if isinstance(item, (tuple, list)):
        return [leaf for i, part in enumerate(item) for leaf in _leaves(f"{name}[{i}]", part)]
    return [(name, item)]


def _check_dense(path: str, leaf: Any, *, of_any_length: bool) -> None:
    if not isinstance(leaf, (tf.Tensor, tf.TensorSpec)):
        raise DataError(
            "record_fn must return dense tensors",
            received=f"{type(leaf).__name__} as {path}",
            mend="Give ragged.to_tensor(shape=...), or tf.sparse.to_dense(sparse)",
        )
    is_free = of_any_length and bool(leaf.shape.rank)
    if not (leaf.shape[1:] if is_free else leaf.shape).is_fully_defined():
        shape = "an unknown shape" if leaf.shape.rank is None else f"shape {tuple(leaf.shape)}"
        raise DataError(
            _ONE_SHAPE,
            received=f"{shape} of {path}",
            mend="Resize, crop or pad: tf.image.resize(x, [224, 224]); or say the shape with "
            "set_shape where TensorFlow cannot know it",
        )


def _check_not_batched(given: Any, outputs: Any) -> None:
    before, after = tf.nest.flatten(given), tf.nest.flatten(outputs)
    if len(before) != len(after):
        return
    grown = [
        new.shape[:1] == [1] and new.shape[1:].is_compatible_with(old.shape)
        for old, new in zip(before, after, strict=True)
    ]
    # One number may well become a vector of one; an image has no use for a fourth dimension.
    for position, (old, new) in enumerate(zip(before, after, strict=True)):
        if all(grown) or (grown[position] and old.shape.rank >= 3):
            raise DataError(
                "record_fn must take one record and return one, not a batch",
                received=f"shape {tuple(new.shape)} for one of {tuple(old.shape)}",
                mend="Take the first dimension away: x[0]",
            )


def _check_weights(weights: Any) -> None:
    for path, leaf in _leaves("sample_weight", weights):
        if leaf.shape.rank != 0:
            raise DataError(
                "record_fn must return one number as the weight of a record",
                received=f"shape {tuple(leaf.shape)} of {path}",
                mend="Return a scalar, as by tf.reduce_mean(weight)",
            )
