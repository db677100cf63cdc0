"""Which Keras ``tf.keras`` is: Keras 2 (``tf_keras``) or Keras 3 (``keras``).

TensorFlow takes Keras 3, unless a variable of the environment says otherwise. Programs that say
``tf.keras`` alone were written for Keras 2, so tfdist takes that unless it is told not to: by that
variable, or by a program that imports Keras by its own name.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
import zipfile
import zlib
from collections.abc import MutableMapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

VARIABLE = "TF_USE_LEGACY_KERAS"
#: What TensorFlow takes for a wish of Keras 2.
KERAS_2 = ("1", "true", "True")
#: What tfdist takes for a wish of Keras 3; nothing at all may be an oversight.
KERAS_3 = ("0", "false", "False")
#: What reading a damaged file of a model raises, and one with a password: a RuntimeError.
UNREADABLE = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError),
    *(zlib.error, zipfile.BadZipFile),
)
_VALUES = {"keras": "0", "tf_keras": "1"}
#: What the variable said before any program was followed.
_asked: dict[str, str] = {}


def prefer_keras_2(environ: MutableMapping[str, str]) -> None:
    """Has TensorFlow take tf_keras, where that is installed, for ``tf.keras``.

    TensorFlow looks when ``tf.keras`` is first used, in this process and in those that it starts.
    """
    if importlib.util.find_spec("tf_keras") is not None:
        environ.setdefault(VARIABLE, "1")
    if VARIABLE in environ:
        _asked.setdefault(VARIABLE, environ[VARIABLE])


def asked() -> str | None:
    """Returns what the environment said of the variable before any program was followed."""
    return _asked.get(VARIABLE)


def follow_program(
    environ: MutableMapping[str, str], place: str | None = None, written: Path | None = None
) -> None:
    """Has ``tf.keras`` be the Keras that a program imports, whatever was said before.

    ``import keras`` means Keras 3 and ``import tf_keras`` Keras 2; ``tf.keras`` alone, or both,
    leaves it as it was. No module is run for it: the program is read, with what it imports of its
    own folder. Where ``tf.keras`` is in use already, it stays what it is.

    Args:
        place: a file of Python or the name of a module; None: the program that is running.
        written: a file of its model's weights, which tells where the program does not.
    """
    if _is_settled():
        return
    folder, main = Path(sys.path[0] or "."), sys.modules["__main__"]
    if place is not None:
        found = imported_by(place, [Path(), folder])
        environ.update(_asked)  # Another program may have been followed before.
    elif Path(getattr(main, "__file__", "<stdin>")).is_file():
        found = imported_by(main.__file__, [folder])
    else:  # Cells of a notebook, or lines of a pipe.
        found = {_root_of(value) for value in vars(main).values()} & {*_VALUES}
    if len(found) == 1:
        environ[VARIABLE] = _VALUES[min(found)]
    elif written is not None:
        follow_file(environ, written)


def _root_of(value: Any) -> str | None:
    """Returns the package of a module, a class or a function; nothing else is looked into."""
    if type(value) is ModuleType:
        return value.__name__.partition(".")[0]
    is_named = isinstance(value, (type, FunctionType))
    return (value.__module__ or "").partition(".")[0] if is_named else None


def follow_file(environ: MutableMapping[str, str], path: Path) -> None:
    """Has ``tf.keras`` be the Keras that wrote a model's file, where that tells."""
    package = package_of(path)
    if package is not None and not _is_settled():
        environ[VARIABLE] = _VALUES[package]


def package_of(path: Path) -> str | None:
    """Returns "keras" or "tf_keras": what wrote a .keras or .h5 file; None where nothing tells."""
    import h5py

    try:
        if path.suffix == ".keras":
            with zipfile.ZipFile(path) as file, file.open("metadata.json") as metadata:
                version = json.loads(metadata.read(1 << 16))["keras_version"]
        else:
            with h5py.File(path) as file:
                version = file.attrs["keras_version"]
        return "keras" if version.startswith("3.") else "tf_keras"
    except (*UNREADABLE, AttributeError):
        return None  # Told where it is read.


def _is_settled() -> bool:
    """Whether TensorFlow has looked, and ``tf.keras`` cannot become another one."""
    tensorflow = sys.modules.get("tensorflow")
    lazy = vars(tensorflow).get("keras") if tensorflow is not None else None
    return lazy is not None and vars(lazy).get("_tfll_initialized", True)


def imported_by(place: str, folders: list[Path]) -> set[str]:
    """Returns "keras" and "tf_keras" where a file or module, or what lies beside it, imports them.

    Args:
        folders: of further modules of the program.
    """
    return set().union(*(roots for _, roots in _read(place, folders))) & {*_VALUES}


def files_of(place: Path) -> list[Path]:
    """Returns a file of Python, and those beside it that it imports, or that these import."""
    return [file for file, _ in _read(str(place), [place.parent])]


def _read(place: str, folders: list[Path]) -> list[tuple[Path, set[str]]]:
    """Returns the files of a program, and what each of them imports, by the names of the roots."""
    found, files = [], _files_of(place, folders)
    for file in files:  # Which grow.
        imported: set[str] = set()
        found.append((file, imported))
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, ValueError, SyntaxError):
            continue  # Told where it is run.
        for node in ast.walk(tree):
            names, beside, level = [], [file.parent, *folders], 0
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                start = f"{node.module}." if node.module else ""
                names = [start, *(start + each.name for each in node.names)]
                level = node.level
                if level:
                    beside = [*file.resolve().parents][level - 1 : level]
            roots = {name.partition(".")[0] for name in names}
            if level:  # They are modules beside it, whatever they are called.
                roots = set()
            imported |= roots
            if not roots & {*_VALUES, "tfdist"}:
                beside = [each for name in names for each in _files_of(name, beside)]
                files += [each for each in beside if each not in files]
    return found


def _files_of(name: str, folders: list[Path]) -> list[Path]:
    """Returns the files of a module that lie in these folders, or the file of this name."""
    if Path(name).is_file():
        return [Path(name)]
    places = [folder.joinpath(*name.split(".")) for folder in folders if name]
    tried = [path for each in places for path in (Path(f"{each}.py"), each / "__init__.py")]
    return [path for path in tried if path.is_file()]


def is_keras(module: str) -> bool:
    """Whether the module of this name is one of Keras' own."""
    return module.partition(".")[0] in _VALUES


def keras_source(name: str) -> ModuleType:
    """Imports a private module of Keras, such as "layers.core.tf_op_layer"."""
    import tensorflow as tf

    return importlib.import_module(f"{tf.keras.Model.__module__.partition('.')[0]}.src.{name}")
