"""What Keras' fit, evaluate and predict take beside arrays, as batches that replicas divide.

A ``tf.data.Dataset`` of batches, a ``keras.utils.Sequence``, a Python generator. Each batch is a
global batch; epochs begin, and go on, where those of Keras do.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfdist import keras
from tfdist.errors import DataError, OptionError
from tfdist.records.reading.batched import check_dense, is_endless, without_shuffle
from tfdist.records.reading.rereadable import element_of
from tfdist.records.reading.source import spec_of_rows
from tfdist.records.sources.elements import check_parts
from tfdist.records.sources.recognise import num_batches, recognise
from tfdist.training.engine.collective import Collective
from tfdist.training.engine.elastic_collective import ElasticCollective
from tfdist.training.engine.options import check_count
from tfdist.training.feed.keras_feed import (
    ENDLESS,
    GivenBatches,
    GivenFeed,
    GivenRecords,
    GivenStream,
    counted,
    passes,
)
from tfdist.training.feed.read_ahead import ReadAhead

# What batches have in them, and what Keras refuses beside them, too.
_OF_ARRAYS = ("y", "batch_size", "sample_weight", "validation_split")


def is_given_in_batches(x: Any) -> bool:
    """Whether ``x`` gives batches as Keras takes them."""
    return recognise(x).kind in ("dataset", "sequence", "iterator")


def is_bare_in_keras(x: Any, batch: tuple[Any, ...]) -> bool:
    """Whether Keras gives a step x itself, and not (x,), of what its fit is given.

    Args:
        x: what fit, evaluate or predict is given.
        batch: (x[, y[, sample_weight]]) of it.
    """
    if isinstance(x, tf.data.Dataset):
        return not isinstance(x.element_spec, tuple)
    return len(batch) == 1 and not tf.nest.is_nested(batch[0])


def as_array(x: Any) -> Any:
    """Returns lists of numbers or texts as the array that Keras makes of them; others stay."""
    kinds = (bool, int, float, str, bytes, np.number)
    is_list = isinstance(x, (list, tuple)) and bool(x)
    if not is_list or not all(isinstance(leaf, kinds) for leaf in tf.nest.flatten(x)):
        return x
    try:
        return _as_keras_casts(np.asarray(x))
    except ValueError:  # Rows of several lengths.
        return x


@dataclass(frozen=True)
class Given:
    """Data that gives batches.

    Attributes:
        dataset: one pass over it.
        steps: of an epoch; None where it is read to its end.
        begins_anew: whether each epoch is a pass of its own.
        is_sized: whether Keras knows its steps, and is not told them.
        is_drawn_once: whether what is drawn for each pass has been drawn once, to count batches.
    """

    dataset: tf.data.Dataset
    steps: int | None
    begins_anew: bool = True
    is_sized: bool = False
    is_drawn_once: bool = False

    def for_fit(self, initial_epoch: int, epochs: int) -> GivenBatches:
        """Returns the batches of a fit.

        Raises:
            DataError: they end before the last epoch.
        """
        if not self.begins_anew:
            self.check_lasts(self.steps * (epochs - initial_epoch), "add .repeat() to it")
            return GivenStream(self.dataset, initial_epoch * self.steps)
        drawn = int(self.is_drawn_once)
        of_all = passes(
            self.dataset,
            self.steps,
            lambda number: keras.steps.reads_pass(number + drawn, is_sized=self.is_sized),
        )
        return GivenStream(of_all, initial_epoch * self.steps)

    def for_evaluation(self) -> GivenBatches:
        """Returns the batches of an evaluation, or of each validation of a fit."""
        begins_before = self.begins_anew and not self.is_drawn_once
        begins_before = begins_before and not keras.steps.reads_pass(0, is_sized=self.is_sized)
        return GivenBatches(self.dataset, begins_before=begins_before)

    def check_lasts(self, steps: int, mend: str) -> None:
        """Raises DataError when the data is known to have fewer batches than that."""
        known = int(self.dataset.cardinality())
        if 0 <= known < steps:
            raise DataError(
                "a dataset must last for all steps that are to be taken",
                received=f"{known} batches for {steps} steps",
                mend=f"Say fewer steps, or {mend}",
            )


class GivenData:
    """Makes feeds for the replicas of one model.

    Args:
        collective: the replicas.
        gather: theirs, whose errors are explained.
    """

    _has_told: ClassVar[bool] = False

    def __init__(self, collective: Collective, gather: Callable[[Any], list[Any]]):
        self._collective = collective
        self._gather = gather

    def feed(
        self,
        x: Any,
        options: dict[str, Any],
        steps: str,
        *,
        fits: bool = False,
        predicts: bool = False,
        reads_on: bool = False,
    ) -> GivenFeed:
        """Returns a feed of what ``x`` gives; takes what it settles out of ``options``.

        Args:
            x: see ``is_given_in_batches``.
            options: those of Keras' loop.
            steps: what Keras calls the number of steps there.
            fits: whether it is trained on.
            predicts: whether it is for predict.
            reads_on: whether one pass may be as long as it is, if no process waits for another.

        Raises:
            DataError: there is no such number, and it cannot be found; or elements are no batches;
                or processes were given other data.
            OptionError: an option that is one of arrays.
        """
        _refuse_beside(options, x)
        if isinstance(self._collective, ElasticCollective):
            raise DataError(
                "an elastic job must be given records that any number of processes can divide",
                received=f"batches of a {type(x).__name__}",
                mend="Write strategy.dataset(data, global_batch_size=...)",
            )
        self._tell_of_cost()
        shuffle = bool(options.pop("shuffle", True)) and fits
        order = self._order if shuffle else None
        tell = print if self._collective.is_chief else lambda _: None
        ahead = ReadAhead(**ReadAhead.among(options))
        counts = not reads_on or self._collective.num_processes > 1
        evaluates = not fits and not predicts
        resets = itertools.chain([not predicts], itertools.repeat(evaluates))
        count = options.pop(steps, None)
        given = _opened(x, count, steps, order, ahead, tell, resets, counts=counts)
        spec = given.dataset.element_spec
        _check_batches(spec)
        self._agree_on(given)
        if fits:
            batches = given.for_fit(options.get("initial_epoch", 0), options.get("epochs", 1))
        else:
            given.check_lasts(given.steps, f"leave {steps} out")
            batches = given.for_evaluation()
        collective = self._collective
        return GivenFeed(
            records=GivenRecords(spec),
            batches=batches,
            steps=given.steps,
            global_batch_size=tf.nest.flatten(spec)[0].shape[0] or 0,
            parts=collective.num_processes,
            part=collective.process,
            splits=collective.num_replicas // collective.num_processes,
            shared=collective.shares_batches,
            speeds=collective.speeds if fits else None,
            is_bare=is_bare_in_keras(x, spec),
        )

    def _order(self) -> Any:
        """Returns what draws the order of a Sequence's batches: Keras takes Python's own."""
        if self._collective.num_processes == 1:
            return random
        agreed = random.Random()
        agreed.setstate(self._gather(random.getstate())[0])
        random.random()  # The next fit draws another.
        return agreed

    def _tell_of_cost(self) -> None:
        collective = self._collective
        if collective.num_processes > 1 and collective.is_chief and not self._has_told:
            print(
                "tfdist: every rank reads all batches that fit, evaluate or predict is given, and "
                "keeps its rows of each; strategy.dataset of shards divides that work",
                flush=True,
            )
        GivenData._has_told = True

    def _agree_on(self, given: Given) -> None:
        """Processes that take other numbers of steps would wait for each other for ever."""
        found = self._gather((given.steps, repr(given.dataset.element_spec)))
        for rank, (steps, spec) in enumerate(found):
            if (steps, spec) != found[0]:
                raise DataError(
                    "all ranks must be given the same batches, whose rows they divide",
                    received=f"{found[0][0]} batches of {found[0][1]} on rank 0, {steps} of {spec} "
                    f"on rank {rank}",
                    mend="Give each rank the whole data, or use strategy.dataset",
                )


def _refuse_beside(options: dict[str, Any], x: Any) -> None:
    given = [name for name in _OF_ARRAYS if _is_said(options.pop(name, None))]
    if given:
        raise OptionError(
            "what batches hold must not be given beside them",
            received=f"{', '.join(given)} beside a {type(x).__name__}",
            mend="Leave it out: a batch is (x, y) or (x, y, sample_weight), and validation_data "
            "takes what fit does",
        )


def _is_said(value: Any) -> bool:
    """Whether something is given: Keras takes a number of 0 for nothing. It may be an array."""
    return value is not None and not (isinstance(value, int | float) and value == 0)


def _check_batches(spec: Any) -> None:
    """Raises DataError for elements that cannot be divided into rows."""
    check_dense(spec)
    check_parts("a batch", spec)
    if any(leaf.shape.rank is None for leaf in tf.nest.flatten(spec)):
        raise DataError(
            "batches must have tensors of known numbers of dimensions",
            received=str(spec),
            mend="Give them with tensor.set_shape in a map, or as the output_signature of "
            "from_generator",
        )
    if any(not leaf.shape.rank for leaf in tf.nest.flatten(spec)):
        raise DataError(
            "batches must have a first dimension of rows",
            received=str(spec),
            mend="Add .batch(size) to the dataset",
        )


def peeked(x: Any) -> tuple[Any, Any]:
    """Returns what gives the same batches as ``x``, and the tf.TensorSpec of one.

    Args:
        x: see ``is_given_in_batches``.
    """
    if isinstance(x, tf.data.Dataset):
        spec = x.element_spec
        return x, spec if isinstance(spec, tuple) else (spec,)
    if recognise(x).kind == "sequence":
        first = x[0]
    else:
        first = _first_of(x)
        x = itertools.chain([first], x)
    return x, spec_of_rows(batch_of(first))


# Kinds of data -----------------------------------------------------------------------------------


def _opened(
    x: Any,
    steps: int | None,
    option: str,
    order: Callable[[], Any] | None,
    ahead: ReadAhead,
    tell: Callable[[str], None],
    resets: Iterator[bool],
    *,
    counts: bool,
) -> Given:
    if steps is not None:
        check_count(option, steps)
    kind = recognise(x).kind
    if kind == "dataset":
        return _of_dataset(x, steps, option, tell if counts else None)
    if kind == "sequence":
        if ahead.use_multiprocessing:
            tell("tfdist: threads read the batches of a Sequence, not processes")
        order = order() if order is not None else None
        return _of_sequence(x, steps, option, order, ahead, resets)
    return _of_iterator(x, steps, option)


def _of_dataset(
    dataset: tf.data.Dataset,
    steps: int | None,
    option: str,
    tell: Callable[[str], None] | None,
) -> Given:
    """Returns a dataset that is given; its batches are counted where ``tell`` can say so."""
    spec = dataset.element_spec
    if not isinstance(spec, tuple):
        dataset = dataset.map(lambda x: (x,))
    _check_batches(dataset.element_spec)
    if steps is not None:
        return Given(dataset, steps, begins_anew=int(dataset.cardinality()) == steps)
    if is_endless(dataset):
        raise DataError(
            "a dataset that never ends must come with the number of steps",
            received="none, beside a dataset with repeat() or the like",
            mend=f"Give {option}",
        )
    known = int(dataset.cardinality())
    if known < 0 and tell is None:
        return Given(_read_on(dataset), None, begins_anew=False)
    if known < 0:
        tell(f"tfdist: counting the batches of a dataset, which {option} would spare")
        # A shuffle would draw numbers that are the fit's.
        ordered = without_shuffle(dataset)
        known = int(ordered.reduce(np.int64(0), lambda count, *_: count + 1))
        given = Given(counted(dataset, known, option), known, is_drawn_once=ordered is dataset)
    else:
        given = Given(dataset, known, is_sized=True)
    if known == 0:
        raise _no_batch("none")
    return given


def _no_batch(received: str) -> DataError:
    return DataError(
        "data must have at least one batch",
        received=received,
        mend="Give records for at least a batch, and each fit a new generator",
    )


def _read_on(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the batches of one pass, which has begun. Raises DataError where there is none."""
    if not keras.steps.reads_pass(0, is_sized=False):
        iter(dataset)
    batches = iter(dataset)
    first = batches.get_next_as_optional()
    if not first.has_value():
        raise _no_batch("none")
    others = tf.data.Dataset.range(ENDLESS).map(lambda _: batches.get_next_as_optional())
    others = others.take_while(lambda other: other.has_value())
    others = others.map(lambda other: other.get_value())
    return tf.data.Dataset.from_tensors(first.get_value()).concatenate(others)


