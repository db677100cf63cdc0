"""Keras' TextVectorization with the vocabulary of a split, which is read once."""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from tfdist.errors import DataError, OptionError, first_line
from tfdist.records.format.manifest import splits_of
from tfdist.records.reading.reader import open_records

_BATCH_SIZE = 1024
# What a layer can be given instead of texts.
_READ = ("vocabulary", "idf_weights")


def text_vectorizer(
    data: Any,
    *,
    max_tokens: int | None = None,
    output_sequence_length: int | None = None,
    feature: str | None = None,
    **options: Any,
) -> tf.keras.layers.TextVectorization:
    """Returns a TextVectorization of Keras that has seen all texts of a split.

    It belongs into ``map_fn``, so that models get numbers on every strategy and device:
    ``strategy.dataset(..., map_fn=lambda x, y: (vectorize(x), y))``. Words are numbered by how
    often they come, then by their letters: every process gets the same numbers.

    Args:
        data: "DIR/SPLIT" of shards; DIR, of which the first split is read, "train" as a rule; or
            anything else that ``records.open_records`` takes.
        max_tokens: the size of the vocabulary; None keeps all words.
        output_sequence_length: of the numbers of each text, so many are kept or filled up with 0.
        feature: the input whose texts are read, where there are several.
        **options: others of TextVectorization, as ``standardize``, ``split`` or ``output_mode``.

    Raises:
        OptionError: an option that TextVectorization has not, or a feature that is no text.
        DataError: data that cannot be read, or that holds no text.
    """
    layer = _layer(max_tokens, output_sequence_length, options)
    records = open_records(_first_split(data))
    inputs = records.element_spec[0]
    name = _text_feature(inputs, feature)
    batches = records.batches(0, records.num_records, _BATCH_SIZE, shuffle=False, seed=0, epoch=0)
    texts = batches.map(lambda x, *_: x if name is None else x[name])
    records.read_now(lambda: layer.adapt(texts))
    return layer


def _layer(
    max_tokens: int | None, length: int | None, options: dict[str, Any]
) -> tf.keras.layers.TextVectorization:
    known = inspect.signature(tf.keras.layers.TextVectorization).parameters
    unknown = [name for name in options if name not in known]
    if unknown:
        raise OptionError(
            "the options of a text_vectorizer must be those of TextVectorization",
            received=", ".join(unknown),
            mend=f"Choose from {', '.join(name for name in known if name != 'kwargs')}",
        )
    if read := [name for name in _READ if options.get(name) is not None]:
        raise OptionError(
            "a text_vectorizer must be left to read its vocabulary from the data",
            received=f"{' and '.join(read)} beside them",
            mend="Leave it out, or make a TextVectorization with it",
        )
    try:
        return tf.keras.layers.TextVectorization(
            max_tokens=max_tokens, output_sequence_length=length, **options
        )
    except (TypeError, ValueError) as error:
        raise OptionError(
            "the options of a text_vectorizer must be ones that TextVectorization takes",
            received=f"an error: {first_line(error)}",
            mend="Choose others",
        ) from error


def _first_split(data: Any) -> Any:
    """Returns DIR/SPLIT of the folder DIR's first split, and anything else as it is."""
    if (found := splits_of(data)) is None:
        return data
    folder, splits = found
    return folder / next(iter(splits))


def _text_feature(inputs: Any, feature: str | None) -> str | None:
    """Returns the name of the input that holds text; None where it is the only input."""
    is_named = isinstance(inputs, dict)
    named = inputs if is_named else {"x": inputs}
    if not all(isinstance(spec, tf.TypeSpec) for spec in named.values()):
        raise DataError(
            "inputs for a text_vectorizer must be one, or a dict of them by name",
            received="several in a tuple, or within each other",
            mend="Give them by name: ({'text': texts, 'length': lengths}, y)",
        )
    texts = [name for name, spec in named.items() if spec.dtype == tf.string]
    if not texts:
        raise DataError(
            "data for a text_vectorizer must have an input of text",
            received=", ".join(f"{name} {spec.dtype.name}" for name, spec in named.items()),
            mend="Give data with one; of a table, `tfdist shard SOURCE OUT --text NAME` "
            "keeps a column as text",
        )
    if not is_named and feature is not None:
        raise OptionError(
            "feature must be named where there are several inputs alone",
            received=f"{feature!r} of one input",
            mend="Leave it out",
        )
    if (feature is None and len(texts) > 1) or (feature is not None and feature not in texts):
        raise OptionError(
            "feature must name one of the inputs that are text",
            received=f"{feature!r} of {', '.join(texts)}",
            mend=f"Choose one of {', '.join(texts)}",
        )
    return (feature or texts[0]) if is_named else None
