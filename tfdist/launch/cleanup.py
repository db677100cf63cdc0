"""Runs one command and leaves nothing of it behind:
``python -m tfdist.launch.cleanup [--loopback] [--temporary=FOLDER ...] -- COMMAND...``.

A process of its own above the command. The kernel hands it every descendant that loses its parent,
even one that made itself a daemon. Whichever way the command ends, the guard ends all of it, and
returns the command's exit code (128 + n for signal n).

There is one between the supervisor and its command, which reads a pipe that closes when the
supervisor dies, by SIGKILL too; and one in each rank (``tfdist.launch.rank``): mpirun would wait
for ever for the output of a daemon that outlives its rank.

SIGTERM ends neither: whoever sends it to all processes of a job wants the ranks to write a last
checkpoint, for which the supervisor gives them the time. So what stands above the ranks (mpirun,
``rank_output``) does not hear it, and is ended by SIGHUP; a rank's guard passes it on.

With ``--loopback`` nothing of the command listens on the network: see ``topology.loopback``.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

from tfdist.topology import loopback
from tfdist.topology.loopback import Loopback

# mpirun needs about two seconds to end its ranks itself, on other hosts too.
TERM_GRACE_S = 5.0
# How long processes that the command left behind may take to end by themselves.
LEFTOVER_GRACE_S = 0.5
# Nothing survives SIGKILL but a process that hangs in the kernel, or that became another user's.
GIVE_UP_S = 3.0
_POLL_S = 0.02
_TEMPORARY = "--temporary="
_ENDING = (signal.SIGHUP, signal.SIGINT)


class Guard:
    """Starts ``command``.

    Args:
        command: the argument list.
        lifeline: a file descriptor without data, whose end asks to end the command; or None.
        hears_sigterm: whether the command does; without, it is ended by SIGHUP.
        orphan_signal: what the command gets should this guard be killed.
        loopback: whether it listens on the loopback interface only.
    """

    def __init__(
        self,
        command: list[str],
        *,
        lifeline: int | None,
        hears_sigterm: bool,
        orphan_signal: int,
        loopback: bool = False,
    ):
        self._code: int | None = None
        self._lifeline = lifeline
        self._hears_sigterm = hears_sigterm
        self._wake = _wake_on_signals()
        adopt_orphans()
        confined = Loopback() if loopback else None
        self._pid = _spawn(command, hears_sigterm, orphan_signal, confined)
        if confined is not None:
            confined.serve()

    def watch(self) -> int:
        """Returns the command's exit code once nothing of it is left."""
        watched = [self._wake] if self._lifeline is None else [self._wake, self._lifeline]
        while self._code is None:
            readable, _, _ = select.select(watched, [], [])
            arrived = os.read(self._wake, 64) if self._wake in readable else b""
            asked = [number for number in _ENDING if number in arrived]
            self._reap()
            if self._code is None and (asked or self._lifeline in readable):
                os.kill(self._pid, signal.SIGTERM if self._hears_sigterm else signal.SIGHUP)
                os.kill(self._pid, signal.SIGCONT)  # A stopped process takes no other signal.
                self._wait_for_command(TERM_GRACE_S)
                self._end_leftovers(grace_s=0.0)
                return 128 + (asked[0] if asked else signal.SIGTERM)
            if self._code is None and self._hears_sigterm and signal.SIGTERM in arrived:
                os.kill(self._pid, signal.SIGTERM)
        self._end_leftovers(grace_s=LEFTOVER_GRACE_S)
        return self._code

    def _wait_for_command(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._reap() and self._code is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _end_leftovers(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        while self._reap() and time.monotonic() < deadline + GIVE_UP_S:
            if time.monotonic() >= deadline:
                _kill_descendants()
            time.sleep(_POLL_S)

    def _reap(self) -> bool:
        """Collects what has ended; whether any descendant is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._pid:
                code = os.waitstatus_to_exitcode(status)
                self._code = code if code >= 0 else 128 - code


def _wake_on_signals() -> int:
    """A file descriptor that receives the number of each signal as one byte."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (*_ENDING, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # Of a launcher, which has it so.
    return reader


def _spawn(
    command: list[str], hears_sigterm: bool, orphan_signal: int, confined: Loopback | None
) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(orphan_signal)
        if not hears_sigterm:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if confined is not None:
            loopback.enter(confined.child_fd)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"tfdist: cannot run '{command[0]}': {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _kill_descendants() -> None:
    import psutil  # here, because most jobs leave nothing behind and never pay for it

    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.Error:
            continue


# The two requests to the Linux kernel that keep processes from outliving their job.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signal_number: int) -> None:
    """Sends this process a signal when its parent dies, however that dies; survives exec."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    split = sys.argv.index("--")
    options, command = sys.argv[1:split], sys.argv[split + 1 :]
    guard = Guard(
        command,
        lifeline=0,
        hears_sigterm=False,
        orphan_signal=signal.SIGHUP,  # So that mpirun can still end its ranks.
        loopback="--loopback" in options,
    )
    code = guard.watch()
    temporary = [option.removeprefix(_TEMPORARY) for option in options if _TEMPORARY in option]
    if temporary:
        from tfdist.launch import scratch

        scratch.remove(temporary)
    sys.exit(code)
