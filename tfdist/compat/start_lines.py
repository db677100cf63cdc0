"""What TensorFlow's libraries write to stderr while they are loaded, whatever level is set."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
import tempfile
from collections.abc import Iterator

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
