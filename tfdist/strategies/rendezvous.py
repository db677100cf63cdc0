"""The ranks of a TensorFlow cluster meet before TensorFlow connects them.

TensorFlow waits for a missing task without end, holds the interpreter while it does, and cannot
name the task. So rank 0 listens on its own address until all others have called, and then gives
the port back to TensorFlow.
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
    if place.world_size == 1:
        return
    deadline = time.monotonic() + timeout_s
    missing = _wait_as_chief(place, deadline) if place.is_chief else _call_chief(place, deadline)
    if missing:
        listed = ", ".join(f"rank {rank} ({place.addresses[rank]})" for rank in missing)
        raise LaunchError(
            f"every task of a cluster must come up within {timeout_s:g} s",
            received=f"rank {place.rank} waits for {listed}",
            mend="Start the missing tasks with the same cluster in TF_CONFIG, or raise "
            "start_timeout_s",
        )


def _wait_as_chief(place: Topology, deadline: float) -> list[int]:
    missing = set(range(1, place.world_size))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listening(place.addresses[0]))
        callers = []
        while missing and time.monotonic() < deadline:
            server.settimeout(max(_RETRY_S, deadline - time.monotonic()))
            with contextlib.suppress(OSError, ValueError):
                caller = stack.enter_context(server.accept()[0])
                caller.settimeout(_GRACE_S)
                missing.discard(int(_line(caller)))
                callers.append(caller)
        answer = " ".join(map(str, sorted(missing))) or _GO
        for caller in callers:
            with contextlib.suppress(OSError):
                caller.sendall(f"{answer}\n".encode())
    return sorted(missing)


@contextlib.contextmanager
def _listening(address: str) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    # On a network a name may be another interface's: like TensorFlow, listen on all of them.
    own = host if host in {"localhost", "127.0.0.1"} else ""
    try:
        server = socket.create_server((own, int(port)))
    except OSError as error:
        raise LaunchError(
            "rank 0 of a cluster listens on its address in TF_CONFIG",
            received=f"{address}: {error.strerror}",
            mend="Choose a free port of this host",
        ) from error
    with server:
        yield server


def _call_chief(place: Topology, deadline: float) -> list[int]:
    host, _, port = place.addresses[0].rpartition(":")
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError):
            with socket.create_connection((host, int(port)), timeout=left) as chief:
                chief.sendall(f"{place.rank}\n".encode())
                chief.settimeout(left + _GRACE_S)
                answer = _line(chief)
            if answer == _GO:
                return []
            if answer:
                return [int(rank) for rank in answer.split()]
        time.sleep(_RETRY_S)
    return [0]


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
            "each rank of a cluster listens on a port of its own",
            received=f"port {port} of rank {place.rank} ({address}): {error.strerror}",
            mend=_FREE_PORTS[place.launcher],
        ) from error
