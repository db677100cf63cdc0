"""What ``tfdist install`` does, as steps that can be shown and run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tfdist.compat.versions import minor_version, tensorflow_version
from tfdist.errors import EngineMissingError

# Longer than any build here; a registry that does not answer ends it.
_TIMEOUT_S = 3600
_SHOWN_LINES = 12

# What TensorFlow Federated 0.87.0 runs with is not what it asks for: jaxlib 0.4.14 is no longer
# published, and it asks for TensorFlow 2.14 alone.
# The second is the oldest jaxlib that there is for Python 3.13.
_JAX = "0.4.30" if sys.version_info < (3, 13) else "0.4.34"
_FEDERATED = (
    *("tensorflow-federated==0.87.0", "tensorflow-privacy==0.9.0", "dp-accounting==0.4.3"),
    *("google-vizier==0.1.11", f"jax=={_JAX}", f"jaxlib=={_JAX}"),
    "tensorflow-model-optimization==0.8.0",
)
# The newest TensorFlow Probability will not be imported with a TensorFlow before this one.
_FIRST_WITH_PROBABILITY_0_25 = (2, 18)
# What these need in turn and can have as they ask for it.
_FEDERATED_NEEDS = (
    *("attrs>=23.1", "cachetools>=5.3,<6", "decorator", "dm-tree>=0.1.8", "grpcio"),
    *("grpcio-tools", "googleapis-common-protos", "mpmath>=1.2,<1.4", "portpicker>=1.6"),
    *("scikit-learn", "sqlalchemy", "tqdm"),
)
_MESH = ("mesh-tensorflow==0.1.21", "gin-config>=0.5")


@dataclass(frozen=True)
class Step:
    """One thing to do.

    Attributes:
        text: what it is, for people.
        run: does it.
    """

    text: str
    run: Callable[..., None]


def mesh() -> list[Step]:
    """Returns the steps that install Mesh-TensorFlow."""
    return [pip("install", *_MESH)]


def federated() -> list[Step]:
    """Returns the steps that install TensorFlow Federated for the TensorFlow that is here."""
    version = tensorflow_version()
    is_older = version is not None and minor_version(version) < _FIRST_WITH_PROBABILITY_0_25
    pins = (*_FEDERATED, f"tensorflow-probability=={'0.24.0' if is_older else '0.25.0'}")
    # Its wheel is one of any Python 3, but asks for less than 3.12.
    past = ("--no-deps", "--ignore-requires-python")
    return [pip("install", *_FEDERATED_NEEDS), pip("install", *past, *pins)]


def pip(*arguments: str) -> Step:
    """Returns the step of calling pip of this Python, in a folder and an environment."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]

    def run(folder: Path | None = None, environ: Mapping[str, str] | None = None) -> None:
        _call(command, folder, os.environ if environ is None else environ)

    return Step(f"pip {shlex.join(arguments)}", run)


def _call(command: list[str], folder: Path | None, environ: Mapping[str, str]) -> None:
    """Runs a command, which says nothing unless it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        print("\n".join(done.stdout.splitlines()[-_SHOWN_LINES:]), file=sys.stderr)
        raise EngineMissingError(
            "every step of an installation must succeed",
            received=f"exit code {done.returncode} of {shlex.join(command[2:6])} ...",
            mend="Mend what it printed above, and run the same again",
        )
