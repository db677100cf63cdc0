"""Model decomposition: a classifier as small models, each for some of the classes.

sensAI: ConvNets decomposition via class parallelism, Wang et al. 2021 (MLSys). A small model keeps
the channels that its classes use, learns to tell these from all others, and never needs to know of
the other small models: not when it is trained, and not when it is run.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError, ModelError, OptionError
from tfdist.export.converter import Conversion, convert
from tfdist.export.models import open_model, whole_copy
from tfdist.export.reports import as_text, table_of
from tfdist.export.smaller import narrowing, tuning
from tfdist.export.smaller.measuring import Comparison, Scale
from tfdist.training.engine.options import check_count
from tfdist.training.layers.data_errors import check_inputs, check_labels

if TYPE_CHECKING:
    from rich.table import Table

    from tfdist.training.feed.feed import Feed

# Records that are looked at to see which channels a class uses, and more of a class that is rare.
_LOOKED_AT, _OF_RARE_CLASS = 2000, 20


@dataclass(frozen=True)
class Part:
    """A small model.

    Attributes:
        classes: their numbers, in the order of its outputs.
        model: gives logits [records, classes]: above 0 for "it is this class".
        weights: numbers in it.
        bytes: of its float32 TFLite file.
    """

    classes: tuple[int, ...]
    model: tf.keras.Model
    weights: int
    bytes: int


@dataclass(frozen=True)
class Decomposition:
    """The small models of a classifier; ``print`` shows their sizes and what the join reaches.

    Attributes:
        parts: the small models.
        joined: all of them side by side: an ordinary compiled model with the outputs of the whole.
        comparison: size and quality of the whole (before) and of ``joined`` (after).
    """

    parts: tuple[Part, ...]
    joined: tf.keras.Model
    comparison: Comparison

    def tables(self) -> Iterator[Table]:
        table = table_of("small models", ("classes",), ("weights", "bytes"))
        for part in self.parts:
            names = ", ".join(map(str, part.classes))
            table.add_row(names, f"{part.weights:,}", f"{part.bytes:,}")
        yield table
        yield from self.comparison.tables()

    def __str__(self) -> str:
        return as_text(self.tables(), [])


def decompose(
    model: tf.keras.Model,
    data: Any,
    *,
    groups: int | Sequence[Sequence[int]] = 2,
    keep: float | None = None,
    epochs: int = 5,
    global_batch_size: int = 64,
    seed: int = 0,
) -> Decomposition:
    """Makes small models of a trained classifier, each for a group of its classes.

    Of each hidden layer a small model keeps the channels that are largest on its own classes'
    records. It is then trained, on all records, to tell each of its classes from all others.

    Args:
        model: trained and compiled; one chain of layers that ends in a Dense with a unit for each
            class, as logits or with softmax. It stays as it is.
        data: a folder of shards or a split of one, or arrays (x, y); labels are class numbers or
            one-hot rows.
        groups: how many, as even as can be, in the order of the classes; or the classes of each.
        keep: share of each hidden layer's channels, above 0 and at most 1. None: 1 / sqrt(groups),
            with which all small models together have about as many weights as the model.
        epochs: that each small model is trained for.
        global_batch_size, seed: of that training.

    Returns:
        The small models, and what they are together.

    Raises:
        ModelError: the model is no such chain; the layer is named.
        DataError: records that do not fit the model, or classes that it does not have, or without
            a record.
        OptionError: groups that miss a class or name one twice, or a share that cannot be.
    """
    check_count("epochs", epochs)
    whole = tuning.plain_copy(model)
    chain = narrowing.chain_of(whole)
    head, is_softmax = _head(whole, chain)
    classes = _classes(groups, head.units)
    share = _share(keep, len(classes))
    feed = tuning.training_feed(data, global_batch_size=global_batch_size, seed=seed)
    check_inputs(whole, feed.records.element_spec)
    check_labels(model, feed.records.element_spec)
    x, y = _some(feed, head.units)
    parts = []
    for number, own in enumerate(classes):
        sizes = narrowing.importance(whole, chain, x[np.isin(y, own)])
        kept = {name: _largest(size, share) for name, size in sizes.items()}
        body = chain[: chain.index(head) + 1]
        part = narrowing.narrowed(
            whole, body, kept | {head.name: np.array(own)}, f"{whole.name}_part_{number}"
        )
        part.layers[-1].activation = tf.keras.activations.linear
        _train(part, own, head.units, model.optimizer, feed, epochs)
        # Not compiled: the data's labels are not those that its loss has learned from.
        parts.append(_measured(own, whole_copy(part)))
    joined = _joined(model, parts, is_softmax)
    what = f"the model, and {len(parts)} small models joined"
    return Decomposition(tuple(parts), joined, Scale(model, data).compare(what, model, joined))


def _head(
    model: tf.keras.Model, chain: Sequence[tf.keras.layers.Layer]
) -> tuple[tf.keras.layers.Dense, bool]:
    """Returns the layer of the classes, and whether the model ends in softmax."""
    makers = narrowing.producers_of(chain)
    if len(makers) > 1 and isinstance(makers[-1], tf.keras.layers.Dense):
        head = makers[-1]
        behind = chain[chain.index(head) + 1 :]
        names = [head.activation.__name__]
        names += ["softmax" if _is_softmax(layer) else layer.name for layer in behind]
        names = [name for name in names if name != "linear"]
        if names in ([], ["softmax"]) and head.units > 1 and len(model.output_shape) == 2:
            return head, bool(names)
    raise ModelError(
        "a model to decompose must end in a Dense with a unit for each class, as logits or with "
        "softmax, and have layers before it",
        received=f"model '{model.name}', which ends in '{chain[-1].name}'",
        mend="Give a classifier that ends in keras.layers.Dense(classes)",
    )


def _is_softmax(layer: tf.keras.layers.Layer) -> bool:
    activation = getattr(layer, "activation", None)
    is_named = isinstance(layer, tf.keras.layers.Activation) and activation.__name__ == "softmax"
    return is_named or isinstance(layer, tf.keras.layers.Softmax)


def _classes(groups: int | Sequence[Sequence[int]], count: int) -> list[tuple[int, ...]]:
    if isinstance(groups, numbers.Integral) and not isinstance(groups, bool):
        if not 2 <= groups <= count:
            raise OptionError(
                f"groups must be 2 to {count}, the number of classes",
                received=groups,
                mend="Choose for example 2",
            )
        return [tuple(map(int, own)) for own in np.array_split(np.arange(count), groups)]
    try:
        found = [tuple(operator.index(each) for each in own) for own in groups]
    except TypeError:
        found = []
    are_all = sorted(each for own in found for each in own) == list(range(count))
    if not are_all or not all(found) or len(found) < 2:
        raise OptionError(
            "groups must be a whole number, or two lists or more that have each class 0 to "
            f"{count - 1} once",
            received=repr(groups),
            mend="Write groups=2, or name each class in one of the lists",
        )
    return found


def _share(keep: float | None, groups: int) -> float:
    if keep is None:
        return 1 / math.sqrt(groups)
    if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep <= 1:
        raise OptionError(
            "keep must be a share above 0 and at most 1",
            received=repr(keep),
            mend="Leave it out, or choose for example 0.5",
        )
    return float(keep)


def _numbers(y: tf.Tensor, count: int) -> tf.Tensor:
    """Returns labels as class numbers, int64 [rows]."""
    if y.shape.rank == 2 and y.shape[-1] == count:
        return tf.argmax(y, -1)
    return tf.cast(tf.reshape(y, [-1]), tf.int64)


def _some(feed: Feed, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns records and the numbers of their classes, some of each class.

    Raises:
        DataError: a class that the model does not have, or one without a record.
    """
    kept, seen = [], np.zeros(count, np.int64)
    for batch in feed.epochs(0, 1):
        x, y = tf.nest.flatten(batch[0])[0].numpy(), _numbers(batch[1], count).numpy()
        odd = y[(y < 0) | (y >= count)]
        if odd.size:
            raise DataError(
                f"labels must be the model's classes, here 0 to {count - 1}",
                received=f"label {odd[0]}",
                mend="Give the data that the model was trained on",
            )
        wanted = np.ones(len(y), bool) if seen.sum() < _LOOKED_AT else seen[y] < _OF_RARE_CLASS
        kept.append((x[wanted], y[wanted]))
        seen += np.bincount(y[wanted], minlength=count)
    if not seen.all():
        raise DataError(
            "each class of the model must have a record",
            received="none of class " + ", ".join(map(str, np.flatnonzero(seen == 0)[:8])),
            mend="Give data that has them",
        )
    x, y = zip(*kept, strict=True)
    return np.concatenate(x), np.concatenate(y)