def _of_sequence(
    sequence: Any,
    steps: int | None,
    option: str,
    order: Any,
    ahead: ReadAhead,
    resets: Iterator[bool],
) -> Given:
    batches = num_batches(sequence, can_be_endless=steps is not None)
    if batches == 0:
        raise _no_batch("an empty Sequence")
    if batches is None:
        stream = _from_python(sequence[0], lambda: _endless(sequence, steps, resets))
        return Given(stream, steps, begins_anew=False)
    if steps is not None and steps > batches:
        raise DataError(
            "an epoch must have at most the batches of the Sequence",
            received=f"{steps} steps of {batches} batches",
            mend="Say fewer steps",
        )

    def one_pass() -> Iterator[Any]:
        keras.steps.begin_pass(sequence, resets=next(resets))
        numbers = list(range(num_batches(sequence)))
        if order is not None:
            order.shuffle(numbers)
        numbers = numbers[:steps]
        for count, batch in enumerate(ahead.read(sequence.__getitem__, numbers), 1):
            yield _ended_with(batch, sequence) if count == len(numbers) else batch

    of_pass = _from_python(sequence[0], one_pass)
    return Given(of_pass if steps else counted(of_pass, batches, option), steps or batches)


def _endless(sequence: Any, steps: int, resets: Iterator[bool]) -> Iterator[Any]:
    """Yields the batches of a PyDataset without end, which is told of epochs of ``steps``."""
    for number in itertools.count():
        if number % steps == 0:
            keras.steps.begin_pass(sequence, resets=next(resets))
        batch = sequence[number]
        yield batch if (number + 1) % steps else _ended_with(batch, sequence)


