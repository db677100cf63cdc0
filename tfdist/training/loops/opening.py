"""What Keras takes for data, as a ``Feed``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.errors import DataError, OptionError
from tfdist.training.engine.binding import Binding
from tfdist.training.feed.feed import Feed
from tfdist.training.feed.keras_data import (
    GivenData,
    as_array,
    is_bare_in_keras,
    is_given_in_batches,
)
from tfdist.training.feed.keras_feed import GivenFeed
from tfdist.training.feed.read_ahead import ReadAhead
from tfdist.training.loops.batch_reader import BatchReader
from tfdist.training.steps.custom_steps import own_steps

# What Keras' loops take that a Feed has settled already.
_SETTLED_BY_FEED = ("steps", "steps_per_epoch")
_SETTLED_WITH_ARRAYS = ("y", "batch_size", "sample_weight", "shuffle", "validation_split")


class Opening:
    """Makes feeds of what ``fit``, ``evaluate`` and ``predict`` are given.

    Args:
        dataset: the strategy's own.
    """

    def __init__(
        self,
        binding: Binding,
        reader: BatchReader,
        strategy_name: str,
        dataset: Callable[..., Feed],
    ):
        self._model = binding.model
        self._collective = binding.collective
        self._reader = reader
        self._strategy_name = strategy_name
        self.dataset = dataset
        self._given = GivenData(binding.collective, reader.gather)

    def is_plain_keras(self, x: Any) -> bool:
        """Whether Keras' own loops take ``x`` as it is."""
        return not self._collective.shares_batches and not isinstance(x, Feed)

    def opened(self, x: Any, options: dict) -> Feed:
        """Returns what to train on; takes what it settles out of ``options``."""
        if isinstance(x, Feed):
            refuse_settled(options)
            return x
        if is_given_in_batches(x):
            return self.given_feed(x, options, "steps_per_epoch", fits=True)
        arrays = self.arrays(x, options)
        validation_split = options.pop("validation_split", None)
        if validation_split and options.get("validation_data") is None:
            arrays, options["validation_data"] = _split(arrays, validation_split)
        batch_size = self._batch_size(options)
        shuffle = bool(options.pop("shuffle", True))
        return self._feed_of(arrays, batch_size, training=shuffle)

    def given_feed(self, x: Any, options: dict, steps: str, **wanted: bool) -> GivenFeed:
        """Returns what ``GivenData.feed`` does, which may read all batches to count them."""
        with self._reader.given(x):
            return self._given.feed(x, options, steps, **wanted)

    def open_validation(self, options: dict, batch_size: int) -> None:
        """Makes feeds of what Keras takes for validation.

        Args:
            batch_size: of the fit, in which Keras evaluates arrays, too; 0 where it has its own.
        """
        data = options.get("validation_data")
        steps = options.pop("validation_steps", None)
        rows = options.pop("validation_batch_size", None)
        if is_given_in_batches(data):
            own = {"validation_steps": steps, "batch_size": rows}
            own |= ReadAhead.among(options)
            options["validation_data"] = self.given_feed(data, own, "validation_steps")
            return
        own = {"validation_steps": steps}
        if isinstance(data, Feed):
            own["validation_batch_size"] = rows
        refuse_settled(own, tuple(own))
        rows = rows or batch_size or None
        if isinstance(data, (tuple, list)) and len(data) in (1, 2, 3):  # Of x alone by a split.
            x, *rest = data
            own = dict(zip(("y", "sample_weight"), rest, strict=False)) | {"batch_size": rows}
            options["validation_data"] = self.as_feed(x, own)

    def as_feed(self, x: Any, options: dict) -> Feed:
        """Returns ``x`` as a Feed in record order; takes what it settles out of ``options``."""
        if isinstance(x, Feed):
            refuse_settled(options)
            return x.in_record_order()
        arrays = self.arrays(x, options)
        batch_size = self._batch_size(options)
        return self._feed_of(arrays, batch_size, training=False)

    def _feed_of(self, arrays: tuple[Any, ...], batch_size: int, *, training: bool) -> Feed:
        feed = self.dataset(arrays, global_batch_size=batch_size, training=training)
        if not own_steps(self._model) or not is_bare_in_keras(None, arrays):
            return feed
        return dataclasses.replace(feed, is_bare=True)

    def arrays(self, x: Any, options: dict) -> tuple[Any, ...]:
        """Returns (x[, y[, sample_weight]]); takes them out of ``options``."""
        x = as_array(x)
        if not _are_arrays(x):
            raise DataError(
                f"a model of strategy '{self._strategy_name}' must be given what strategy.dataset "
                "returns",
                received=f"data of type {type(x).__name__}",
                mend="Write strategy.dataset(data, global_batch_size=...), data being a folder of "
                "shards, arrays, or a tf.data.Dataset",
            )
        y, sample_weight = (as_array(options.pop(name, None)) for name in ("y", "sample_weight"))
        arrays = [x] if y is None else [x, y] if sample_weight is None else [x, y, sample_weight]
        # Keras' users write several inputs or outputs as a list.
        return tuple(
            tuple(item) if isinstance(item, list) and _are_arrays(item) else item for item in arrays
        )

    def _batch_size(self, options: dict) -> int:
        if options.get("steps_per_epoch") is not None:
            raise OptionError(
                "arrays must be divided into batches by batch_size",
                received="the option steps_per_epoch",
                mend="Leave it out, or give batches: tf.data.Dataset.from_tensor_slices((x, y))"
                ".batch(size).repeat()",
            )
        refuse_settled(options, _SETTLED_BY_FEED)
        return options.pop("batch_size", None) or max(32, self._collective.num_replicas)


def refuse_settled(
    options: dict,
    names: tuple[str, ...] = (*_SETTLED_WITH_ARRAYS, *_SETTLED_BY_FEED),
    *,
    by: str = "strategy.dataset has",
    given_to: str = "fit, evaluate or predict",
) -> None:
    """Raises OptionError where Keras' loops are given what is settled already."""
    settled = [name for name in names if options.get(name) is not None]
    if settled:
        raise OptionError(
            f"what {by} settled must not be given to {given_to} again",
            received=f"the option {settled[0]}"
            if len(settled) == 1
            else f"the options {', '.join(settled)}",
            mend="Leave it out, or give it to strategy.dataset instead",
        )


def _are_arrays(x: Any) -> bool:
    leaves = tf.nest.flatten(x)
    return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)


def _split(arrays: tuple[Any, ...], validation_split: float) -> tuple[Any, Any]:
    """Divides as Keras does: validation takes the last rows, before any shuffling."""
    rows = len(tf.nest.flatten(arrays)[0])
    kept = int(rows * (1 - validation_split))
    if not 0 < kept < rows:
        raise OptionError(
            "validation_split must leave records on both sides",
            received=f"{validation_split} of {rows} records",
            mend="Choose another share, or give validation_data",
        )
    return (
        tf.nest.map_structure(lambda array: array[:kept], arrays),
        tf.nest.map_structure(lambda array: array[kept:], arrays),
    )