def _largest(sizes: np.ndarray, share: float) -> np.ndarray:
    count = max(1, round(share * sizes.size))
    return np.sort(np.argsort(-sizes, kind="stable")[:count])


def _train(
    part: tf.keras.Model,
    own: tuple[int, ...],
    count: int,
    optimizer: tf.keras.optimizers.Optimizer,
    feed: Feed,
    epochs: int,
) -> None:
    def of_part(x: Any, y: tf.Tensor, *weight: tf.Tensor) -> tuple:
        is_class = tf.equal(_numbers(y, count)[:, None], tf.constant(own, tf.int64))
        return (tf.nest.flatten(x)[0], tf.cast(is_class, tf.float32), *weight)

    part.compile(
        type(optimizer).from_config(optimizer.get_config()),
        tf.keras.losses.BinaryCrossentropy(from_logits=True),
    )
    part.fit(
        feed.epochs(0, epochs).map(of_part),
        epochs=epochs,
        steps_per_epoch=feed.steps_per_epoch,
        verbose=0,
    )


def _measured(own: tuple[int, ...], part: tf.keras.Model) -> Part:
    content = convert(open_model(part), Conversion("none", None, input_type="float32"))
    return Part(own, part, int(sum(array.size for array in part.get_weights())), len(content))


def _joined(whole: tf.keras.Model, parts: Sequence[Part], is_softmax: bool) -> tf.keras.Model:
    inputs = tf.keras.Input(whole.inputs[0].shape[1:], dtype=whole.inputs[0].dtype)
    x = tf.keras.layers.Concatenate()([part.model(inputs) for part in parts])
    order = np.argsort([each for part in parts for each in part.classes])
    if list(order) != sorted(order):
        x = tf.gather(x, order.tolist(), axis=-1)
    if is_softmax:
        x = tf.keras.layers.Softmax()(x)
    joined = tf.keras.Model(inputs, x, name=f"{whole.name}_joined")
    tuning.compile_like(joined, whole)
    return joined
