"""Reading records as batches: any part of them, in the order of any epoch, from any batch on.

``open_records`` gives everything that a strategy needs; ``read`` is the short way for a user.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.errors import CorruptShardError, DataError, EngineMissingError, OptionError, TfdistError
from tfdist.records.format.checking import check, damaged
from tfdist.records.format.manifest import find_split
from tfdist.records.format.pad_to import Padding
from tfdist.records.reading import graph_checks
from tfdist.records.reading.batch_padding import BatchPadding, check_can_pad, of_records, of_schema
from tfdist.records.reading.images import IMAGE_NODE
from tfdist.records.reading.map_fn import MapFn, checked, spec_after
from tfdist.records.reading.opening import open_source
from tfdist.records.reading.record_fn import PerRecord, RecordFn, is_of_one_shape
from tfdist.records.reading.source import OrderedRecords, Wanted, as_it_is, order_seed

# A part of this size when decoded is kept in memory: an epoch is then one gather a batch.
TABLE_BYTES = 512 << 20
# Records that may be held at once where lengths alone are asked for.
_COUNTED_RECORDS = 1024

# What TensorFlow says of a record that is no Example, or does not fit the schema.
_PARSE_SIGNS = (IMAGE_NODE, "Key: ", "parse example", "parse serialized", "DecodeRaw")
# And of a file that is not as it was written, or became shorter while it was read.
_TOLD = f"{CorruptShardError.__name__}: "
_FILE_SIGNS = (_TOLD, "expected to contain", "Excess bytes")


def read(
    path: str | Path,
    *,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    map_fn: MapFn | None = None,
    record_fn: RecordFn | None = None,
    cache: bool | str = "auto",
    epochs: int = 1,
) -> tf.data.Dataset:
    """Returns a dataset of the batches of a whole split, for Keras' own fit.

    Args:
        path: "DIR/SPLIT", or DIR when it has one split.
        batch_size: records in a batch; the last one of an epoch may have fewer.
        shuffle: whether to shuffle each epoch anew. The first pass over the dataset starts with
            epoch 0, the next one where that ended: the orders are a function of the seed.
        map_fn, record_fn, cache: see ``open_records``.
        epochs: number of epochs that one pass over the dataset gives.

    Raises:
        DataError: the folder cannot be read; CorruptShardError: it is damaged.
    """
    records = open_records(path, map_fn=map_fn, record_fn=record_fn, cache=cache)
    if batch_size < 1:
        raise OptionError(
            "batch_size must be at least 1", received=batch_size, mend="Choose 1 or more"
        )
    if epochs < 1:
        raise OptionError("epochs must be at least 1", received=epochs, mend="Choose 1 or more")

    def epoch_batches(epoch: Any) -> tf.data.Dataset:
        return records.batches(
            0, records.num_records, batch_size, shuffle=shuffle, seed=seed, epoch=epoch
        )

    steps = -(-records.num_records // batch_size) * epochs
    if not shuffle:
        batches = epoch_batches(0)
        return batches if epochs == 1 else batches.repeat(epochs)
    passes = tf.Variable(0, dtype=tf.int64, trainable=False)
    epoch_batches(0)  # loads a table eagerly
    dataset = (
        tf.data.Dataset.range(epochs)
        .map(lambda _: passes.assign_add(1) - 1)
        .flat_map(epoch_batches)
    )
    return _untuned(dataset.apply(tf.data.experimental.assert_cardinality(steps)))


def open_records(
    source: Any,
    *,
    map_fn: MapFn | None = None,
    record_fn: RecordFn | None = None,
    cache: bool | str = "auto",
    batched: bool | None = None,
    padding: Padding | None = None,
) -> Records:
    """Opens a source; nothing is read yet.

    Args:
        source: "DIR/SPLIT", or DIR when it has one split, of shards that ``tfdist shard`` wrote;
            arrays ``(x, y)`` or ``(x, y, sample_weight)``, ``x`` an array or a dict of arrays; or
            a finite tf.data.Dataset of the same, whose batches are taken apart; a function that
            yields records or batches, or a keras.utils.Sequence. What has no known length is
            counted once; augmentation belongs into ``record_fn``, as a cached dataset is read once.
            Tables of pandas count as arrays: see ``dataframes.plain``.
            Shards that lie apart from their manifest are a ``records.reading.stored.Stored``.
        map_fn: takes a whole batch, ``map_fn(x, y)`` or ``map_fn(x, y, sample_weight)``, and
            returns as many items with the same number of rows. Runs in every epoch, also on
            cached records.
        record_fn: takes one record, ``record_fn(x, y)`` or ``record_fn(x, y, sample_weight)``, and
            returns as many items, of the same shapes for every record: it may bring images of
            several sizes to one. Runs in parallel, in every epoch, before records become batches.
            One with a parameter ``seed`` is given int32 [2] for ``tf.image.stateless_random_*``:
            a function of the seed of the order, the epoch and the number of the record alone.
        cache: "auto" keeps the part that is read in memory when it is small (at most 512 MB when
            decoded); True always, False never. Arrays are in memory anyway.
        batched: whether an element of a dataset or a generator is a batch; None finds out.
        padding: of features of variable length, whose lengths are then read at once, in one pass;
            None gives every batch the same length.

    Raises:
        DataError: the source cannot be read; CorruptShardError: a shard is missing or has the
            wrong size.
    """
    if cache not in (True, False, "auto"):
        raise OptionError(
            "cache must be True, False or 'auto'",
            received=repr(cache),
            mend="Leave it out, which is 'auto'",
        )
    # An augmentation of tfdist's own does not bring images to one size.
    any_size = record_fn is not None and not getattr(record_fn, "keeps_sizes", False)
    opened = open_source(source, batched, any_size=any_size)
    if padding is not None:
        is_apart = opened.is_sequential or opened.readers is not None
        check_can_pad(opened.schema, is_apart=is_apart)
    return Records(opened, map_fn, cache, record_fn, padding)


class Records:
    """The records of one source, numbered from 0, not yet read.

    Attributes:
        num_records: how many there are.
        has_weights: whether each has a sample weight, the third item of a batch.
        element_spec: of a batch, after ``record_fn`` and ``map_fn``: (x, y) or
            (x, y, sample_weight) of tf.TensorSpec with batch dimension None.
        has_map_fn: whether a function of the user's may change batches or records, anew in each
            epoch.
        padding: of features of variable length; None where every batch has the same length.
        place: folder and split of shards; None for arrays and datasets.
        readers, is_sequential, is_repeated, fingerprint, note: see ``source.OrderedRecords``.
    """

    def __init__(
        self,
        source: OrderedRecords,
        map_fn: MapFn | None,
        cache: bool | str,
        record_fn: RecordFn | None = None,
        padding: Padding | None = None,
    ):
        self._source = source
        self._map_fn = None if map_fn is None else tf.function(map_fn)
        self._cache = cache
        self._tables: dict[tuple[int, int], Any] = {}
        self.place = source.place
        self.readers = source.readers
        self.is_sequential = source.is_sequential
        self.is_repeated = source.is_repeated
        self.fingerprint = source.fingerprint
        self.note = source.note
        self.num_records = source.num_records
        self.has_map_fn = map_fn is not None or record_fn is not None
        self.has_weights = len(source.spec) == 3
        self.element_spec = source.spec
        self._per_record = None
        self.padding = padding
        if padding is not None:
            if padding.buckets is not None:
                source.check_can_choose()
            lengths = self.read_now(source.lengths)
            self._lengths = of_schema(padding, source.schema, lengths)
            self.element_spec = self._lengths.spec(self.element_spec)
        if record_fn is not None:
            if cache is True and not is_of_one_shape(source.spec):
                raise OptionError(
                    "cache must be 'auto' or False for records of several shapes",
                    received="cache=True",
                    mend="Leave cache out: record_fn brings them to one shape in each epoch",
                )
            given = self.element_spec
            self._per_record = PerRecord(record_fn, given, of_any_length=padding is not None)
            self.element_spec = self._per_record.spec
            if padding is not None:
                self._own_lengths = self._lengths
                self._lengths = self.read_now(functools.partial(self._lengths_after, given))
                self.note = "record_fn runs over all records once, to know their lengths"
        if map_fn is not None:
            self.element_spec = spec_after(self._map_fn, self.element_spec)

    # Our code is graph-safe as it stands; AutoGraph would rewrite it when a tf.data function
    # calls it. The user's map_fn is converted, as in Dataset.map: it is a tf.function.
    @tf.autograph.experimental.do_not_convert
    def batches(
        self,
        start: int,
        stop: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        epoch: Any,
        part: int = 0,
        skip_batches: Any = 0,
        longest: tf.data.Dataset | None = None,
    ) -> tf.data.Dataset:
        """Returns one epoch of records [start, stop) in batches; the last one may be smaller.

        The order is a function of (seed, epoch, part, start, stop) and of nothing else. Can be
        called inside the function of a tf.data transformation; records that are kept in memory are
        then loaded when it is traced.

        Args:
            start, stop: global record numbers, 0 <= start < stop <= num_records.
            epoch: int or scalar int64 tensor, the number of the epoch.
            part: of parts that are read side by side, each in an order of its own.
            skip_batches: int or scalar int64 tensor, batches of the epoch to leave out at its
                start; without reading them when the records are in memory.
            longest: what each batch is padded to, see ``longest``; its own records when None.

        Raises:
            CorruptShardError: a shard is damaged. When records are streamed, TensorFlow raises
                its own error while iterating: give that to ``explain_read_error``.
        """
        order = {"seed": seed, "epoch": epoch, "part": part, "skip_batches": skip_batches}
        wanted = self._wanted(start, stop, batch_size, shuffle=shuffle, **order)
        in_table = self._fits(start, stop)
        if self._per_record is not None:
            # Those of variable length are padded to the longest of all.
            changed = self._changed(wanted, order_seed(seed, epoch), in_table=in_table)
            batches = self._evened(*changed).batch(batch_size)
        elif in_table:
            batches = _table_batches(self._table(start, stop), wanted)
        else:
            batches = self._source.stream(wanted)
        if self.padding is not None:
            if longest is None:
                longest = self._numbers(wanted).map(self._lengths.longest)
            batches = tf.data.Dataset.zip((batches, longest)).map(self._lengths.padded)
        return self._mapped(batches)

    def _mapped(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        if self._map_fn is not None:
            batches = batches.map(
                checked(self._map_fn), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
            )
        return _untuned(batches.prefetch(tf.data.AUTOTUNE))

    def _evened(self, records: tf.data.Dataset, numbers: tf.data.Dataset) -> tf.data.Dataset:
        if self.padding is None:
            return records
        return tf.data.Dataset.zip((records, numbers)).map(self._lengths.evened)

    @tf.autograph.experimental.do_not_convert
    def _changed(
        self, wanted: Wanted, key: tf.Tensor, *, in_table: bool
    ) -> tuple[tf.data.Dataset, tf.data.Dataset]:
        """Returns what ``record_fn`` makes of each record, and the numbers of the records."""
        start, stop = wanted.start, wanted.stop
        if in_table:
            table = self._table(start, stop)
            rows = _table_order(stop - start, wanted.order)[wanted.skip :]
            numbers = records = tf.data.Dataset.from_tensor_slices(rows + start)

            def decode(number: tf.Tensor) -> tuple[Any, ...]:
                return tf.nest.map_structure(lambda column: column[number - start], table)
        else:
            records, decode = self._source.singles(wanted)
            numbers = self._source.numbers(start, stop, wanted.order).skip(wanted.skip)
        return self._changed_each(records, numbers, key, decode), numbers

    def _changed_each(
        self,
        records: tf.data.Dataset,
        numbers: tf.data.Dataset,
        key: tf.Tensor,
        decode: Callable[[Any], Any],
    ) -> tf.data.Dataset:
        """See ``PerRecord.map``; records of variable length come to it at their own."""
        if self.padding is None:
            return self._per_record.map(records, numbers, key, decode)

        def at_own_length(record_and_number: tuple[Any, tf.Tensor]) -> tuple[Any, ...]:
            record, number = record_and_number
            return self._own_lengths.cut(decode(record), number)

        numbered = tf.data.Dataset.zip((records, numbers))
        return self._per_record.map(numbered, numbers, key, at_own_length)

    def _lengths_after(self, given: Any) -> BatchPadding:
        """Returns the paddings of what ``record_fn`` makes of records of the specs ``given``."""
        key = order_seed(0, 0)
        all_records = Wanted(0, self.num_records, _COUNTED_RECORDS)
        records, _ = self._changed(all_records, key, in_table=False)
        return of_records(
            self.padding, self.element_spec, self._own_lengths, given, _untuned(records)
        )

    @tf.autograph.experimental.do_not_convert
    def numbers(self, start: int, stop: int, batch_size: int, **order: Any) -> tf.data.Dataset:
        """Returns the numbers of the records that ``batches`` gives, in the same batches.

        Nothing is read: what is kept of each record elsewhere can take the record's place.

        Args:
            order: shuffle, seed, epoch, part and skip_batches; see ``batches``.

        Returns:
            A dataset of int64 [rows], each in [start, stop).
        """
        return self._numbers(self._wanted(start, stop, batch_size, **order))

    def _wanted(
        self,
        start: int,
        stop: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        epoch: Any,
        part: int = 0,
        skip_batches: Any = 0,
    ) -> Wanted:
        assert 0 <= start < stop <= self.num_records, (start, stop, self.num_records)
        order = order_seed(seed, epoch, part) if shuffle else None
        return Wanted(start, stop, batch_size, order, tf.cast(skip_batches, tf.int64) * batch_size)

    def _numbers(self, wanted: Wanted) -> tf.data.Dataset:
        if self._fits(wanted.start, wanted.stop):
            return _table_batches(tf.range(wanted.start, wanted.stop, dtype=tf.int64), wanted)
        numbers = self._source.numbers(wanted.start, wanted.stop, wanted.order)
        return numbers.skip(wanted.skip).batch(wanted.batch_size)

    def longest(self, start: int, stop: int, batch_size: int, **order: Any) -> tf.data.Dataset:
        """Returns the most entries of the records of each batch that ``batches`` gives.

        Args:
            order: see ``numbers``.

        Returns:
            A dataset of int32 [features of variable length].
        """
        return self.numbers(start, stop, batch_size, **order).map(self._lengths.longest)

    @property
    def no_length(self) -> tf.Tensor:
        """What ``longest`` would give for a batch without a record."""
        return self._lengths.longest(tf.zeros([1], tf.int64)) * 0

    @property
    def padding_code(self) -> int:
        """A number that tells ``padding`` from others; 0 without any."""
        return 0 if self.padding is None else zlib.crc32(repr(self.padding).encode())

    @property
    def is_bucketed(self) -> bool:
        """Whether a shuffled epoch is one of batches of records of similar lengths."""
        return self.padding is not None and self.padding.buckets is not None

    def bucketed_order(
        self, num_records: int, batch_size: int, *, seed: int, epoch: Any
    ) -> tf.Tensor:
        """Returns records [0, num_records) as an epoch takes them, int64 [num_records].

        Args:
            batch_size: of the batches that hold records of similar lengths.
        """
        return self._lengths.bucketed_order(num_records, batch_size, order_seed(seed, epoch))

    @tf.autograph.experimental.do_not_convert
    def chosen(
        self, numbers: tf.data.Dataset, rows: int, *, seed: int, epoch: Any
    ) -> tf.data.Dataset:
        """Returns batches of any records.

        Args:
            numbers: for each batch those of its records, and of all records whose longest it is
                padded to: (int64 [rows], int64 [any]).
            rows: of each batch but the last one, which may have fewer.
            seed, epoch: see ``batches``.
        """
        longest = numbers.map(lambda own, of_all: self._lengths.longest(of_all))
        own_numbers = numbers.map(lambda own, of_all: own)
        batches = self._source.chosen(own_numbers)
        if self._per_record is not None:
            # Records of all batches in one stream: those of the next one are changed meanwhile.
            records, of_records = batches.unbatch(), own_numbers.unbatch()
            key = order_seed(seed, epoch)
            changed = self._changed_each(records, of_records, key, as_it_is)
            batches = self._evened(changed, of_records).batch(rows)
        batches = tf.data.Dataset.zip((batches, longest)).map(self._lengths.padded)
        return self._mapped(batches)

    @property
    def can_be_looked_at(self) -> bool:
        """Whether records may be read before a fit reads them: a user's dataset is made once, and
        what it draws would be drawn twice."""
        is_stored = self._source.schema is not None or self._source.in_memory
        return is_stored and not self.is_sequential

    def _fits(self, start: int, stop: int) -> bool:
        if self._source.in_memory or self._cache is True:
            return True
        record_bytes = self._source.record_bytes
        if self._cache is False or record_bytes is None:
            return False
        return (stop - start) * record_bytes <= TABLE_BYTES

    def _table(self, start: int, stop: int) -> Any:
        """Returns the tensors of a part, loaded once."""
        if (start, stop) not in self._tables:
            # Out of a tf.data function that is being traced, back to eager execution.
            with tf.init_scope():
                self._tables[start, stop] = self.load(start, stop)
        return self._tables[start, stop]

    def load(self, start: int, stop: int) -> Any:
        """Returns records [start, stop) as tensors [stop - start, ...]. Called eagerly."""
        return self.read_now(lambda: self._source.load(start, stop))

    def read_now(self, read: Callable[[], Any]) -> Any:
        """Returns what ``read`` does. Raises what TensorFlow's errors mean, see ``explain``."""
        try:
            return read()
        except tf.errors.OpError as error:
            explained = self.explain(error)
            if explained is None:
                raise
            raise explained from error

    def confirm(self) -> None:
        """Returns when what has been read so far is known to be as it was written.

        Raises:
            CorruptShardError: it is not.
        """
        self._source.confirm()

    def explain(self, error: tf.errors.OpError) -> TfdistError | None:
        """Returns what an error met while reading means: see ``explain_read_error``."""
        source = self._source
        message = " ".join(str(error.message).split())
        for failure in source.failures:
            if " ".join(str(failure).split()) in message:
                return failure
        differ = None if self._per_record is None else self._per_record.explain(error)
        return differ or _explain(error, source.apart or self.place)


