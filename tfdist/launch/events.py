"""What a rank tells its supervisor: one marked JSON line on standard output for each event.

``emit`` does nothing in a process that no supervisor started, so training code may always call it.
"""

from __future__ import annotations

import json
import os

MARK = "\x1etfdist "
VARIABLE = "TFDIST_EVENTS"

# A write of up to this many bytes into a pipe stays in one piece (PIPE_BUF).
_ATOMIC_BYTES = 4096
# What a part of a longer event may have.
_PART_BYTES = 3500
_LONGEST_TEXT = 3000


def emit(event: dict) -> None:
    """Tells the supervisor of this process something, if there is one.

    Args:
        event: JSON-able, with a string "event" that names it, such as
            ``{"event": "progress", "epoch": 0, "step": 12}``. At most 4 kB, but for
            ``emit_numbers``. With ``"long": True`` the silence after it may be longer: see
            ``Job.stall_timeout_s``.
    """
    if os.environ.get(VARIABLE) != "1":
        return
    line = f"{MARK}{json.dumps(event)}\n".encode()
    assert len(line) <= _ATOMIC_BYTES, f"an event of {len(line)} bytes: {event['event']}"
    # The file descriptor, not sys.stdout: a notebook or a test may have replaced that object.
    os.write(1, line)


def that_fits(text: str) -> str:
    """Returns what an event can say of a text: JSON has up to twelve bytes for a letter."""
    text = text[:_LONGEST_TEXT]
    while len(json.dumps(text)) > _PART_BYTES:
        text = text[: len(text) * 3 // 4]
    return text


def emit_numbers(event: dict, name: str) -> None:
    """Does as ``emit`` with a dict of any size in ``event[name]``: a long one comes in parts.

    All but the last say ``"more": True``; see ``Joined``.
    """
    left = list(event[name].items())
    while True:
        size = len(left)
        while size > 1 and len(json.dumps(event | {name: dict(left[:size])})) > _PART_BYTES:
            size = size * 3 // 4
        part, left = dict(left[:size]), left[size:]
        emit(event | {name: part} | ({"more": True} if left else {}))
        if not left:
            return


class Joined:
    """Puts the parts of events together, those of each rank by itself."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, str], dict] = {}

    def __call__(self, rank: int, event: dict) -> dict | None:
        """Returns the whole event; None where more of it is to come."""
        place = rank, event["event"]
        before = self._begun.pop(place, {})
        for name, value in event.items():
            is_begun = isinstance(value, dict) and isinstance(before.get(name), dict)
            before[name] = before[name] | value if is_begun else value
        if before.pop("more", False):
            self._begun[place] = before
            return None
        return before


def split(line: str) -> tuple[str, dict | None]:
    """Splits a line of a rank into the text before an event's mark, and the event.

    The text is what the rank had printed without an end of line when the event came.
    """
    text, mark, payload = line.partition(MARK)
    if not mark:
        return line, None
    try:
        event = json.loads(payload)
    except ValueError:
        return line, None
    return (text, event) if isinstance(event, dict) else (line, None)
