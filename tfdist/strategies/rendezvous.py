"""The ranks of a TensorFlow cluster meet before TensorFlow connects them.

TensorFlow waits for a missing task without end, holds the interpreter while it does, and cannot
name the task. So rank 0 listens on its own address until all others have called, and then gives
the port back to TensorFlow. The lines of those who called can stay open, to tell when one ends.

Both ends prove that they know the job's secret (``Topology.secret``), and never say it. Where
nobody has given the job one, everybody knows it: whoever can reach the port is believed.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Iterator

from tfdist.errors import LaunchError
from tfdist.topology import Topology

_RETRY_S = 0.1
# Beyond the deadline, for the words of rank 0 about who is missing.
_GRACE_S = 2.0
_GO = "go"
_NONCE_BYTES = 16
# The numbers of all ranks that are missing, at most.
_LONGEST_LINE_BYTES = 1 << 16
# Who have called, and not said yet who they are.
_MOST_CALLERS = 256
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
            "--start-timeout (in Python start_timeout_s)",
        )
    for line in lines.values():
        line.settimeout(None)
    return lines


_Met = tuple[dict[int, socket.socket], list[int]]
"""The lines to those who have come, and the ranks of those who have not."""


def _wait_as_chief(place: Topology, deadline: float) -> _Met:
    lines: dict[int, socket.socket] = {}
    answers: dict[int, _Caller] = {}
    missing = set(range(1, place.world_size))
    with _listening(place.addresses[0]) as server, _Callers(place, server) as callers:
        while missing and time.monotonic() < deadline:
            for rank, caller in callers.next():
                missing.discard(rank)
                answers[rank] = caller  # Anew, where its first line broke.
        answer = " ".join(map(str, sorted(missing))) or _GO
        for rank, caller in answers.items():
            lines[rank] = caller.line
            caller.line.settimeout(_GRACE_S)
            with contextlib.suppress(OSError):
                proof = _proof(place, caller.nonce, caller.their_nonce, answer)
                caller.line.sendall(f"{answer} {proof}\n".encode())
    return lines, sorted(missing)


class _Caller:
    """Somebody who has called the chief, and may be a rank or a stranger."""

    def __init__(self, line: socket.socket):
        self.line = line
        self.nonce = secrets.token_hex(_NONCE_BYTES)
        self.their_nonce = ""
        self.until = time.monotonic() + _GRACE_S
        self._heard = b""
        line.setblocking(False)
        line.sendall(f"{self.nonce}\n".encode())

    def hear(self, place: Topology) -> int | None:
        """Returns the rank that has called; None while its line has not ended.

        Raises:
            ValueError: a stranger.
            OSError: one who is gone.
        """
        self._heard += self.line.recv(_LONGEST_LINE_BYTES) or b"\n"
        if len(self._heard) > _LONGEST_LINE_BYTES:
            raise ValueError("a line without end")
        if not self._heard.endswith(b"\n"):
            return None
        rank, self.their_nonce, proof = self._heard.decode("ascii").split()
        if not _is_proof(proof, place, self.nonce, self.their_nonce, rank):
            raise ValueError("another secret")
        if int(rank) not in range(1, place.world_size):
            raise ValueError("no rank of this cluster")
        return int(rank)


class _Callers:
    """Hears all who call at the same time: a stranger holds nobody up."""

    def __init__(self, place: Topology, server: socket.socket):
        self._place = place
        self._server = server
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Callers:
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        for caller in self._waiting:
            caller.line.close()
        self._selector.close()

    @property
    def _waiting(self) -> list[_Caller]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def next(self) -> list[tuple[int, _Caller]]:
        """Returns the ranks that have proved who they are, soon."""
        met = []
        for key, _ in self._selector.select(_RETRY_S):
            if key.data is None:
                self._accept()
                continue
            try:
                rank = key.data.hear(self._place)
            except BlockingIOError:
                continue
            except (OSError, ValueError):
                self._hang_up(key.data)
                continue
            if rank is not None:
                self._selector.unregister(key.data.line)
                met.append((rank, key.data))
        for caller in self._waiting:
            if time.monotonic() > caller.until:
                self._hang_up(caller)
        return met

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            line = self._server.accept()[0]
            if len(self._waiting) >= _MOST_CALLERS:
                self._hang_up(self._waiting[0])
            self._selector.register(line, selectors.EVENT_READ, _Caller(line))

    def _hang_up(self, caller: _Caller) -> None:
        self._selector.unregister(caller.line)
        caller.line.close()


def _proof(place: Topology, *words: str) -> str:
    """Returns what only those can know who have the job's secret; it goes over the network."""
    return hmac.new(place.secret.encode(), " ".join(words).encode(), "sha256").hexdigest()


def _is_proof(proof: str, place: Topology, *words: str) -> bool:
    return hmac.compare_digest(proof.encode(), _proof(place, *words).encode())


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
        with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as unless_met:
            chief = socket.create_connection((host, int(port)), timeout=left)
            unless_met.callback(chief.close)
            answer = _ask(chief, place, deadline)
            if answer == [_GO]:
                unless_met.pop_all()
                return {0: chief}, []
            return {}, [int(rank) for rank in answer]
        time.sleep(_RETRY_S)
    return {}, [0]


def _ask(chief: socket.socket, place: Topology, deadline: float) -> list[str]:
    """Returns the chief's answer: "go", or the ranks that are missing.

    Raises:
        ValueError: it is not the chief who answers.
        OSError: nobody does.
    """
    rank, own_nonce = str(place.rank), secrets.token_hex(_NONCE_BYTES)
    (nonce,) = _line(chief, time.monotonic() + _GRACE_S).split()
    proof = _proof(place, nonce, own_nonce, rank)
    chief.sendall(f"{rank} {own_nonce} {proof}\n".encode())
    *answer, proof = _line(chief, deadline + _GRACE_S).split()
    if not _is_proof(proof, place, nonce, own_nonce, " ".join(answer)):
        raise ValueError("another secret")
    return answer


def _line(connection: socket.socket, deadline: float) -> str:
    """Returns a line of a known length at most; it ends before the deadline."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(_RETRY_S, deadline - time.monotonic()))
        data = connection.recv(_LONGEST_LINE_BYTES)
        line += data
        if not data or len(line) > _LONGEST_LINE_BYTES or time.monotonic() > deadline:
            raise ValueError("no line")
    return line.decode("ascii")


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
