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


def emit(event: dict) -> None:
    """Tells the supervisor of this process something, if there is one.

    Args:
        event: JSON-able, with a string "event" that names it, such as
            ``{"event": "progress", "epoch": 0, "step": 12}``. At most 4 kB. With ``"long": True``
            the silence after it may be longer: see ``Job.stall_timeout_s``.
    """
    if os.environ.get(VARIABLE) != "1":
        return
    line = f"{MARK}{json.dumps(event)}\n".encode()
    assert len(line) <= _ATOMIC_BYTES, f"an event of {len(line)} bytes: {event['event']}"
    # The file descriptor, not sys.stdout: a notebook or a test may have replaced that object.
    os.write(1, line)


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
