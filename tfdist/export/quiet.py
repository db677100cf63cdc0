"""Keeps the log of TensorFlow Lite, which C++ writes to file descriptor 2, off the terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import IO

import tensorflow as tf


@contextlib.contextmanager
def quiet() -> Iterator[IO[bytes]]:
    """Sends what is logged to a temporary file, which it yields for reading.

    Python's own ``sys.stderr`` goes on to where it went, so that a progress bar still shows.
    """
    _open_descriptor_2()
    # Made now, lest it keeps the stream of this moment for good.
    logger = tf.get_logger()
    with contextlib.suppress(AttributeError, ValueError):  # It is None, or closed.
        sys.stderr.flush()
    kept = os.dup(2)
    before = sys.stderr
    level = logger.level
    with (
        tempfile.TemporaryFile() as log,
        warnings.catch_warnings(),
        os.fdopen(kept, "w", buffering=1, closefd=False) as terminal,
    ):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.CRITICAL)
        os.dup2(log.fileno(), 2)
        if _is_descriptor_2(before):
            sys.stderr = terminal
        try:
            yield log
        finally:
            sys.stderr = before
            for handler in logging.root.handlers:
                # Python makes one with the first line of any logger, which may have come here.
                if isinstance(handler, logging.StreamHandler) and handler.stream is terminal:
                    handler.setStream(before)
            os.dup2(kept, 2)
            os.close(kept)
            logger.setLevel(level)


def _open_descriptor_2() -> None:
    """Has what C++ logs go nowhere where who called the program has closed its standard error."""
    try:
        os.fstat(2)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != 2:
            os.dup2(nowhere, 2)
            os.close(nowhere)


def _is_descriptor_2(stream: IO[str]) -> bool:
    try:
        return stream.fileno() == 2
    except (OSError, ValueError, AttributeError):
        return False
