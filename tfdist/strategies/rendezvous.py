"""The ranks of a TensorFlow cluster meet before TensorFlow connects them.

TensorFlow waits for a missing task without end, holds the interpreter while it does, and cannot
name the task. So rank 0 listens on its own address until all others have called, and then gives
the port back to TensorFlow. The lines of those who called can stay open, to tell when one ends.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

from tfdist.errors import LaunchError
from tfdist.topology import Topology

_RETRY_S = 0.1
# Beyond the deadline, for the words of rank 0 about who is missing.
_GRACE_S = 2.0
_GO = "go"
_FREE_PORTS = {
    "tf_config": "Choose a free port of this host in TF_CONFIG; tfdist launch, started anew, takes "
    "other ones",
    "slurm": "End what listens there, have Slurm reserve ports (srun --resv-ports), or start anew",
    "sagemaker": "End what listens there",
}


def meet(place: Topology, *, timeout_s: float) -> None:
    """Returns once all ranks of ``place`` have called this.

    Raises:
        LaunchError: some did not within ``timeout_s``; it names them.
    """
    for line in meet_and_stay(place, timeout_s=timeout_s).values():
        line.close()


def meet_and_stay(place: Topology, *, timeout_s: float) -> dict[int, socket.socket]:
    """Returns once all ranks of ``place`` have called this, with the open lines between them.

    Returns:
        Rank -> the line to it: on rank 0 of all others, on the others that to rank 0.

    Raises:
        LaunchError: some did not within ``timeout_s``; it names them.
    """
    if place.world_size == 1:
        return {}
    deadline = time.monotonic() + timeout_s
    lines, missing = (_wait_as_chief if place.is_chief else _call_chief)(place, deadline)
    if missing:
        for line in lines.values():
            line.close()
        listed = ", ".join(f"rank {rank} ({place.addresses[rank]})" for rank in missing)
        raise LaunchError(
            f"every task of a cluster must come up within {timeout_s:g} s",
            received=f"rank {place.rank} waiting for {listed}",
            mend="Start the missing tasks with the same cluster in TF_CONFIG, or raise "
            "start_timeout_s",
        )
    for line in lines.values():
        line.settimeout(None)
    return lines


_Met = tuple[dict[int, socket.socket], list[int]]
"""The lines to those who have come, and the ranks of those who have not."""


def _wait_as_chief(place: Topology, deadline: float) -> _Met:
    missing = set(range(1, place.world_size))
    lines: dict[int, socket.socket] = {}
    with _listening(place.addresses[0]) as server:
        while missing and time.monotonic() < deadline:
            server.settimeout(max(_RETRY_S, deadline - time.monotonic()))
            with contextlib.suppress(OSError, ValueError):
                caller = server.accept()[0]
                caller.settimeout(_GRACE_S)
                rank = _rank_of(caller)
                if rank not in range(1, place.world_size):  # A stranger.
                    caller.close()
                    continue
                missing.discard(rank)
                lines[rank] = caller
        answer = " ".join(map(str, sorted(missing))) or _GO
        for caller in lines.values():
            with contextlib.suppress(OSError):
                caller.sendall(f"{answer}\n".encode())
    return lines, sorted(missing)


@contextlib.contextmanager
def _listening(address: str) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    # On a network a name may be another interface's: like TensorFlow, listen on all of them.
    own = host if host in {"localhost", "127.0.0.1"} else ""
    try:
        server = socket.create_server((own, int(port)))
    except OSError as error:
        raise LaunchError(
            "rank 0 of a cluster must listen on its address in TF_CONFIG",
            received=f"{address}: {error.strerror}",
            mend="Choose a free port of this host",
        ) from error
    with server:
        yield server


def _call_chief(place: Topology, deadline: float) -> _Met:
    host, _, port = place.addresses[0].rpartition(":")
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError), contextlib.ExitStack() as unless_met:
            chief = socket.create_connection((host, int(port)), timeout=left)
            unless_met.callback(chief.close)
            chief.sendall(f"{place.rank}\n".encode())
            chief.settimeout(left + _GRACE_S)
            answer = _line(chief)
            if answer == _GO:
                unless_met.pop_all()
                return {0: chief}, []
            if answer:
                return {}, [int(rank) for rank in answer.split()]
        time.sleep(_RETRY_S)
    return {}, [0]


def _rank_of(caller: socket.socket) -> int | None:
    try:
        return int(_line(caller))
    except (OSError, ValueError):
        return None


def _line(connection: socket.socket) -> str:
    with connection.makefile() as words:
        return words.readline().strip()


def check_port(place: Topology) -> None:
    """Raises LaunchError when another program has this rank's port: TensorFlow names none."""
    address = place.addresses[place.rank]
    port = int(address.rpartition(":")[2])
    try:
        with socket.socket() as own:  # Bound as TensorFlow binds it, but nobody listens.
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind(("", port))
    except OSError as error:
        raise LaunchError(
            "each rank of a cluster must listen on a port of its own",
            received=f"port {port} of rank {place.rank} ({address}): {error.strerror}",
            mend=_FREE_PORTS[place.launcher],
        ) from error
