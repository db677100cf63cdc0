"""Ranks that meet, and those that do not come, on real sockets of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist.errors import LaunchError
from tfdist.launch.tf_cluster import _free_ports
from tfdist.strategies.rendezvous import check_port, meet, meet_and_stay
from tfdist.topology import Topology

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def places() -> list[Topology]:
    addresses = tuple(f"127.0.0.1:{port}" for port in _free_ports(3))
    return [Topology(world_size=3, rank=rank, addresses=addresses) for rank in range(3)]


def met(places: list[Topology], timeout_s: float) -> list[str]:
    """Returns the error of each rank that comes; empty where it has met all."""

    def one(place: Topology) -> str:
        try:
            meet(place, timeout_s=timeout_s)
        except LaunchError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor() as threads:
        return list(threads.map(one, places))


def test_all_meet_and_the_port_is_free_again(places):
    assert met(places, timeout_s=30) == ["", "", ""]
    assert met(places, timeout_s=30) == ["", "", ""]


def test_a_missing_rank_is_named_by_all_others(places):
    for error in met([places[0], places[2]], timeout_s=1):
        assert f"rank 1 ({places[0].addresses[1]})" in error
        assert "within 1 s" in error


def test_a_missing_chief_is_named(places):
    for error in met(places[1:], timeout_s=1):
        assert f"rank 0 ({places[0].addresses[0]})" in error


def test_a_stranger_who_calls_is_no_rank(places):
    host, port = places[0].addresses[0].split(":")

    def call_with_nonsense() -> None:
        for _ in range(50):
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, int(port)), 0.2) as c,
            ):
                c.sendall(b"GET / HTTP/1.1\n")
                return

    with ThreadPoolExecutor() as threads:
        threads.submit(call_with_nonsense)
        errors = met(places, timeout_s=30)
    assert errors == ["", "", ""]


def test_a_port_in_use_is_named(places):
    host, port = places[0].addresses[0].split(":")
    with socket.create_server((host, int(port))):
        (error,) = met(places[:1], timeout_s=1)
    assert places[0].addresses[0] in error
    assert "free port" in error


@pytest.mark.parametrize(
    ("launcher", "mend"),
    [("tf_config", "TF_CONFIG"), ("slurm", "srun --resv-ports"), ("sagemaker", "End what listens")],
)
def test_the_port_of_any_rank_is_named_where_another_program_has_it(places, launcher, mend):
    place = dataclasses.replace(places[2], launcher=launcher)
    check_port(place)
    host, port = place.addresses[2].split(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(LaunchError, match=rf"port {port} of rank 2 .*{mend}"),
    ):
        check_port(place)


def test_one_task_has_nobody_to_meet():
    meet(Topology(addresses=("127.0.0.1:1",)), timeout_s=1)


def test_lines_stay_open_and_end_with_their_rank(places):
    with ThreadPoolExecutor() as threads:
        first, second, third = threads.map(lambda p: meet_and_stay(p, timeout_s=30), places)
    assert (set(first), set(second), set(third)) == ({1, 2}, {0}, {0})
    host, port = places[0].addresses[0].split(":")
    with socket.create_server((host, int(port))):
        pass  # TensorFlow can have the port, with the lines still open.
    second[0].sendall(b".")
    assert first[1].recv(8) == b"."
    third[0].close()
    assert first[2].recv(8) == b""
    for line in (*first.values(), second[0]):
        line.close()


def with_secrets(places: list[Topology], *secrets: str) -> list[Topology]:
    return [dataclasses.replace(p, secret=s) for p, s in zip(places, secrets, strict=True)]


def test_ranks_know_each_other_by_their_secret(places):
    assert met(with_secrets(places, "a", "a", "a"), timeout_s=30) == ["", "", ""]
    first, second, third = met(with_secrets(places, "a", "a", "b"), timeout_s=3)
    assert "rank 2" in first
    assert "rank 2" in second
    assert "rank 0" in third  # It believes no chief either that does not know its own.
    assert "secret" not in repr(with_secrets(places, "the secret", "a", "a")[0])


def test_callers_without_end_or_words_hold_nobody_up(places):
    """One sends a line that never ends, others nothing, one half of what a rank says."""
    host, port = places[0].addresses[0].split(":")
    over = threading.Event()
    sent: list[int] = []

    def call(say: Callable[[socket.socket], None]) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1) as c:
                say(c)
            over.wait(0.01)

    def endless(line: socket.socket) -> None:
        for _ in range(10_000):
            line.sendall(b"1" * 4096)
            sent.append(4096)

    def silent(line: socket.socket) -> None:
        over.wait(20)

    def garbage(line: socket.socket) -> None:
        line.sendall(b"1 2 3\n\xff")

    with ThreadPoolExecutor(30) as threads:
        for say in (endless, garbage, *[silent] * 20):
            threads.submit(call, say)
        try:
            late = threads.submit(met, with_secrets(places, "a", "a", "a"), 30)
            assert late.result(60) == ["", "", ""]
        finally:
            over.set()
    assert sum(sent) < 10_000 * 4096  # It was hung up on.


def test_a_chief_that_is_none_is_not_believed(places):
    """Whatever it says, the rank goes on to look for its own until the deadline."""
    host, port = places[0].addresses[0].split(":")
    over = threading.Event()

    def pose(words: bytes) -> None:
        with socket.create_server((host, int(port))) as server:
            server.settimeout(0.1)
            while not over.is_set():
                with contextlib.suppress(OSError), server.accept()[0] as line:
                    line.sendall(words)
                    over.wait(0.2)

    for words in (b"0\ngo\n", b"0\n1 2 x\n", b"x" * 100_000, b"\xff\n\n"):
        over.clear()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(pose, words)
            (error,) = met([places[1]], timeout_s=1)
            over.set()
        assert f"rank 0 ({places[0].addresses[0]})" in error
