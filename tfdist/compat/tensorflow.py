"""The import of TensorFlow into a program of tfdist's own."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator
from types import ModuleType

from tfdist.compat.start_lines import without_start_lines
from tfdist.compat.versions import check_versions


def import_tensorflow() -> ModuleType:
    """Imports TensorFlow into a program of tfdist's own, a second earlier and without its greeting.

    TensorFlow Lite imports jax where TensorFlow Federated has brought it, which takes most of a
    second, to convert jax's models. tfdist has none, and lets jax come when it is wanted.

    What the import makes, and the graphs that are traced later, stays until the process ends.
    Python's garbage collector would look through all of it again and again while it comes, and once
    more at the end. A library leaves the collector of its user's program alone; a rank program is
    ours.

    Returns:
        The module ``tensorflow``, whose objects the collector leaves alone from now on.

    Raises:
        EngineMissingError: it is missing, or one that tfdist does not run on.
    """
    check_versions()
    gc.disable()
    try:
        with without_start_lines(), _absent("jax"):
            import tensorflow
    finally:
        gc.enable()
    gc.freeze()
    atexit.register(gc.freeze)
    return tensorflow


@contextlib.contextmanager
def _absent(module: str) -> Iterator[None]:
    """Has an import of ``module`` fail, unless it is there already."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None
    try:
        yield
    finally:
        del sys.modules[module]
