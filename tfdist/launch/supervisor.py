"""Runs one job (a launcher with its ranks, or one process), watches its deadlines, and ends it all.

Nothing of the job outlives ``run``: not after an error of ours, Ctrl-C, SIGTERM, nor a SIGKILL of
this process (the guard sees to that).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tfdist.errors import LaunchError, SilentError
from tfdist.launch import events
from tfdist.launch.cleanup import TERM_GRACE_S
from tfdist.launch.failure import VERDICTS, ending
from tfdist.launch.membership import Elasticity, Membership
from tfdist.launch.scratch import Scratch
from tfdist.launch.starvation import Starvation
from tfdist.launch.streams import Line, LineSorter

if TYPE_CHECKING:
    import psutil

_LAUNCHERS = {"mpi": "mpirun", "gloo": "horovodrun", "together": "tfdist.launch"}
_LAST_LINES = 20
_TICK_S = 0.2
# Between two looks at the processes of a job that says nothing.
_LOOK_S = 1.0
_OF_ALL = -1
# Open MPI's and Horovod's own.
_PROGRAMS = {"mpirun", "orterun", "orted", "horovodrun"}
# After its grace the guard only kills; a guard that takes longer than this is ended itself.
_GUARD_TIMEOUT_S = TERM_GRACE_S + 5.0
# After SIGTERM, for steps in progress and for a checkpoint: Kubernetes kills after 30 s, Docker
# after 10, SageMaker after 120. A rank that tells that it writes has more.
_LAST_CALL_S = 20.0
# Whoever signals all processes of a job does so once.
_SAME_CALL_S = 1.0
_WRITING_S = 110.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command that starts ``world_size`` ranks.

    Attributes:
        command: the argument list.
        env: the whole environment of the command.
        world_size: number of ranks, >= 1.
        tags: how the output names its rank: see ``LineSorter``.
        first_rank: the lowest rank; above 0 for a single process among others of another launcher.
        start_timeout_s: seconds until every rank must have shown a sign of life.
        stall_timeout_s: longest silence between two events of the job; None for no limit. After an
            event that says so (``"long": True``: imports, the first step, the writing of a
            checkpoint) ``start_timeout_s`` is added.
        elasticity: of a job that goes on when ranks are lost; None where each is needed.
        is_local: whether its ranks have nobody to talk to on other machines.
        stop: what another thread sets to have it ended, as Ctrl-C reaches the main thread alone.
    """

    command: list[str]
    env: dict[str, str]
    world_size: int
    tags: str = "none"
    first_rank: int = 0
    start_timeout_s: float = 120.0
    stall_timeout_s: float | None = None
    elasticity: Elasticity | None = None
    is_local: bool = False
    stop: threading.Event | None = None


@dataclass
class Outcome:
    """How a job ended by itself.

    Attributes:
        exit_code: 0, or the code of the rank that failed first (128 + n for signal n).
        failed_rank: that rank; None when all is well, or when the launcher itself failed.
        last_lines: the last lines of that rank, or else of the launcher; stdout and stderr.
        reason: one sentence.
    """

    exit_code: int
    failed_rank: int | None = None
    last_lines: list[str] = field(default_factory=list)
    reason: str = "every rank ended with exit code 0"


def run(
    job: Job,
    *,
    on_line: Callable[[int | None, str, str], None],
    on_event: Callable[[int, dict], None] | None = None,
) -> Outcome:
    """Runs a job to its end.

    Args:
        job: what to run.
        on_line: called with (rank, "stdout" or "stderr", text) for each line of output; the rank is
            None for the launcher's own words.
        on_event: called with (rank, event) for each event that a rank emits. An elastic job tells
            of its own changes as rank 0: {"event": "world", "ranks": ...} and "lost".

    Raises:
        LaunchError: a rank did not start in time, the job fell silent, or too few workers of an
            elastic job are left. All of it has been ended.
        KeyboardInterrupt: Ctrl-C. All of it has been ended.
        SystemExit: with code 143, on SIGTERM, when ranks that keep checkpoints have had the time
            for one; or by ``Job.stop``. All of it has been ended.
    """
    watch = _Watch(job, on_line, on_event or (lambda rank, event: None))
    try:
        with _taking_sigterm(watch), _guarded(job) as guard:
            watch.pump(guard)
            code = guard.wait(timeout=_GUARD_TIMEOUT_S)
            outcome = None if watch.is_last_call else watch.outcome(code)
    except LaunchError:
        if not watch.is_last_call:
            raise
    if watch.is_last_call:
        sys.exit(128 + signal.SIGTERM)
    return outcome


