"""Whether the TensorFlow and the Keras that are installed are ones that tfdist runs on."""

from __future__ import annotations

import os
import sys

from tfdist.compat.keras import KERAS_2, KERAS_3, VARIABLE, asked
from tfdist.errors import EngineMissingError

OLDEST, NEWEST = (2, 16), (2, 21)
# Before 3.14 several replicas come to other weights than one device (tests/conformance, -k keras),
# before 3.9 they do not train.
_OLDEST_KERAS_3 = (3, 14)
#: The package has another name for some machines.
_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-macos")
#: What to give to pip.
ASKED = f"'tensorflow>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}' tf_keras"


def check_versions() -> None:
    """Checks TensorFlow and Keras, without importing what is not imported yet.

    Raises:
        EngineMissingError: TensorFlow or the Keras that is asked for is missing, or of a version
            that tfdist does not know; or the other Keras is in use already.
    """
    text = tensorflow_version()
    if text is None:
        raise EngineMissingError(
            f"TensorFlow {_written(OLDEST)} to {_written(NEWEST)} must be installed",
            received="none",
            mend=f"Run pip install {ASKED}",
        )
    version = minor_version(text)
    if not OLDEST <= version <= NEWEST:
        raise EngineMissingError(
            f"TensorFlow must be of a version from {_written(OLDEST)} to {_written(NEWEST)}",
            received=text,
            mend=f"Run pip install {ASKED}",
        )
    if os.environ.get(VARIABLE) in KERAS_3:
        _check_keras_3()
    else:
        _check_keras_2(_written(version))


def tensorflow_version() -> str | None:
    """Returns the version of the TensorFlow that is imported or would be; None without one."""
    imported = sys.modules.get("tensorflow")
    if imported is not None:
        return imported.__version__
    versions = (_version(name) for name in _DISTRIBUTIONS)
    return next((version for version in versions if version), None)


def uses_keras_3() -> bool:
    """Whether ``tf.keras`` is Keras 3, or would be; where ``check_versions`` finds no fault."""
    return tensorflow_version() is not None and os.environ.get(VARIABLE) not in KERAS_2


def keras_version() -> str | None:
    """Returns the version of the Keras that ``tf.keras`` is or would be; None without one."""
    return _version("keras" if uses_keras_3() else "tf-keras")


def refuse_keras_3(what: str, *, otherwise: str = "") -> None:
    """Raises:
    EngineMissingError: Keras 3 was chosen.

    Args:
        what: needs Keras 2, for people.
        otherwise: what else could be done.
    """
    if uses_keras_3():
        # tfdist sets it itself, for a program that imports Keras 3.
        value = asked()
        left_out = f", and leave {VARIABLE}={value} out" if value in KERAS_3 else ""
        raise EngineMissingError(
            f"{what} must have models of Keras 2",
            received=f"Keras {keras_version()}",
            mend=f"Import tf_keras in place of keras{left_out}{otherwise}",
        )


def _check_keras_3() -> None:
    found = _version("keras")
    if found is None or minor_version(found) < _OLDEST_KERAS_3:
        oldest = _written(_OLDEST_KERAS_3)
        raise EngineMissingError(
            f"{VARIABLE}={os.environ[VARIABLE]} must have Keras {oldest} or later installed",
            received=f"keras {found}" if found else "none",
            mend=f"Run pip install 'keras>={oldest}', or set {VARIABLE}=1",
        )
    if os.environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow":
        raise EngineMissingError(
            "Keras 3 must run on TensorFlow",
            received=f"KERAS_BACKEND={os.environ['KERAS_BACKEND']}",
            mend="Unset it",
        )
    imported = sys.modules.get("tensorflow")
    if imported is not None and imported.keras.Model.__module__.startswith("tf_keras."):
        raise EngineMissingError(
            "tf.keras must be Keras 3",
            received="Keras 2 (tf_keras), which was in use before tfdist was imported",
            mend=f"Set {VARIABLE}={os.environ[VARIABLE]} before the program starts",
        )
    if imported is not None and imported.keras.backend.backend() != "tensorflow":
        raise EngineMissingError(
            "Keras 3 must run on TensorFlow",
            received=f"the backend {imported.keras.backend.backend()}",
            mend="Set KERAS_BACKEND=tensorflow",
        )


def _check_keras_2(wanted: str) -> None:
    mend = f"Run pip install 'tf_keras~={wanted}.0'"
    found = _version("tf-keras")
    if found is None or _written(minor_version(found)) != wanted:
        rule = f"TensorFlow {wanted} must have tf_keras {wanted} (Keras 2) beside it"
        raise EngineMissingError(rule, received=found or "none", mend=mend)
    if os.environ.get(VARIABLE) not in KERAS_2:
        raise EngineMissingError(
            f"{VARIABLE} must be 1 for models of Keras 2 (tf_keras), or 0 for those of Keras 3",
            received=repr(os.environ.get(VARIABLE)),
            mend=f"Unset it, or set {VARIABLE}=1",
        )
    imported = sys.modules.get("tensorflow")
    if imported is not None and not imported.keras.Model.__module__.startswith("tf_keras."):
        raise EngineMissingError(
            "tf.keras must be Keras 2 (tf_keras)",
            received="Keras 3, which was in use before tfdist was imported",
            mend=f"Import tfdist before anything uses tf.keras, or set {VARIABLE}=1",
        )


def _version(distribution: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def minor_version(version: str) -> tuple[int, int]:
    """Returns the first two numbers of a version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _written(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
