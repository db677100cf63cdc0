"""What in a model's file would run as a program when it is loaded; found without loading it.

Keras' own files name layers by class: those of Keras do what they are known for. A Lambda layer is
Python's bytecode; a class of another module is whatever that module is; some of TensorFlow's
functions touch files. A SavedModel's functions are graphs, which may do all that TensorFlow can.
"""

from __future__ import annotations

import inspect
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import tensorflow as tf

from tfdist.compat import is_keras
from tfdist.compat.keras import UNREADABLE
from tfdist.errors import ModelError, in_one_line, read_json

FILES = "a .keras or .h5 file, or the folder of a SavedModel, that Keras wrote"
# A description of a model is text: more than this is no description.
_MOST_BYTES = 1 << 28
_KINDS = (
    tf.keras.layers.Layer,
    tf.keras.losses.Loss,
    tf.keras.metrics.Metric,
    tf.keras.initializers.Initializer,
    tf.keras.regularizers.Regularizer,
    tf.keras.constraints.Constraint,
    tf.keras.optimizers.Optimizer,
    tf.keras.optimizers.legacy.Optimizer,
    tf.keras.optimizers.schedules.LearningRateSchedule,
)
# Parts of TensorFlow's namespace whose functions compute and do nothing else.
_COMPUTING = (
    *("__operators__", "bitwise", "image", "linalg", "math", "nest", "nn", "ragged", "random"),
    *("sets", "signal", "sparse", "strings", "experimental.numpy"),
)
# Where TensorFlow has those functions at its top that compute and do nothing else. Beside them are
# some that write files, or load libraries of native code.
_COMPUTING_MODULES = {
    f"tensorflow.python.{module}"
    for module in (
        *("framework.constant_op", "framework.tensor_conversion", "ops.array_ops"),
        *("ops.array_ops_stack", "ops.bincount_ops", "ops.check_ops", "ops.clip_ops"),
        *("ops.gen_array_ops", "ops.gen_data_flow_ops", "ops.gen_linalg_ops", "ops.gen_math_ops"),
        *("ops.gen_nn_ops", "ops.gen_spectral_ops", "ops.gen_string_ops", "ops.histogram_ops"),
        *("ops.linalg_ops", "ops.manip_ops", "ops.math_ops", "ops.nn_ops", "ops.random_crop_ops"),
        *("ops.random_ops", "ops.sort_ops", "ops.sparse_ops", "ops.special_math_ops"),
        "ops.string_ops",
    )
}
_CLASSES = ("RaggedTensor", "SparseTensor", "sparse.SparseTensor")
_LAMBDAS = ("Lambda", "__lambda__")
# Where Keras looks for functions that it names by a string.
_FUNCTIONS = {"builtins"} | {
    f"keras.{part}"
    for part in (
        *("activations", "constraints", "initializers", "losses", "metrics", "regularizers"),
    )
}


def check(path: Path) -> None:
    """Checks that loading the file of a model runs nothing that the file brings along.

    Raises:
        ModelError: it does; the message says what.
    """
    try:
        found = next(_programs(path), None)
        if found is None and path.is_file():
            check_reads_no_others(path)
    except UNREADABLE as error:
        raise unreadable(path, error) from error
    if found is not None:
        raise ModelError(
            "a model file must not run code of its own when it is loaded",
            received=f"{path} with {found}",
            mend="If you trust whoever wrote it, give --trust; in Python trust=True, or the model "
            "as you have loaded it",
        )


def check_reads_no_others(path: Path) -> None:
    """Checks that the weights in a file of Keras are in it, and not the bytes of another file.

    HDF5 can name any file as the place where an array lies.

    Raises:
        ModelError: one of them is elsewhere.
        Any of ``UNREADABLE``: it cannot be read.
    """
    found = next(_elsewhere(path), None)
    if found is not None:
        raise ModelError(
            "a file of weights must hold them itself",
            received=f"{path} with {found}",
            mend="Have whoever wrote it save the model anew with Keras",
        )


def _elsewhere(path: Path) -> Iterator[str]:
    """Yields the arrays in a file of Keras that lie in other files."""
    if h5py.is_hdf5(path):
        with h5py.File(path) as file:
            yield from _outside(file)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".h5"):
                    with archive.open(name) as member, h5py.File(member) as file:
                        yield from _outside(file)