def _ended_with(batch: Any, sequence: Any) -> Any:
    """Returns the last batch of an epoch, of whose end the Sequence is told."""
    # Copied: what the Sequence does then may move its rows.
    batch = tf.nest.map_structure(np.array, element_of(batch))
    sequence.on_epoch_end()
    return batch


def _of_iterator(iterator: Iterator[Any], steps: int | None, option: str) -> Given:
    if steps is None:
        raise DataError(
            "what can be read only once must come with the number of steps",
            received=f"a {type(iterator).__name__} without {option}",
            mend=f"Give {option}",
        )
    first = _first_of(iterator)
    rest = itertools.chain([first], iterator)  # Read on by each that reads it.
    return Given(_from_python(first, lambda: rest), steps, begins_anew=False)


def _first_of(iterator: Iterator[Any]) -> Any:
    for first in iterator:
        return first
    raise _no_batch("a generator that has ended")


def _from_python(first: Any, read: Callable[[], Iterable[Any]]) -> tf.data.Dataset:
    """Returns a dataset of batches that Python makes; as Keras does, of any size in each dimension.

    Args:
        first: an element, whose parts and types all have.
    """

    signature = tf.nest.map_structure(
        lambda leaf: tf.TensorSpec([None] * leaf.ndim, leaf.dtype), batch_of(first)
    )
    return tf.data.Dataset.from_generator(
        lambda: _Insistent(map(batch_of, read())), output_signature=signature
    )


class _Insistent(Iterator):
    """Elements up to the first error, which comes again whenever more is asked for.

    Python's own generators have ended then. Replicas ask side by side, and the one that was told of
    an end would hide what happened.
    """

    def __init__(self, elements: Iterator[Any]):
        self._elements = elements
        self._error: Exception | None = None

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        try:
            return next(self._elements)
        except StopIteration:
            raise
        except Exception as error:
            self._error = error
            raise


def batch_of(element: Any) -> tuple[Any, ...]:
    """Returns (x[, y[, sample_weight]]) of arrays of the types that Keras gives them."""
    return tf.nest.map_structure(_as_keras_casts, element_of(element))


def _as_keras_casts(array: np.ndarray) -> np.ndarray:
    return array.astype(tf.keras.backend.floatx()) if array.dtype.kind == "f" else array
