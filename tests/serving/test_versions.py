"""Versions by numbers, without processes: what is told of them, and who gets which request."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest
from litserve.utils import LitAPIStatus, WorkerSetupStatus

from tfdist.serving.fleet import Fleet
from tfdist.serving.queues import Requests
from tfdist.serving.replica import Replica
from tfdist.serving.scaling import Scaling
from tfdist.serving.server import Server
from tfdist.serving.versions import Pending, Version, Versions


class _Process:
    """A replica that answers until it is told its end."""

    exitcode = -9

    def __init__(self):
        self.is_over = False

    def is_alive(self) -> bool:
        return not self.is_over


def _version(number: int, numbers: itertools.count, tmp_path) -> Version:
    """Returns one with a replica that is ready."""
    queue = Requests()

    def launch(number: int, _: object) -> _Process:
        queue.begin(number)
        return _Process()

    fleet = Fleet(
        *(launch, lambda _: WorkerSetupStatus.READY, numbers, 100),
        leave_timeout_s=100,
    )
    weights = tmp_path / f"copy-{number}"
    weights.touch()
    served = SimpleNamespace(weights=weights, file=tmp_path / "best.keras")
    version = Version(number, served, queue, fleet)
    fleet.start(1)
    version.look()
    return version


@pytest.fixture
def two(tmp_path) -> list[Version]:
    numbers = itertools.count()
    return [_version(number, numbers, tmp_path) for number in (1, 2)]


def _told(versions: Versions, number: int | None = None) -> list[tuple[str, str, str]]:
    status = versions.status(number)
    return [(one["version"], one["state"], one["status"]["error_code"]) for one in status]


def _end(version: Version) -> None:
    for member in version.fleet.ready():
        member.process.is_over = True


def test_a_version_is_served_until_the_next_one_is_and_it_has_answered(two):
    versions, (first, second) = Versions(), two
    versions.present.append(first)
    versions.switch(first)
    assert _told(versions) == [("1", "AVAILABLE", "OK")]
    versions.present.append(second)
    assert _told(versions) == [("2", "LOADING", "OK"), ("1", "AVAILABLE", "OK")]
    first.pending["one"] = Pending(None, first, is_pinned=False)
    versions.switch(second)
    assert _told(versions) == [("2", "AVAILABLE", "OK"), ("1", "UNLOADING", "OK")]
    versions.retire()
    assert first.replicas == 1  # Somebody waits for it.
    first.pending.clear()
    (member,) = first.fleet.present()
    versions.retire()
    assert (first.replicas, versions.present) == (0, [first, second])
    member.process.is_over = True
    first.look()
    versions.retire()
    assert versions.present == [second]
    assert not first.served.weights.exists()
    assert second.served.weights.exists()
    assert (_told(versions), _told(versions, 1)) == ([("2", "AVAILABLE", "OK")], [])


def test_one_that_is_refused_is_told_of_until_another_one_is_served(two, tmp_path):
    versions, (first, second) = Versions(), two
    versions.present.append(first)
    versions.switch(first)
    versions.present.append(second)
    versions.refuse(second, "it answers otherwise")
    _end(second)
    second.look()
    versions.retire()
    assert versions.present == [first]
    assert _told(versions) == [("2", "END", "UNKNOWN"), ("1", "AVAILABLE", "OK")]
    assert versions.status(2)[0]["status"]["error_message"] == "it answers otherwise"
    third = _version(3, itertools.count(7), tmp_path)
    versions.present.append(third)
    versions.switch(third)
    assert _told(versions) == [("3", "AVAILABLE", "OK"), ("1", "UNLOADING", "OK")]


@pytest.fixture
def server(two) -> Server:
    """One whose first version leaves, though it has requests, for the second one answers."""
    replica = Replica(2, 0.0, "single", {})
    found = Server(two[0].served, replica, Scaling(1, 1, 1.0, 0, 0), 1.0, 1.0, lambda *_: None)
    found.versions.present += two
    found.versions.current = two[0]
    found.switch(two[0])
    found.switch(two[1])
    return found


def _asked(version: Version, name: str, taken_by: int | None, *, is_pinned: bool) -> Pending:
    pending = Pending(None, version, is_pinned)
    version.pending[name] = pending
    version.queue.put([(0, name, 0.0, None)])
    if taken_by is not None:
        assert len(version.queue.take(taken_by, 1, 0.0, 0.0)) == 1
    return pending


def test_what_a_version_that_leaves_cannot_answer_the_next_one_does(server, two):
    """Its only replica is lost; who has asked this version alone, is told so."""
    first, second = two
    (member,) = first.fleet.ready()
    plain = _asked(first, "plain", member.number, is_pinned=False)
    pinned = _asked(first, "pinned", None, is_pinned=True)
    _end(first)
    asyncio.run(server._repeat(first, first.look()))
    assert (plain.version, plain.is_repeated, second.queue.waiting()) == (second, True, 1)
    assert (list(first.pending), list(second.pending)) == (["pinned"], ["plain"])
    assert not plain.item.event.is_set()
    assert pinned.item.response == (None, LitAPIStatus.ERROR)
    assert server.metrics.retried == 1


def test_a_version_with_a_replica_left_keeps_its_requests(server, two):
    first, second = two
    first.fleet.start(1)
    first.look()
    lost, kept = first.fleet.ready()
    mine = _asked(first, "mine", lost.number, is_pinned=False)
    others = _asked(first, "others", kept.number, is_pinned=False)
    lost.process.is_over = True
    asyncio.run(server._repeat(first, first.look()))
    assert (mine.version, mine.is_repeated) == (first, True)
    assert (others.version, others.is_repeated) == (first, False)
    assert [uid for _, uid, *_ in first.queue.take(kept.number, 9, 0.0, 0.0)] == ["mine"]
    assert not second.pending


def test_requests_of_the_gate_want_no_replicas(server, two):
    """They are those of a version that nobody else asks."""
    first, second = two
    server._scaling = Scaling(0, 3, 1.0, 0.0, 0.0)
    server._rule = type(server._rule)(server._scaling)
    server._rule.replicas = 0
    _asked(first, "gate", None, is_pinned=True)
    server._follow_load()
    assert (second.wanted, server.wanted) == (0, 1)
    _asked(second, "one", None, is_pinned=False)
    server._follow_load()
    assert second.wanted == 1


def test_a_replica_that_told_its_error_is_not_started_again(tmp_path):
    states = {}
    fleet = Fleet(lambda *_: _Process(), states.get, itertools.count(), 100, leave_timeout_s=100)
    fleet.follow(1)
    fleet.present()[0].process.is_over = True
    fleet.look()
    assert fleet.may_start  # It was killed.
    fleet.follow(1)
    member = fleet.present()[0]
    member.process.is_over, member.process.exitcode = True, 2
    fleet.look()
    assert not fleet.may_start
