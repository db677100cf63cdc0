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
