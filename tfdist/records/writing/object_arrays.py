"""Arrays of Python objects in files: rows of unequal lengths, as Keras' imdb.npz has them.

numpy.save pickles such an array, and a pickle names functions that its reader is to call. This one
calls none: each of the few names that such an array needs stands for a class of this file, which
looks at what it is given and keeps it. Neither NumPy nor any other module sees the file's values
before they are plain lists, numbers and text.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

# Of a file that is larger, the lists in memory would be many times as large.
_MOST_BYTES = 2 << 30
_NUMBERS = re.compile(r"[<>|=]?([biuf])([1248])")
_SCALARS = (bool, int, float, str, bytes)


class RefusedError(ValueError):
    """A pickle of something else than rows of numbers or text."""


def read_objects(file: BinaryIO, shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array of objects, [records]: each a number, a text, or a list or array of them.

    Args:
        file: at the first byte behind the array's header.
        shape: as the header says.

    Raises:
        RefusedError: it holds anything else, or is larger than is taken.
    """
    found, size = _load(file, "ASCII")
    if not isinstance(found, _Array) or not isinstance(found.value, list):
        raise RefusedError(f"a pickled {_called(found)}")
    rows = found.value
    if shape != (len(rows),):
        raise RefusedError(f"{len(rows)} rows where the header says {list(shape)}")
    # Every value takes a byte or more of an honest file; a row that is named again and again, none.
    left = size
    array = np.empty(len(rows), object)
    for number, row in enumerate(rows):
        array[number], size = _plain(row)
        left -= size
        if left < 0:
            raise RefusedError("more values than the file has bytes")
    return array


def read_named_arrays(file: BinaryIO) -> dict[str, Any]:
    """Returns what a pickled dict of Python 2 has, as the files of CIFAR-10: arrays and lists.

    Raises:
        RefusedError: it is anything else.
    """
    found, _ = _load(file, "bytes")
    if not isinstance(found, dict) or not all(isinstance(name, (bytes, str)) for name in found):
        raise RefusedError(f"a pickled {_called(found)} where a dict of arrays is wanted")
    named = {name.decode() if isinstance(name, bytes) else name: found[name] for name in found}
    return {
        name: value.value if isinstance(value, _Array) else value for name, value in named.items()
    }


def _load(file: BinaryIO, encoding: str) -> tuple[Any, int]:
    """Returns what is pickled there, as classes of this file, and its bytes.

    Args:
        encoding: of the text of Python 2.
    """
    data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise RefusedError(f"more than {_MOST_BYTES >> 30} GB of them")
    try:
        return _Reader(io.BytesIO(data), encoding=encoding).load(), len(data)
    except RefusedError:
        raise
    except Exception as error:  # Bytes that are no pickle raise whatever they lead to.
        raise RefusedError(f"what is no pickle of an array: {error!r:.100}") from None


def _plain(value: Any, depth: int = 2) -> tuple[Any, int]:
    """Returns a value without classes of this file, and how many numbers or texts it has."""
    if type(value) in _SCALARS:
        return value, 1
    if isinstance(value, _Array) and isinstance(value.value, np.ndarray):
        return value.value, max(1, value.value.size)
    if not isinstance(value, (list, tuple)) or depth == 0:
        raise RefusedError(f"a row with a {_called(value)}")
    if set(map(type, value)) <= set(_SCALARS):
        return value, max(1, len(value))
    parts = [_plain(part, depth - 1) for part in value]
    return [part for part, _ in parts], sum(size for _, size in parts)


def _called(value: Any) -> str:
    return "list of lists" if isinstance(value, (list, tuple)) else type(value).__name__.strip("_")


class _Sealed:
    """What a pickle can neither change nor look into."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise RefusedError("a pickle that changes what it calls")


class _Function(_Sealed):
    """What stands for a name that a pickle may call."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]):
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class _DType(_Sealed):
    """A dtype: of objects, or of numbers with the order of their bytes."""

    __slots__ = ("dtype",)

    def __init__(self, text: Any, *_: Any):
        text = text.decode("latin-1") if isinstance(text, bytes) else text  # Of Python 2.
        found = _NUMBERS.fullmatch(text) if isinstance(text, str) else None
        if found is None and text not in ("O8", "O4", "|O", "O"):
            raise RefusedError(f"an array of dtype {text!r:.40}")
        self.dtype = None if found is None else np.dtype(text)

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode("latin-1") if isinstance(state[1], bytes) else state[1]
        if self.dtype is not None and order in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(order)


class _Array(_Sealed):
    """An array: of objects a list, of numbers an array of NumPy."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, values = state
        if self.value is not None or not isinstance(dtype, _DType):
            raise RefusedError("an array that is made twice")
        if dtype.dtype is None:
            if not isinstance(values, list) or shape != (len(values),):
                raise RefusedError("an array of objects that is no row of them")
            self.value = values
        else:
            numbers = np.frombuffer(_of_type(values, bytes), dtype.dtype)
            self.value = numbers.reshape(shape, order="F" if is_fortran else "C")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _scalar(dtype: Any, data: Any) -> Any:
    kind = _of_type(_of_type(dtype, _DType).dtype, np.dtype)
    return np.frombuffer(_of_type(data, bytes), kind)[0].item()


def _encode(text: Any, encoding: Any) -> bytes:
    """What Python 3 calls for bytes in the older pickles, of which Keras' files are."""
    if encoding != "latin1":
        raise RefusedError(f"bytes in {encoding!r:.40}")
    return _of_type(text, str).encode("latin-1")


def _no_bytes() -> bytes:
    """What Python 3 calls there for bytes of no length."""
    return b""


def _of_type(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise RefusedError(f"a {_called(value)} where {kind.__name__.strip('_')} is wanted")
    return value


# NumPy 2 has given the first module another name.
_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("numpy", "ndarray"): _reconstruct,
    ("numpy", "dtype"): _DType,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): _no_bytes,
}


class _Reader(pickle.Unpickler):
    """Finds nothing but what this file has."""

    def find_class(self, module: str, name: str) -> Any:
        make = _KNOWN.get((module, name))
        if make is None:
            raise RefusedError(f"a pickle that calls {module}.{name}")
        return _Function(make)
