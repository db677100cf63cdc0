"""What fails beside a training and does not end it: told once, not with each try."""

from __future__ import annotations

from collections.abc import Callable


def _warn(line: str) -> None:
    print(f"tfdist: warning: {line}", flush=True)


class ToldOnce:
    """Tells the first of a row of failures.

    Args:
        tell: is given its line.
    """

    def __init__(self, tell: Callable[[str], None] = _warn):
        self._tell = tell
        self._is_told = False

    def failed(self, line: str) -> None:
        """Tells ``line``, unless a failure since the last success was told."""
        if not self._is_told:
            self._is_told = True
            self._tell(line)

    def worked(self) -> None:
        """Ends the row: the next failure is told again."""
        self._is_told = False
