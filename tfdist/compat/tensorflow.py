"""The import of TensorFlow into a program of tfdist's own."""

from __future__ import annotations

import atexit
import gc
from types import ModuleType

from tfdist.compat.start_lines import without_start_lines
from tfdist.compat.versions import check_versions


def import_tensorflow() -> ModuleType:
    """Imports TensorFlow into a program of tfdist's own, a second earlier and without its greeting.

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
        with without_start_lines():
            import tensorflow
    finally:
        gc.enable()
    gc.freeze()
    atexit.register(gc.freeze)
    return tensorflow