class _Watch:
    """What is known of a running job."""

    def __init__(self, job: Job, on_line: Callable, on_event: Callable):
        self._job = job
        self._on_line = on_line
        self._on_event = on_event
        self._sorter = LineSorter(job.tags, job.first_rank)
        self._verdict = VERDICTS[job.tags]()
        self._last: dict[int | None, deque[str]] = {}
        self._started_at = time.monotonic()
        self._alive: set[int] = set()
        self._heard_at: dict[int, float] = {}
        elastic = job.elasticity
        self._membership = Membership(elastic, job.start_timeout_s) if elastic else None
        self._last_event: dict[int, dict] = {}
        self._last_step: dict[int, dict] = {}
        self._started: dict[int, dict] = {}
        self._looked_at = self._output_at = self._started_at
        self._starved: dict[int, Starvation] = defaultdict(Starvation)
        self._forgiven: dict[int, float] = defaultdict(float)
        #: Rank -> for how many seconds it has been seen to be stopped.
        self._stopped_s: dict[int, float] = {}
        self._called_at: float | None = None
        self._is_call_told = False

    @property
    def is_last_call(self) -> bool:
        """Whether the ranks have been asked to write what they keep, and to end."""
        return self._called_at is not None

    def call(self) -> None:
        """Passes SIGTERM on to the ranks of this host.

        Raises:
            SystemExit: none of them can do anything with it, or it comes once more.
        """
        heard = False
        now = time.monotonic()
        if self._called_at is not None and now - self._called_at < _SAME_CALL_S:
            return
        if self._called_at is None and self._membership is None:
            self._called_at = now
            for own in self._started.values():
                if own["host"] == os.uname().nodename:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(own["pid"], signal.SIGTERM)
                        heard = True
        if not heard:
            sys.exit(128 + signal.SIGTERM)

    def pump(self, guard: subprocess.Popen) -> None:
        """Passes on the output until the job has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(guard.stdout, selectors.EVENT_READ, "stdout")
            selector.register(guard.stderr, selectors.EVENT_READ, "stderr")
            while selector.get_map():
                ready = selector.select(_TICK_S)
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    if data:
                        self._output_at = time.monotonic()
                        self._take(self._sorter.feed(key.data, data))
                    else:
                        selector.unregister(key.fileobj)
                if not ready and guard.poll() is not None:
                    break  # a process that the guard could not end may hold the pipes open
                if self._job.stop is not None and self._job.stop.is_set():
                    sys.exit(128 + signal.SIGTERM)
                self._look(guard.pid)
                self._check_deadlines()
                self._check_last_call()
        self._take(self._sorter.close())
        for text in self._verdict.close():
            self._on_line(None, "stderr", text)

    def outcome(self, exit_code: int) -> Outcome:
        failure = self._verdict.first_failure
        if self._membership is not None:
            failure = self._membership.first_failure
        if exit_code == 0:
            if failure is not None:  # The others had no more need of it.
                self._on_line(None, "stderr", f"tfdist: {self._membership.losses}")
            return Outcome(0)
        if exit_code < 0:  # The guard was killed.
            exit_code = 128 - exit_code
        if failure is None and self._verdict.no_host is not None:
            raise self._verdict.no_host
        if failure is None and self._job.tags == "none":
            return self._failed(self._job.first_rank, exit_code)
        if failure is None:
            name = _LAUNCHERS.get(self._job.tags, os.path.basename(self._job.command[0]))
            lines = list(self._last.get(None, ()))
            return Outcome(exit_code, None, lines, f"{name} ended with {ending(exit_code)}")
        return self._failed(failure.rank, failure.exit_code or exit_code)

    def _failed(self, rank: int, exit_code: int) -> Outcome:
        lines = list(self._last.get(rank, ()))
        return Outcome(exit_code, rank, lines, f"rank {rank} ended with {ending(exit_code)}")

    def _take(self, lines: Iterator[Line]) -> None:
        for rank, stream, line in lines:
            text, event = events.split(line)
            if self._membership is not None and event is not None:
                if self._membership.concerns(event):
                    self._take_change(event)
                    continue
                self._membership.note_step(rank, event)
            if rank is None:
                if event is None and line.strip(" -"):
                    self._remember(None, line)
                for text in self._verdict.take(line):
                    self._on_line(None, stream, text)
                continue
            self._alive.add(rank)
            self._stopped_s.pop(rank, None)
            if event is None:
                self._remember(rank, line)
                self._on_line(rank, stream, line)
                continue
            if text:
                self._sorter.push_back(rank, stream, text)
            if event["event"] == "serving":  # Its silence from now on tells nothing.
                self._heard_at.pop(rank, None)
            else:
                self._heard_at[rank] = time.monotonic()
                self._starved.pop(rank, None)
                self._forgiven[rank] = 0.0
            self._last_event[rank] = event
            if "step" in event:
                self._last_step[rank] = event
            if event["event"] == "started":
                self._started[rank] = event
            if self._membership is not None:
                rank = self._membership.rank_of(rank)
            self._on_event(rank, event)

    def _check_last_call(self) -> None:
        """Raises:
        SystemExit: the ranks have had their time, and are not about to write.
        """
        if self._called_at is not None:
            if not self._is_call_told:
                self._is_call_told = True
                given = f"{_LAST_CALL_S:.0f} s"
                text = f"tfdist: SIGTERM; the ranks have {given} to write what they keep"
                self._on_line(None, "stderr", text)
            is_writing = any(event["event"] == "writing" for event in self._last_event.values())
            seconds = _WRITING_S if is_writing else _LAST_CALL_S
            if time.monotonic() - self._called_at > seconds:
                sys.exit(128 + signal.SIGTERM)

    def _take_change(self, event: dict) -> None:
        news = self._membership.take(event)
        if news is not None:
            self._on_line(None, "stderr", f"tfdist: {news}")
        # Those that have left are silent for good; those that meet anew report no step.
        now = time.monotonic()
        self._forgiven.clear()
        self._stopped_s.clear()
        self._heard_at = {r: now for r in self._heard_at if self._membership.is_member(r)}
        self._on_event(0, event)

    def _remember(self, rank: int | None, line: str) -> None:
        self._last.setdefault(rank, deque(maxlen=_LAST_LINES)).append(line)

    def _look(self, guard: int) -> None:
        """Looks for ranks that are stopped, and where all are silent at what keeps them."""
        now = time.monotonic()
        passed = now - self._looked_at
        if passed < _LOOK_S:
            return
        self._looked_at = now
        paused = max(0.0, passed - 2 * _LOOK_S)
        stopped = self._stopped(r for r, at in self._heard_at.items() if now - at > _LOOK_S)
        self._stopped_s = {
            rank: self._stopped_s.get(rank, 0.0) + passed - paused for rank in stopped
        }
        if now - self._output_at >= _LOOK_S:
            self._wake(guard)
            self._forgive(guard, now, passed, paused)

    def _forgive(self, guard: int, now: float, passed: float, paused: float) -> None:
        """Does not count as silence what is none of the ranks' own doing.

        That is when they wanted a core and others had it, and when this process did not run. The
        processes between it and the ranks have been woken, should somebody have stopped them.
        """
        lost = paused + min(passed - paused, self._starved[_OF_ALL].since_last([guard]))
        if len(self._alive) < self._job.world_size:
            self._started_at += lost
        if self._membership is not None:
            self._membership.forgive(lost)
        for rank, at in self._heard_at.items():
            own = self._started.get(rank, {})
            if own.get("host") == os.uname().nodename:
                waited = self._starved[rank].since_last([own["pid"]])
                self._forgiven[rank] += min(now - at, paused + min(passed - paused, waited))

    def _wake(self, guard: int) -> None:
        import psutil

        with contextlib.suppress(psutil.Error):
            own = psutil.Process(guard)
            for process in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    if process.status() == psutil.STATUS_STOPPED and _is_launchers(process):
                        process.send_signal(signal.SIGCONT)
                        text = f"tfdist: process {process.pid} of the launcher was stopped; woken"
                        self._on_line(None, "stderr", text)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        first = self._job.first_rank
        missing = sorted(set(range(first, first + self._job.world_size)) - self._alive)
        if missing and now - self._started_at > self._job.start_timeout_s:
            raise LaunchError(
                f"every rank must start within {self._job.start_timeout_s:g} s",
                received=f"no sign of life from {_ranks(missing)} of {self._job.world_size}"
                + _quoted(self._last.get(None)),
                mend="Check that the hosts can be reached, or raise --start-timeout",
            )
        if self._membership is not None:
            self._membership.check_deadline()
        if self._job.stall_timeout_s is not None and self._heard_at:
            limits = {rank: self._patience(rank) for rank in self._heard_at}
            silent = {r: now - at - self._forgiven[r] for r, at in self._heard_at.items()}
            # The others of a rank that is stopped may poll, or have much to say, for ever.
            over = any(s > limits[rank] for rank, s in self._stopped_s.items())
            if over or all(seconds > limits[rank] for rank, seconds in silent.items()):
                raise self._stalled(now, min(limits.values()))

    def _patience(self, rank: int) -> float:
        """Returns how long a rank may be silent after its last event, in seconds."""
        more = self._job.start_timeout_s if self._last_event[rank].get("long") else 0.0
        return self._job.stall_timeout_s + more

    def _stalled(self, now: float, limit: float) -> SilentError:
        stopped = self._stopped(self._started)
        oldest = min(self._heard_at[rank] for rank in self._stopped_s or self._heard_at)
        # Ranks work in step: those that fell silent first hold the others up.
        first = stopped or sorted(
            rank for rank, at in self._heard_at.items() if at - oldest < 2 * _TICK_S
        )
        silence = "silence" if stopped else "silence, first"
        return SilentError(
            f"a running job must report progress at least every {limit:g} s",
            received=f"{silence} of {_ranks(first)}, {now - oldest:.0f} s ago: "
            + self._place(first[0])
            + (", and is stopped (SIGSTOP)" if stopped else "")
            + _quoted(self._last.get(first[0])),
            mend="Look for a rank that waits for data or for another rank, "
            "or raise the stall timeout",
        )

    def _place(self, rank: int) -> str:
        """Returns where a rank was last heard of: host, epoch and step, and its last event."""
        host = self._started.get(rank, {}).get("host")
        place = f"rank {rank}{f' on {host}' if host else ''} was last heard of"
        if event := self._last_step.get(rank):
            step = "validation" if event["step"] is None else f"step {event['step']}"
            epoch = f"epoch {event['epoch'] + 1}, " if "epoch" in event else ""
            place += f" in {epoch}{step}"
        return f"{place} ({self._last_event[rank]['event']})"

    def _stopped(self, ranks: Iterable[int]) -> list[int]:
        """Returns those of the ranks on this host one of whose processes is stopped."""
        import psutil  # here, because few jobs stall

        found = []
        for rank in sorted(ranks):
            started = self._started.get(rank, {})
            if started.get("host") != os.uname().nodename:
                continue
            with contextlib.suppress(psutil.Error):
                own = psutil.Process(started["pid"])
                if any(
                    process.status() == psutil.STATUS_STOPPED and not _is_launchers(process)
                    for process in (own, *own.children(recursive=True))
                ):
                    found.append(rank)
        return found


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _quoted(lines: deque[str] | None) -> str:
    return f" (last words: {lines[-1].strip()})" if lines else ""


def _is_launchers(process: psutil.Process) -> bool:
    """Whether a process is one of those between the supervisor and the ranks."""
    words = process.cmdline()
    return any(word.startswith("tfdist.launch.") for word in words[1:3]) or any(
        os.path.basename(word) in _PROGRAMS for word in words[:2]
    )


@contextlib.contextmanager
def _guarded(job: Job) -> Iterator[subprocess.Popen]:
    """Starts the job below a guard in its own session, and ends it however the block is left."""
    confined = ["--loopback"] if job.is_local else []
    own = Scratch()
    temporary = [f"--temporary={path}" for path in own.paths]
    guard = subprocess.Popen(
        [sys.executable, "-m", "tfdist.launch.cleanup", *confined, *temporary, "--", *job.command],
        env={**own.given_to(job.env, is_local=job.is_local), events.VARIABLE: "1"},
        stdin=subprocess.PIPE,  # its end tells the guard that this process has died
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        pass_fds=own.locks,
    )
    try:
        yield guard
    finally:
        try:
            _end(guard)
        finally:  # Another Ctrl-C may come meanwhile.
            own.close()  # Again, should the guard have been killed.


def _end(guard: subprocess.Popen) -> None:
    try:
        if guard.poll() is None:
            guard.send_signal(signal.SIGCONT)  # A stopped process takes no other signal.
            # Ends the lifeline. The last words must not fill a pipe and keep the job from ending.
            guard.communicate(timeout=_GUARD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if guard.poll() is None:
            _kill_tree(guard)
        for pipe in (guard.stdin, guard.stdout, guard.stderr):
            pipe.close()


def _kill_tree(guard: subprocess.Popen) -> None:
    import psutil

    for process in [*psutil.Process(guard.pid).children(recursive=True), guard]:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.kill()
    guard.wait()


@contextlib.contextmanager
def _taking_sigterm(watch: _Watch) -> Iterator[None]:
    """Has SIGTERM be the ranks' last call, or SystemExit, so that every ``finally`` runs.

    Only the main thread can.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = signal.signal(signal.SIGTERM, lambda *_: watch.call())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
