"""Takes in new versions of a model, while that before them answers."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tfdist.errors import LaunchError, notice
from tfdist.records.writing.instances import Limits, records_of
from tfdist.serving import answers, gate, watched
from tfdist.serving.served import Served
from tfdist.serving.server import Server
from tfdist.serving.versions import Version

_LOOK_S = 1.0
_POLL_S = 0.1


class Follower:
    """Has a server answer with the newest version of a file.

    Args:
        server: it.
        served: the first version.
        file: what is watched.
        folder: that of ``gate.prepare``; None: there is nothing to compare.
    """

    def __init__(self, server: Server, served: Served, file: watched.Watched, folder: Path | None):
        self._server, self._served, self._file, self._folder = server, served, file, folder
        self._numbers, self._stop = itertools.count(2), threading.Event()

    async def run(self) -> None:
        """Takes in one version after the other."""
        try:
            while True:
                await asyncio.sleep(_LOOK_S)
                file = await asyncio.to_thread(self._file.look)
                if file is not None:
                    await self._take_in(file)
        finally:
            self._stop.set()

    async def _take_in(self, file: Path) -> None:
        server = self._server
        number = next(self._numbers)
        weights = watched.place_of(self._served.weights.parents[1], number, file)
        version = server.begin(number, replace(self._served, file=file, weights=weights))
        try:
            exam = await asyncio.to_thread(self._prepared, version)
            await _has(version, lambda: 1)
            if exam is not None:
                await self._examine(version, exam)
            await _has(version, lambda: server.wanted)
        except Exception as error:  # Whatever it is, what is current can still be served.
            why = version.served.told(error)
            server.versions.refuse(version, why)
            stays = server.versions.current.number
            notice(f"version {number} is not served, version {stays} stays: {why}")
        else:
            server.switch(version)
            compared = f": {len(exam.instances)} records are answered as by tfdist predict"
            notice(f"version {number} is served{compared if exam else ''}")

    def _prepared(self, version: Version) -> gate.Exam | None:
        self._file.copy(version.served.file, version.served.weights)
        if self._folder is None:
            return None
        expected = version.served.weights.parent / watched.EXPECTED
        try:
            gate.expect(version.served, self._folder, expected, self._stop)
        except SystemExit:  # The server ends: nobody waits for this any more.
            return None
        return gate.Exam(self._folder, expected)

    async def _examine(self, version: Version, exam: gate.Exam) -> None:
        for number, instance in enumerate(exam.instances):
            records = records_of(self._served.schema, [instance], Limits())
            found = await self._server.ask(records, version)
            if isinstance(found, str):
                raise gate.differs(exam.place(number), found)
            exam.check(number, answers.encode(found))


async def _has(version: Version, count: Callable[[], int]) -> None:
    """Waits until a version has so many replicas. Raises LaunchError: they cannot start."""
    while version.replicas < count():
        version.wanted = count()
        if not version.fleet.may_start:
            raise LaunchError(
                "each replica of a new version must start",
                received="that they ended, or were too slow",
                mend="Read what they said above; twice the replicas need twice the memory",
            )
        await asyncio.sleep(_POLL_S)
