"""The door and the gate of a server, without one."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from litserve.utils import WorkerSetupStatus
from starlette.datastructures import URL
from starlette.requests import Request

from tfdist.errors import OptionError
from tfdist.records.format.encoding import example_of
from tfdist.records.format.schema import Feature, Schema
from tfdist.records.writing.instances import Limits, records_of
from tfdist.serving import gate, program, serving
from tfdist.serving.bodies import RefusedError
from tfdist.serving.fleet import Fleet
from tfdist.serving.queues import Requests
from tfdist.serving.replica import Replica
from tfdist.serving.routes import Door, Routes
from tfdist.serving.scaling import Scaling
from tfdist.serving.server import Server
from tfdist.serving.versions import Pending, Version


class _Server:
    """Ends when it is to."""

    def __init__(self, *, is_stopped: bool):
        self.is_stopped, self._is_over = is_stopped, threading.Event()

    def serve(self, listening) -> None:
        assert self._is_over.wait(20)

    def stop(self) -> None:
        self._is_over.set()


class _Served:
    name, schema = "model", SimpleNamespace(features=())


def test_a_gate_that_fails_in_any_way_lets_nobody_in():
    exam = SimpleNamespace(instances=None)  # What nobody can ask.
    with pytest.raises(TypeError):
        program.through_gate(_Server(is_stopped=False), exam, "model", None)
    program.through_gate(_Server(is_stopped=True), exam, "model", None)


def test_the_gate_sends_categories_by_their_names():
    """A number would be taken for the name of another."""
    how = {"shape": (), "dtype": "int64", "encoding": "int64", "role": "input"}
    named = Feature(name="user", classes=("1", "0"), columns=("user",), **how)
    schema = Schema((named, Feature(name="on", columns=("on",), **how)))
    record = example_of({feature: np.asarray(1) for feature in schema.features})
    sent = gate._instance(schema, record)
    assert sent == {"user": "0", "on": 1}
    assert records_of(schema, [sent], Limits()) == [record]


def test_the_gate_expects_what_json_can_say():
    read = gate._as_answered(np.array([[1.5, -np.inf, np.nan]]))
    np.testing.assert_array_equal(read, [[1.5, np.nan, np.nan]])
    np.testing.assert_array_equal(gate._as_answered(np.array([3, 4])), [3.0, 4.0])


def test_an_address_is_held_before_it_listens():
    with program._bound("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(OptionError, match=f"found 127.0.0.1:{port}: Address already in use"):
            program._bound("127.0.0.1", port)
        program._listen(held, "127.0.0.1", port)
        with pytest.raises(OptionError, match="must be an address of this machine that is free"):
            program._bound("127.0.0.1", port)
    with pytest.raises(OptionError, match=r"a\.\.b:80"):
        program._bound("a..b", 80)


def test_the_header_host_opens_no_address(monkeypatch):
    """As older Starlettes read it: what follows in it, is the path."""
    monkeypatch.setattr(Request, "url", property(lambda request: URL("http://a/healthz?/metrics")))
    routes = Routes(_Served, Door(token="secret"))
    scope = {"type": "http", "method": "GET", "query_string": b"", "server": ("h", 80)}
    host = (b"host", b"a/healthz?")
    with pytest.raises(RefusedError, match="must show the token"):
        routes._check_token(Request({**scope, "path": "/metrics", "headers": [host]}))
    shown = (b"authorization", b"Bearer secret")
    routes._check_token(Request({**scope, "path": "/metrics", "headers": [host, shown]}))
    routes._check_token(Request({**scope, "path": "/healthz", "headers": []}))


@pytest.fixture
def server() -> Server:
    """One that has never been started, with a process that is there."""
    replica, scaling = Replica(2, 0.0, "single", {}), Scaling(1, 1, 1.0, 0.0, 0.0)
    found = Server(_Served, replica, scaling, 1.0, 1.0, lambda *_: None)
    fleet = Fleet(
        lambda *_: SimpleNamespace(is_alive=lambda: True, exitcode=None),
        lambda number: WorkerSetupStatus.READY,
        *(itertools.count(), 1.0, 1.0),
    )
    found.versions.current = Version(1, _Served, Requests(), fleet)
    found.versions.present = [found.versions.current]
    fleet.start(1)
    assert not fleet.look()
    found._uvicorn, found._beside = SimpleNamespace(should_exit=False), None
    found._queue_process = multiprocessing.current_process()
    return found


def _watched(server: Server) -> None:
    asyncio.run(asyncio.wait_for(server._watch(), 20))
    assert server._uvicorn.should_exit


def test_a_server_ends_that_was_to_end_before_it_began(server):
    server.stop()
    _watched(server)
    assert server._failure is None
    assert not server.is_stopped  # By no signal: what follows the gate is served.


def test_a_server_ends_when_it_cannot_look_after_its_replicas(server):
    async def put(*_) -> None:
        raise BrokenPipeError

    current = server.versions.current
    current.fleet.start(1)
    current.fleet.present()[0].process.is_alive = lambda: False
    current.pending["one"] = Pending(None, current, is_pinned=False)
    current.queue.begin(0)
    current.queue.put([(0, "one", 0.0, None)])
    assert current.queue.take(0, 1, 0.0, 0.0)
    server._put = put
    _watched(server)
    assert isinstance(server._failure, BrokenPipeError)


def test_a_server_ends_that_has_lost_its_queue(server):
    server._queue_process = multiprocessing.Process()  # Never begun: not there.
    _watched(server)
    assert isinstance(server._failure, ConnectionError)


def test_requests_are_counted_before_they_are_read(server, monkeypatch):
    monkeypatch.setattr("tfdist.serving.server.MOST_INSIDE", 1)
    refused = pytest.raises(RefusedError, match="ask again later")
    with server.admitted(), refused, server.admitted():
        pass
    with server.admitted():
        pass


def test_only_what_divides_a_model_in_one_process_is_a_replicas_strategy():
    serving.check_divides("single", {})
    serving.check_divides("pipeline", {"stages": 2})
    for name, options in (("mirrored", {}), ("horovod", {}), ("mesh", {"replicas": "horovod"})):
        with pytest.raises(OptionError, match="must be single, or one that divides"):
            serving.check_divides(name, options)
