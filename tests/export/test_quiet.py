"""What is logged while something is exported, and after it."""

from __future__ import annotations

import logging
import os
import sys

from tfdist.export.quiet import quiet


def test_a_line_that_comes_first_within_leaves_a_log_that_works(monkeypatch):
    """Python makes a handler for it, with the stderr of that moment."""
    with os.fdopen(2, "w", closefd=False) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setattr(logging.root, "handlers", [])
        with quiet():
            logging.warning("within")
        (handler,) = logging.root.handlers
        assert handler.stream is stderr


def test_a_standard_error_that_is_closed_stays_without_lines(monkeypatch):
    kept = os.dup(2)
    os.close(2)
    try:
        monkeypatch.setattr(sys, "stderr", None)
        with quiet() as log:
            os.write(2, b"within")
            log.seek(0)
            assert log.read() == b"within"
        assert os.path.samestat(os.fstat(2), os.stat(os.devnull))
    finally:
        os.dup2(kept, 2)
        os.close(kept)
