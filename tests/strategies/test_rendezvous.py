"""Ranks that meet, and those that do not come, on real sockets of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
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
