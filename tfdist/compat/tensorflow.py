"""The import of TensorFlow into a program of tfdist's own."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from types import ModuleType

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


# What TensorFlow's libraries write to stderr while they are loaded, whatever level is set.
# Since TensorFlow 2.17 these lines come before the logging that TF_CPP_MIN_LOG_LEVEL rules
# (tensorflow#79029), with a heading of their own, and one of them has a second line.
_STARTED = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog|"
    rb"I\d{4} \d\d:\d\d:\d+\.\d+ +\d+ \S+:\d+\] |"
    rb"To enable the following instructions: "
)


@contextlib.contextmanager
def without_start_lines() -> Iterator[None]:
    """Keeps from stderr what libraries tell of themselves, not what they warn of or fail with.

    All that is written meanwhile is held back to its end. A library that ends the process takes
    that along, so Python then shows where it was.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # A program without stderr.
        yield
        return
    was_watched = faulthandler.is_enabled()
    with contextlib.ExitStack() as last, tempfile.TemporaryFile() as held_back:
        last.callback(os.close, stderr)
        if not was_watched:
            faulthandler.enable(stderr)
            last.callback(faulthandler.disable)
        sys.stderr.flush()
        os.dup2(held_back.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            held_back.seek(0)
            for line in held_back:
                if not _STARTED.match(line):
                    os.write(stderr, line)