def _untuned(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Leaves parallelism at the number of cores, instead of searching for it while reading.

    The search gains nothing on steps as large as a batch, and ending its thread at times takes
    longer than reading a small epoch. Counts for the outermost dataset only: a strategy that
    wraps batches in flat_map has to do the same to its own.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return batches.with_options(options)


def _table_batches(table: Any, wanted: Wanted) -> tf.data.Dataset:
    num_rows, batch_size = wanted.stop - wanted.start, wanted.batch_size
    rows = None if wanted.order is None else _table_order(num_rows, wanted.order)

    def batch(number: tf.Tensor) -> Any:
        low = number * batch_size
        high = tf.minimum(low + batch_size, num_rows)
        if rows is None:
            return tf.nest.map_structure(lambda column: column[low:high], table)
        own = rows[low:high]
        return tf.nest.map_structure(lambda column: tf.gather(column, own), table)

    first = wanted.skip // batch_size
    return tf.data.Dataset.range(first, -(-num_rows // batch_size)).map(batch)


def _table_order(num_rows: int, order: tf.Tensor | None) -> tf.Tensor:
    """Returns the rows of a table as an epoch takes them, int64 [num_rows]."""
    rows = tf.range(num_rows, dtype=tf.int64)
    return rows if order is None else tf.random.experimental.stateless_shuffle(rows, seed=order)


def explain_read_error(error: BaseException, source: Any) -> TfdistError | None:
    """Returns what a TensorFlow error met while reading means, or None when it is another matter.

    Args:
        error: usually a tf.errors.DataLossError or InvalidArgumentError out of fit.
        source: what was given to ``open_records``, or the Records that it returned.

    Returns:
        CorruptShardError naming file, record and offset when a shard is damaged; DataError when
        records or the result of a map_fn do not have the shape that they must have.
    """
    if not isinstance(error, tf.errors.OpError):
        return None
    source = getattr(source, "source", source)  # Of records that are kept in another form.
    if isinstance(source, Records):
        return source.explain(error)
    if not isinstance(source, (str, Path)):
        return _explain(error, None)
    try:
        folder, split, _ = find_split(Path(source))
    except DataError as gone:
        return gone
    return _explain(error, (folder, split))


def _explain(error: tf.errors.OpError, place: tuple[Any, ...] | None) -> TfdistError | None:
    message = " ".join(str(error.message).split())
    from_check = graph_checks.failed_check(message)
    from_file = place is not None and any(sign in message for sign in _FILE_SIGNS)
    from_reading = isinstance(error, (tf.errors.DataLossError, tf.errors.NotFoundError))
    from_parsing = isinstance(error, tf.errors.InvalidArgumentError) and any(
        sign in message for sign in _PARSE_SIGNS
    )
    if from_check is None and not from_file and not from_reading and not from_parsing:
        return None
    mend = None
    if place is not None:
        folder, split, manifest = (*place, None)[:3]
        try:
            try:
                faults = check(folder, split, manifest=manifest, decode=from_parsing)
            except EngineMissingError as missing:
                mend = f"{missing.mend}, and tfdist names an image that cannot be decoded"
                faults = check(folder, split, manifest=manifest)
        except TfdistError as gone:  # The manifest is damaged too.
            return gone
        # What was told may be of other records of the same fit.
        if faults or (from_file and _TOLD not in message):
            return damaged(folder, faults, "a file that changes while it is read")
    if from_check is None and from_parsing:
        received = message.split(" [[{{")[0]
        return DataError("every record must fit the schema", received=received, mend=mend)
    return from_check
