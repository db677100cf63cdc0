"""What a user gave as data, whoever reads it: told by what it is and has, and by nothing in it.

Nothing is imported: whoever has a dataset or a table has imported its package.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfdist.errors import DataError, OptionError
from tfdist.records.sources.dataframes import is_frame

_KERAS = ("keras", "tf_keras", "tensorflow")
_PLAIN = (str, tuple, list, set, frozenset, Mapping)
# What a function must not return.
_NO_ELEMENTS = ("files", "tfds", "function", "table", "arrays", "unknown")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Data as it was given.

    Attributes:
        given: itself; of a function that was called, what it returned.
        kind: "files", which a path names; "dataset", of tf.data; "tfds", a builder of TensorFlow
            Datasets; "huggingface", a dataset of theirs, or a dict of them by split; "sequence", a
            keras.utils.Sequence or PyDataset of any Keras; "function"; "iterator", which is read
            once; "iterable", anything else that gives elements, as a loader does; "dicts" and
            "tuples", lists of records; "table", a DataFrame; "arrays", or a structure of them or of
            tables; or "unknown".
        name: in words.
        read: returns the elements of a new pass; None where Python cannot read it again and again.
        batched: whether each element is a batch; None where they must tell themselves.
    """

    given: Any
    kind: str
    name: str
    read: Callable[[], Iterable[Any]] | None = None
    batched: bool | None = None


def recognise(given: Any) -> Source:
    """Returns what ``given`` is. Nothing of it is read, and no function called."""
    kind, of = _kind(given), type(given).__name__
    name, read = f"the {of}", None
    if kind == "sequence":
        name, read = f"the Sequence '{of}'", functools.partial(_batches_of, given)
    elif kind == "iterable" or (kind == "huggingface" and not _is_plain(given)):
        read = functools.partial(iter, given)
    batched = True if kind == "sequence" else None
    return Source(given=given, kind=kind, name=name, read=read, batched=batched)


def called(source: Source) -> Source:
    """Returns what a function gives; anything else as it is.

    Raises:
        DataError: the function wants arguments, or returns what has no elements.
    """
    if source.kind != "function":
        return source
    function = source.given
    name = getattr(function, "__name__", type(function).__name__)
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        raise DataError(
            "a function that gives data must be called without arguments",
            received=f"'{name}', which needs some",
            mend=f"Give lambda: {name}(...)",
        ) from None
    made = recognise(function())
    is_list = isinstance(made.given, list)
    if made.kind in _NO_ELEMENTS and not is_list:
        raise DataError(
            "a function that gives data must return a generator, a tf.data.Dataset or another "
            "iterable of records or batches",
            received=f"'{name}', which returns a {type(made.given).__name__}",
            mend="Give what it returns",
        )
    if made.kind in ("dataset", "sequence", "huggingface"):
        return made
    kind = made.kind if made.kind in ("dicts", "tuples") else "iterable"
    return replace(made, kind=kind, name=f"the generator '{name}'", read=function)


def num_batches(sequence: Any, *, can_be_endless: bool = False) -> int | None:
    """Returns how many batches a Sequence has. Raises DataError where it does not say.

    Args:
        can_be_endless: whether to return None of one that says so.
    """
    try:
        found = len(sequence) if hasattr(sequence, "__len__") else sequence.num_batches
    except NotImplementedError:
        found, can_be_endless = None, False
    if found is None and not can_be_endless:
        raise DataError(
            "a Sequence must have a number of batches",
            received=f"'{type(sequence).__name__}', which does not say it",
            mend="Give it a method __len__, which returns the number",
        )
    return found


def _batches_of(sequence: Any) -> Iterator[Any]:
    return map(sequence.__getitem__, range(num_batches(sequence)))


def refuse_batched(batched: bool | None, given: Any) -> None:
    """Raises OptionError where it is said of what has no elements."""
    if batched is not None:
        raise OptionError(
            "batched must be said of a tf.data.Dataset or a generator alone",
            received=f"batched={batched} beside a {type(given).__name__}",
            mend="Leave it out",
        )


def _kind(given: Any) -> str:
    tf = sys.modules.get("tensorflow")
    if isinstance(given, (str, Path)):
        return "files"
    if tf is not None and isinstance(given, tf.data.Dataset):
        return "dataset"
    if all(hasattr(given, name) for name in ("as_dataset", "download_and_prepare", "info")):
        return "tfds"
    if _is_hugging_face(given):
        return "huggingface"
    if _is_of_keras(given, "Sequence", "PyDataset"):
        return "sequence"
    if isinstance(given, Iterator):
        return "iterator"
    if isinstance(given, list) and given and isinstance(given[0], Mapping):
        return "dicts"
    if _are_tuples(given):
        return "tuples"
    if is_frame(given) and given.ndim == 2:
        return "table"
    if _is_plain(given):
        return "arrays"
    no_data = () if tf is None else (tf.Module, tf.distribute.DistributedDataset)
    is_model = _is_of_keras(given, "Layer")
    if inspect.isclass(given) or is_model or isinstance(given, (bytes, *no_data)):
        return "unknown"
    if callable(given):
        return "function"
    return "iterable" if hasattr(given, "__iter__") else "unknown"


def _is_plain(given: Any) -> bool:
    return isinstance(given, _PLAIN) or hasattr(given, "shape") or hasattr(given, "__array__")


def _is_hugging_face(given: Any) -> bool:
    if isinstance(given, Mapping):
        return bool(given) and all(map(_is_hugging_face, given.values()))
    return all(hasattr(given, name) for name in ("features", "cast_column", "__iter__"))


def _is_of_keras(given: Any, *names: str) -> bool:
    return any(
        base.__name__ in names and base.__module__.startswith(_KERAS)
        for base in type(given).__mro__
    )


def _are_tuples(given: Any) -> bool:
    """Whether it is a list of (x, y) or (x, y, sample_weight), as a generator gives records."""
    if not isinstance(given, list) or not all(type(record) is tuple for record in given):
        return False
    return {len(record) for record in given} in ({2}, {3})
