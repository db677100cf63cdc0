"""Reads from a launcher's own words which rank failed first, and how."""

from __future__ import annotations

import contextlib
import re
import signal
from dataclasses import dataclass

from tfdist.errors import LaunchError
from tfdist.launch import events


@dataclass(frozen=True)
class Failure:
    """The first rank that failed, and its exit code (128 + n for signal n; None when not told)."""

    rank: int
    exit_code: int | None


def _unreachable(host: str, reason: str) -> LaunchError:
    return LaunchError(
        "every host of a job must be reachable by ssh",
        received=f"{host}, of which ssh says: {reason}",
        mend="Check the names in --hosts, that ssh asks for no password, and that the hosts "
        "share this one's paths",
    )


def _lost(host: str, reason: str) -> LaunchError:
    return LaunchError(
        "every host of a job must stay until its end",
        received=f"the loss of {host}{reason}",
        mend="Look at that host and its network; --max-restarts starts all again",
    )


class PlainVerdict:
    """A single process: its own exit code says it all."""

    first_failure: Failure | None = None
    #: Tells of a host that ssh could not reach, or that is lost.
    no_host: LaunchError | None = None

    def take(self, line: str) -> list[str]:
        """Takes one line of the launcher's own; returns the lines that a user should see."""
        return [line]

    def close(self) -> list[str]:
        """Returns the lines of a message that was cut off."""
        return []


class MpiVerdict(PlainVerdict):
    """Open MPI frames each message in lines of dashes; those that tell of an end stop here."""

    _ENDS = (
        (re.compile(r"Process name: \[\[\d+,\d+\],(\d+)\] Exit code: (\d+)"), 0),
        (re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)"), 128),
        (re.compile(r"MPI_ABORT was invoked on rank (\d+) .* with errorcode (\d+)"), 0),
        (re.compile(r"process rank (\d+) with PID \d+ on node \S+ exiting improperly()"), 0),
    )
    # ssh's own words, and what mpirun says of it in twenty lines.
    _NO_HOST = re.compile(
        r"^(?:ssh: (?:Could not resolve hostname|connect to host) (\S+?)[: ]|"
        r"(?:\S+@)?([^\s:@]+): (?=Permission denied \()|(?=Host key verification failed))(.*)"
    )
    _NO_DAEMON = "ORTE was unable to reliably start one or more daemons"
    _LOST = re.compile(r"ORTE has lost communication .* Remote daemon: \S+ on node (\S+)")
    # Says no more than the message that follows it.
    _PREAMBLE = "Primary job terminated normally, but"

    def __init__(self) -> None:
        self._block: list[str] | None = None

    def take(self, line: str) -> list[str]:
        if found := self._NO_HOST.match(line):
            self.no_host = self.no_host or _unreachable(
                found[1] or found[2] or "one", found[3].strip(": ")
            )
            return []
        if not line.startswith("-----"):
            if self._block is None:
                return [line] if line.strip() else []
            self._block.append(line)
            return []
        block, self._block = self._block, [] if self._block is None else None
        return [] if block is None or self._understood(" ".join(" ".join(block).split())) else block

    def close(self) -> list[str]:
        block, self._block = self._block, None
        return block or []

    def _understood(self, message: str) -> bool:
        for pattern, base in self._ENDS:
            if found := pattern.search(message):
                code = base + int(found[2]) if found[2] else None
                self.first_failure = self.first_failure or Failure(int(found[1]), code)
                return True
        if found := self._LOST.search(message):
            self.no_host = self.no_host or _lost(found[1], ", which no longer answers")
            return True
        is_known = self.no_host is not None and message.startswith(self._NO_DAEMON)
        return is_known or message.startswith(self._PREAMBLE)


class GlooVerdict(PlainVerdict):
    """horovodrun ends in a traceback that carries the first failure; the rest of it is noise."""

    _PROCESS = re.compile(r"^Process name: (\d+)$")
    _CODE = re.compile(r"^Exit code: (\d+)$")

    def take(self, line: str) -> list[str]:
        """None of its own lines is for a user whose rank failed."""
        if found := self._PROCESS.match(line):
            self.first_failure = Failure(int(found[1]), None)
        elif self.first_failure and (found := self._CODE.match(line)):
            self.first_failure = Failure(self.first_failure.rank, int(found[1]))
        return []


class ElasticVerdict(PlainVerdict):
    """The driver of an elastic job tells of losses in events; its words are for developers."""

    def take(self, line: str) -> list[str]:
        return []


class TogetherVerdict(PlainVerdict):
    """tfdist's own launcher tells in an event which rank failed first, or which host is lost."""

    def take(self, line: str) -> list[str]:
        _, event = events.split(line)
        if event is None:
            return [line] if line.strip() else []
        if event["event"] == "failed":
            self.first_failure = Failure(event["rank"], event["code"])
        elif event["event"] == "no host" and not event["ranks"]:
            self.no_host = _unreachable(event["host"], event["reason"])
        elif event["event"] == "no host":
            ranks = ", ".join(map(str, event["ranks"]))
            self.no_host = _lost(
                event["host"], f" with its ranks {ranks}, of which ssh says: {event['reason']}"
            )
        return []


VERDICTS = {
    "mpi": MpiVerdict,
    "gloo": GlooVerdict,
    "elastic": ElasticVerdict,
    "together": TogetherVerdict,
    "none": PlainVerdict,
}


def ending(exit_code: int) -> str:
    """Returns an exit code in words, with the name of the signal that it stands for."""
    if exit_code > 128:
        with contextlib.suppress(ValueError):
            return f"exit code {exit_code} ({signal.Signals(exit_code - 128).name})"
    return f"exit code {exit_code}"
