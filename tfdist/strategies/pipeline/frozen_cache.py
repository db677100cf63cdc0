"""Records whose frozen layers have run already: their outputs are kept and read instead.

The order, and so the training, is that of the records: only what is read of each differs.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import track

from tfdist.errors import ModelError, OptionError
from tfdist.records.format.manifest import load_manifest
from tfdist.records.reading.reader import Records
from tfdist.records.reading.source import spec_of_rows
from tfdist.strategies.pipeline import output_cache
from tfdist.strategies.pipeline.frozen import Frozen, bytes_of, same
from tfdist.training.feed.feed import Feed

_FILL_ROWS = 64


class FrozenCache:
    """The kept outputs of one model's frozen layers, for all data that it is trained on.

    Args:
        folder: where to keep them; in memory when None.
    """

    def __init__(self, frozen: Frozen, folder: Path | None):
        self.frozen = frozen
        self.folder = folder
        #: Fingerprint of the weights that the outputs of the latest fit were computed with.
        self.weights = ""
        self._known: Any = weakref.WeakKeyDictionary()

    def feed(self, feed: Feed, *, training: bool) -> Feed:
        """Returns the same batches with kept outputs in place of the features.

        Raises:
            OptionError: the features are not the same in each epoch.
        """
        if feed.records.has_map_fn:
            raise OptionError(
                "records for frozen_cache must be the same in each epoch, and map_fn or record_fn "
                "may change them",
                received="a dataset with map_fn or record_fn",
                mend="Leave frozen_cache out, or give strategy.dataset a tf.data.Dataset that has "
                "the map in it, where it is not random",
            )
        known = self._known.setdefault(feed.records, {})
        records = known.setdefault(
            (training, feed.num_records),
            KeptRecords(self, feed.records, feed.num_records, training=training),
        )
        return replace(feed, records=records)

    def guard(self) -> tf.keras.callbacks.Callback:
        """Returns a callback that stops a fit in which the frozen layers change."""
        return _Guard(self)


class KeptRecords:
    """In place of ``Records``: the same records with other features, filled when first read.

    Attributes:
        element_spec: of the records that these stand for.
    """

    place = None
    has_map_fn = False
    is_sequential = False
    fingerprint = None  # The cache itself tells other records.
    padding, padding_code, is_bucketed = None, 0, False  # A pipeline takes one length alone.

    def __init__(self, cache: FrozenCache, records: Records, num_records: int, *, training: bool):
        self._cache = cache
        # What is kept lives as long as the records; not the other way round.
        self._records = weakref.ref(records)
        self._training = training
        self.num_records = num_records
        self.has_weights = records.has_weights
        self.element_spec = records.element_spec
        self._filled: tuple[str, Any, list[np.ndarray]] | None = None

    @property
    def source(self) -> Records:
        records = self._records()
        assert records is not None, "a Feed keeps its records"
        return records

    @tf.autograph.experimental.do_not_convert
    def batches(self, start: int, stop: int, batch_size: int, **order: Any) -> tf.data.Dataset:
        """Returns what ``Records.batches`` does, with kept outputs as features."""
        with tf.init_scope():  # Out of a tf.data function that is being traced.
            structure, arrays = self._table()
        specs = spec_of_rows(arrays)

        def rows(numbers: np.ndarray) -> list[np.ndarray]:
            return [np.ascontiguousarray(array[numbers]) for array in arrays]

        def batch(numbers: tf.Tensor) -> Any:
            found = tf.numpy_function(rows, [numbers], [spec.dtype for spec in specs])
            for tensor, spec in zip(found, specs, strict=True):
                tensor.set_shape(spec.shape)
            return tf.nest.pack_sequence_as(structure, found)

        return self.source.numbers(start, stop, batch_size, **order).map(batch)

    # Filling ------------------------------------------------------------------------------------

    def _table(self) -> tuple[Any, list[np.ndarray]]:
        """Returns the structure of an element, and its arrays."""
        self._cache.weights = self._cache.frozen.weights_fingerprint()
        of_model = _hash(self._cache.frozen.fingerprint(), self._cache.weights)
        if self._filled is None or self._filled[0] != of_model:
            self._filled = None  # Room for the next.
            first = self._kept(next(self._source_batches(self._fill_rows)))
            self._check(first)
            flat = [np.asarray(leaf) for leaf in tf.nest.flatten(first)]
            columns = output_cache.Columns(
                self.num_records,
                tuple(output_cache.Column(leaf.shape[1:], leaf.dtype.name) for leaf in flat),
            )
            self._filled = (of_model, first, self._arrays(columns, of_model))
        return self._filled[1:]

    @property
    def _fill_rows(self) -> int:
        return min(_FILL_ROWS, self.num_records)

    def _arrays(self, columns: output_cache.Columns, of_model: str) -> list[np.ndarray]:
        if self._cache.folder is None:
            output_cache.check_fits(columns, None)
            arrays = output_cache.in_memory(columns)
            self._fill(arrays, columns, "in memory")
            return arrays
        self._cache.folder.mkdir(exist_ok=True)
        name = _hash(of_model, self._fingerprint(), str(self._training), str(self.num_records))
        folder = self._cache.folder / f"frozen-{name}"
        arrays = output_cache.opened(folder, columns)
        if arrays is not None and not self._are_right(arrays):
            shutil.rmtree(folder)
            arrays = None
        if arrays is None:
            output_cache.check_fits(columns, self._cache.folder)
            with output_cache.written(folder, columns) as written:
                self._fill(written, columns, f"in {folder}")
            arrays = output_cache.opened(folder, columns)
            assert arrays is not None, folder
        else:
            print(f"tfdist: the outputs of frozen layers are read from {folder}", flush=True)
        return arrays

    def _fill(self, arrays: list[np.ndarray], columns: output_cache.Columns, where: str) -> None:
        print(
            f"tfdist: keeping the outputs of the layers up to '{self._cache.frozen.last}' "
            f"{where}: {columns.num_records:,} records of {columns.record_bytes / 1e3:,.1f} "
            f"kB, {columns.total_bytes / 1e6:,.1f} MB",
            flush=True,
        )
        console = Console(stderr=True)
        batches = track(
            self._source_batches(self._fill_rows),
            description="frozen layers",
            total=-(-self.num_records // self._fill_rows),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        filled = 0
        for batch in batches:
            leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(self._kept(batch))]
            for array, leaf in zip(arrays, leaves, strict=True):
                array[filled : filled + len(leaf)] = leaf
            filled += len(leaves[0])
        assert filled == self.num_records, (filled, self.num_records)

    def _source_batches(self, rows: int, start: int = 0) -> Iterator[Any]:
        return iter(
            self.source.batches(start, self.num_records, rows, shuffle=False, seed=0, epoch=0)
        )

    def _kept(self, batch: Any) -> tuple[Any, ...]:
        x, *labels = batch
        kept = self._cache.frozen.outputs(x, training=self._training)
        return (kept, *tf.nest.map_structure(lambda leaf: leaf.numpy(), tuple(labels)))

    # Whether it is right ------------------------------------------------------------------------

    def _check(self, first: Any) -> None:
        x = next(self._source_batches(self._fill_rows))[0]
        self._cache.frozen.check_depends_on_record_alone(x, training=self._training)
        for leaf in tf.nest.flatten(first):
            if np.asarray(leaf).dtype.kind not in "biuf":
                raise OptionError(
                    "outputs and labels that frozen_cache keeps must be ordinary numbers",
                    received=f"dtype {np.asarray(leaf).dtype}",
                    mend="Cast them, or leave frozen_cache out",
                )

    def _are_right(self, arrays: list[np.ndarray]) -> bool:
        """Computes the first and the last records once more: code has no fingerprint."""
        rows = self._fill_rows
        for start in {0, self.num_records - rows}:
            batch = self._kept(next(self._source_batches(rows, start)))
            for array, leaf in zip(arrays, tf.nest.flatten(batch), strict=True):
                if not same(np.asarray(array[start : start + rows]), np.asarray(leaf)):
                    return False
        return True

    def _fingerprint(self) -> str:
        """Returns a hash of the records: of the checksums of shards, or of all that they hold."""
        if self.source.place is not None:
            folder, split = self.source.place
            described = load_manifest(folder).to_json()
            return _hash(json.dumps([described["schema"], described["splits"][split]]))
        digest = hashlib.blake2b(digest_size=16)
        for batch in self._source_batches(_FILL_ROWS):
            for leaf in tf.nest.flatten(batch):
                digest.update(bytes_of(leaf.numpy()))
        return digest.hexdigest()


class _Guard(tf.keras.callbacks.Callback):
    """Kept outputs are those of the weights that they were computed with."""

    def __init__(self, cache: FrozenCache):
        super().__init__()
        self._cache = cache

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._compare()

    def on_train_end(self, logs: Any = None) -> None:
        self._compare()

    def _compare(self) -> None:
        frozen = self._cache.frozen
        if frozen.weights_fingerprint() != self._cache.weights:
            raise ModelError(
                "frozen layers must stay as they are while their outputs are kept",
                received=f"weights up to '{frozen.last}' that changed during fit",
                mend="Load weights before fit, or leave frozen_cache out",
            )


def _hash(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
