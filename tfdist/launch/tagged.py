"""Processes whose lines go on with their number before them: see ``streams``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launch import events
from tfdist.launch.guard import GIVE_UP_S, TERM_GRACE_S
from tfdist.launch.streams import LONGEST_LINE_BYTES

_writing = threading.Lock()


def tell(event: dict) -> None:
    """Emits an event of the launcher's own, between the lines of the processes."""
    with _writing:
        events.emit(event)


class TaggedProcess:
    """One rank's guard, and through it the rank.

    Args:
        number: that its lines are tagged with.
        pass_fds: file descriptors that the process gets too.
    """

    def __init__(
        self,
        command: list[str],
        env: Mapping[str, str],
        number: int,
        pass_fds: Sequence[int] = (),
    ):
        self.number = number
        self._process = subprocess.Popen(
            command,
            env=env,
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        pipes = [(self._process.stdout, 1, "stdout"), (self._process.stderr, 2, "stderr")]
        self._readers = [
            threading.Thread(
                target=_forward, args=(pipe, fd, f"[{number}]<{stream}>:".encode()), daemon=True
            )
            for pipe, fd, stream in pipes
        ]
        for reader in self._readers:
            reader.start()

    @property
    def code(self) -> int | None:
        """The exit code (128 + n for signal n); None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def ask_to_end(self) -> None:
        """Asks the guard to end all that is below it; returns at once."""
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)  # A stopped process takes no other signal.

    def end(self) -> None:
        """Ends it."""
        self.ask_to_end()
        try:
            self._process.wait(TERM_GRACE_S + GIVE_UP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def finish_output(self) -> None:
        """Waits until all its lines have gone on."""
        for reader in self._readers:
            reader.join(GIVE_UP_S)


def _forward(pipe: Any, fd: int, tag: bytes) -> None:
    for line in iter(lambda: pipe.readline(LONGEST_LINE_BYTES), b""):
        ending = b"" if line.endswith(b"\n") else b"\n"
        with _writing, contextlib.suppress(BrokenPipeError):
            data = tag + line + ending
            while data:
                data = data[os.write(fd, data) :]