def _outside(file: h5py.File) -> Iterator[str]:
    waiting, seen = [file], set()
    while waiting:
        group = waiting.pop()
        for name in group:
            link = group.get(name, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                yield f"'{name}', which is in the file {link.filename}"
            if not isinstance(link, h5py.HardLink):
                continue
            item = group[name]
            if isinstance(item, h5py.Dataset):
                if item.external or item.is_virtual:
                    yield f"'{item.name}', whose bytes are in other files"
            elif isinstance(item, h5py.Group):
                address = h5py.h5o.get_info(item.id).addr  # A group may be in itself.
                if address not in seen:
                    seen.add(address)
                    waiting.append(item)


def _programs(path: Path) -> Iterator[str]:
    """Yields what of a file would run."""
    if path.is_dir():
        yield "the graph functions of a SavedModel, which run as they are"
        return
    # A file may be both: then it is Keras that chooses.
    is_archive = zipfile.is_zipfile(path)
    if is_archive:
        yield from _in_description(_from_archive(path))
    if not is_archive or h5py.is_hdf5(path):
        for text in _from_hdf5(path):
            yield from _in_description(text)


def _from_archive(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive, archive.open("config.json") as member:
        return member.read(_MOST_BYTES)


def _from_hdf5(path: Path) -> list[bytes]:
    with h5py.File(path) as file:
        texts = [file.attrs.get(name) for name in ("model_config", "training_config")]
    return [text.encode() if isinstance(text, str) else bytes(text) for text in texts if text]


def unreadable(path: object, error: Exception, mend: str = f"Give {FILES}") -> ModelError:
    """The error for a file of a model that cannot be loaded."""
    rule = f"{path} must be a model that Keras can load"
    return ModelError(rule, received=f"an error: {in_one_line(error)}", mend=mend)


def _in_description(text: bytes) -> Iterator[str]:
    try:
        description = read_json(text)
    except ValueError as error:
        raise ModelError(
            "the description of a model's layers must be JSON",
            received=f"an error: {str(error)[:200]}",
            mend="Write the model's file anew with Keras",
        ) from error
    left = [description]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            left.extend(item.values())
            if problem := _problem(item):
                yield problem
        elif isinstance(item, list):
            left.extend(item)


def _problem(item: dict[str, Any]) -> str | None:
    """Returns what one serialised object would run; None when it is one of Keras' own."""
    kind = item.get("class_name")
    if not isinstance(kind, str):
        return None
    settings = item.get("config")
    if kind.rpartition(">")[2] in _LAMBDAS:
        name = settings.get("name") if isinstance(settings, dict) else None
        return f"a Lambda layer ({name or 'unnamed'}), which is Python code"
    if kind in ("TFOpLambda", "SlicingOpLambda"):
        function = settings.get("function") if isinstance(settings, dict) else None
        if not _only_computes(function):
            return f"a layer that calls TensorFlow's function {function}"
    if kind == "ClassMethod":
        symbol = settings.get("cls_symbol") if isinstance(settings, dict) else None
        if symbol not in _CLASSES:
            return f"a layer that calls a method of TensorFlow's {symbol}"
    module = item.get("module")
    if isinstance(module, str) and not _is_known(module, kind, item):
        named = settings if kind == "function" and isinstance(settings, str) else kind
        return f"{named} of the module {module}"
    return None


def _only_computes(function: object) -> bool:
    if not isinstance(function, str):
        return False
    place, _, name = function.removeprefix("compat.v1.").rpartition(".")
    if not place:
        for namespace in (tf, tf.compat.v1):
            found = inspect.unwrap(getattr(namespace, name, None))
            if getattr(found, "__module__", None) in _COMPUTING_MODULES:
                return True
        return False
    return any(place == part or place.startswith(f"{part}.") for part in _COMPUTING)


def _is_known(module: str, kind: str, item: dict[str, Any]) -> bool:
    """Whether an object is Keras' own, or one that the program that calls us has brought itself."""
    is_function = kind == "function"
    if module in _FUNCTIONS if is_function else is_keras(module):
        return True
    name = item.get("config") if is_function else item.get("registered_name") or kind
    if isinstance(name, str) and tf.keras.utils.get_registered_object(name) is not None:
        return True
    own = vars(sys.modules[module]).get(kind) if module in sys.modules else None
    return isinstance(own, type) and issubclass(own, _KINDS)
