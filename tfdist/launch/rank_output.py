"""Processes whose lines go on with their number before them (see ``streams``), and run together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Protocol

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


def read_lines(
    process: subprocess.Popen,
    take: Callable[[int, bytes], None],
    longest: int = LONGEST_LINE_BYTES,
) -> list[threading.Thread]:
    """Calls ``take`` with 1 (stdout) or 2 (stderr) and each line of a process, in threads.

    Lines of more than ``longest`` bytes come in parts.
    """

    def read(pipe: IO[bytes], fd: int) -> None:
        for line in iter(lambda: pipe.readline(longest), b""):
            take(fd, line)

    pipes = ((process.stdout, 1), (process.stderr, 2))
    readers = [threading.Thread(target=read, args=each, daemon=True) for each in pipes]
    for reader in readers:
        reader.start()
    return readers


def exit_code(process: subprocess.Popen) -> int | None:
    """Returns the exit code (128 + n for signal n); None while the process runs."""
    code = process.poll()
    return code if code is None or code >= 0 else 128 - code


def await_end(process: subprocess.Popen) -> None:
    """Waits for a process that has been asked to end, and kills it if that takes too long."""
    try:
        process.wait(TERM_GRACE_S + GIVE_UP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def await_readers(readers: Sequence[threading.Thread]) -> None:
    """Waits until all lines of ``read_lines`` have been taken."""
    for reader in readers:
        reader.join(GIVE_UP_S)


class TaggedProcess:
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
        self._process = subprocess.Popen(
            command,
            env=env,
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        tags = {1: f"[{number}]<stdout>:".encode(), 2: f"[{number}]<stderr>:".encode()}
        self._readers = read_lines(self._process, lambda fd, line: pass_on(fd, tags[fd] + line))

    @property
    def code(self) -> int | None:
        """The exit code (128 + n for signal n); None while it runs."""
        return exit_code(self._process)

    @property
    def complaint(self) -> dict[str, Any] | None:
        """The event that tells of its failure, with the exit code; None without one."""
        code = self.code
        if not code or (self._may_be_lost and code > _KILLED):
            return None
        return {"event": "failed", "rank": self.number, "code": code}

    def ask_to_end(self) -> None:
        """Asks the guard to end all that is below it; returns at once."""
        self._process.send_signal(signal.SIGHUP)
        self._process.send_signal(signal.SIGCONT)  # A stopped process takes no other signal.

    def end(self) -> None:
        """Ends it."""
        self.ask_to_end()
        await_end(self._process)

    def finish_output(self) -> None:
        """Waits until all its lines have gone on."""
        await_readers(self._readers)


class Part(Protocol):
    """A ``TaggedProcess``, or what starts several elsewhere."""

    @property
    def code(self) -> int | None: ...
    @property
    def complaint(self) -> dict[str, Any] | None: ...
    def ask_to_end(self) -> None: ...
    def end(self) -> None: ...
    def finish_output(self) -> None: ...


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
