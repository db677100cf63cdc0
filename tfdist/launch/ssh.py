"""Starts a command on another host, through ssh, and ends it with the connection.

A shell of that host reads what ssh is told, so it is told the same few words each time: to read
from its standard input what to run, in which folder, and with what environment. The command and its
arguments pass through no shell, and secrets stand in no list of processes. The rest of standard
input is the guard's lifeline there: whoever ends or loses the connection ends the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launch import events, programs
from tfdist.launch.rank_output import Part, pass_on
from tfdist.launch.streams import LONGEST_LINE_BYTES, NUMBERED

# Nobody is there to answer a question; a host that is gone is noticed within 15 s.
_OPTIONS = (
    *("-x", "-T", "-oBatchMode=yes", "-oLogLevel=ERROR", "-oControlMaster=no"),
    *("-oServerAliveInterval=5", "-oServerAliveCountMax=3"),
)
# Without single quotes, "!" and "\\": all shells then read it the same way.
_RUN_WHAT_IS_SAID = (
    "import json, os, sys; "
    "order = json.loads(sys.stdin.buffer.readline() or sys.exit(1)); "
    'os.chdir(order["folder"]); '
    'environ = {**os.environ, **order["environ"]}; '
    'os.execvpe(order["command"][0], order["command"], environ)'
)
_LONGEST_REASON = 500


class OverSsh(Part):
    """The tasks of one other host.

    Args:
        host: as ssh knows it.
        ranks: of its tasks.
        command: that runs them there, and tags their lines.
        environ: what they get beside what that host gives.
    """

    def __init__(
        self, host: str, ranks: Sequence[int], command: list[str], environ: Mapping[str, str]
    ):
        self._host = host
        self._ranks = ranks
        self._told: dict[str, Any] | None = None
        self._words: deque[str] = deque(maxlen=1)
        self._has_begun = False
        guarded = [sys.executable, "-m", "tfdist.launch.cleanup", "--", *command]
        order = {"command": guarded, "folder": os.getcwd(), "environ": dict(environ)}
        ssh = programs.find("ssh", "--hosts", os.environ)
        said = shlex.join([sys.executable, "-I", "-c", _RUN_WHAT_IS_SAID])
        super().__init__(
            [ssh, *_OPTIONS, host, said],
            self._take,
            longest=2 * LONGEST_LINE_BYTES,
            stdin=subprocess.PIPE,
        )
        # It may be longer than a pipe holds, and ssh reads it only once it is connected.
        sending = (json.dumps(order).encode() + b"\n",)
        threading.Thread(target=self._send, args=sending, daemon=True).start()

    @property
    def complaint(self) -> dict[str, Any] | None:
        """What the host has told of a rank's failure, or that the host itself is lost."""
        if self._told is not None or self.code is None:
            return self._told
        self.finish_output()  # The end may be known before the last words.
        if self._told is not None or (self.code == 0 and self._has_begun):
            return self._told
        reason = self._words[-1] if self._words else f"exit code {self.code}"
        return {
            "event": "no host",
            "host": self._host,
            "ranks": list(self._ranks) if self._has_begun else [],
            "reason": events.that_fits(reason[:_LONGEST_REASON]),
            "code": self.code or 1,
        }

    def ask_to_end(self) -> None:
        if not self._has_begun:
            self._process.send_signal(signal.SIGHUP)  # It may not even be connected.
        with contextlib.suppress(OSError):  # It has ended by itself.
            self._process.stdin.close()

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # It has ended, or is asked to.
            while data:
                data = data[os.write(self._process.stdin.fileno(), data) :]

    def _take(self, fd: int, line: bytes) -> None:
        if NUMBERED.match(line):
            self._has_begun = True
            pass_on(fd, line)
            return
        text, event = events.split(line.decode(errors="replace"))
        if event is not None:
            self._told = self._told or event
        elif text.strip():
            self._words.append(re.sub(r"^ssh: ", "", text.strip()))
