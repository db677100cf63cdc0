"""Processes whose lines go on with their number before them (see ``streams``), and run together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from tfdist.launch import events
from tfdist.launch.cleanup import GIVE_UP_S, TERM_GRACE_S
from tfdist.launch.streams import LONGEST_LINE_BYTES

_writing = threading.Lock()
_TICK_S = 0.05
# Exit codes above it are signals.
_KILLED = 128


def tell(event: dict) -> None:
    """Emits an event of the launcher's own, between the lines of the processes."""
    with _writing:
        events.emit(event)


def pass_on(fd: int, line: bytes) -> None:
    """Writes a line, in one piece among those of other processes; its end need not be there."""
    data = line if line.endswith(b"\n") else line + b"\n"
    with _writing, contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(fd, data) :]


class Part:
    """A process of a job that ends as a whole: a rank's guard, or what starts several elsewhere.

    Args:
        command: its argument list.
        take: called with 1 (stdout) or 2 (stderr) and each line, in threads.
        longest: bytes of a line; longer ones come in parts.
        how: of ``subprocess.Popen``.
    """

    def __init__(
        self,
        command: list[str],
        take: Callable[[int, bytes], None],
        longest: int = LONGEST_LINE_BYTES,
        **how: Any,
    ):
        self._process = process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how
        )

        def read(pipe: IO[bytes], fd: int) -> None:
            for line in iter(lambda: pipe.readline(longest), b""):
                take(fd, line)

        pipes = ((process.stdout, 1), (process.stderr, 2))
        self._readers = [threading.Thread(target=read, args=each, daemon=True) for each in pipes]
        for reader in self._readers:
            reader.start()

    @property
    def code(self) -> int | None:
        """The exit code (128 + n for signal n); None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def complaint(self) -> dict[str, Any] | None:
        """The event that tells of its failure, with the exit code; None without one."""
        raise NotImplementedError

    def ask_to_end(self) -> None:
        """Asks it to end all that is below it; returns at once."""
        raise NotImplementedError

    def end(self) -> None:
        """Waits for what has been asked to end, and kills it if that takes too long."""
        try:
            self._process.wait(TERM_GRACE_S + GIVE_UP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def finish_output(self) -> None:
        """Waits until all its lines have been taken."""
        for reader in self._readers:
            reader.join(GIVE_UP_S)


class TaggedProcess(Part):
    """One rank's guard, and through it the rank.

    Args:
        number: that its lines are tagged with.
        pass_fds: file descriptors that the process gets too.
        may_be_lost: whether others can do without it, should it be killed.
    """

    def __init__(
        self,
        command: list[str],
        env: Mapping[str, str],
        number: int,
        pass_fds: Sequence[int] = (),
        may_be_lost: bool = False,
    ):
        self.number = number
        self._may_be_lost = may_be_lost
        tags = {1: f"[{number}]<stdout>:".encode(), 2: f"[{number}]<stderr>:".encode()}
        super().__init__(
            command,
            lambda fd, line: pass_on(fd, tags[fd] + line),
            env=env,
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
        )

    @property
    def complaint(self) -> dict[str, Any] | None:
        code = self.code
        if not code or (self._may_be_lost and code > _KILLED):
            return None
        return {"event": "failed", "rank": self.number, "code": code}

    def ask_to_end(self) -> None:
        self._process.send_signal(signal.SIGHUP)
        self._process.send_signal(signal.SIGCONT)  # A stopped process takes no other signal.


def asked_to_end() -> threading.Event:
    """Returns what SIGHUP and SIGINT set from now on."""
    asked = threading.Event()
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    return asked


def run_together(parts: Sequence[Part], asked: threading.Event) -> int:
    """Waits until all have ended; the first that fails is told, and ends all. Returns its code."""
    complaint = None
    while complaint is None and any(p.code is None for p in parts) and not asked.wait(_TICK_S):
        complaint = next(filter(None, (part.complaint for part in parts)), None)
    # The last ones may have ended since they were looked at.
    complaint = complaint or next(filter(None, (part.complaint for part in parts)), None)
    for part in parts:
        part.ask_to_end()
    for part in parts:
        part.end()
        part.finish_output()
    if complaint is None:
        return 128 + signal.SIGTERM if asked.is_set() else 0
    tell(complaint)
    return complaint["code"]
