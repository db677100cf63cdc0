"""The process of a server. Run as ``python -m tfdist.serving.program CONFIG``."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfdist.errors import OptionError
from tfdist.launch.events import emit
from tfdist.runs import ranks

_LOOPBACK = "127.0.0.1"


def serve(config: dict[str, Any]) -> None:
    from tfdist.serving.following import Follower
    from tfdist.serving.gate import Exam
    from tfdist.serving.replica import Replica
    from tfdist.serving.routes import Door, ServerRoutes
    from tfdist.serving.scaling import Scaling
    from tfdist.serving.served import Served
    from tfdist.serving.server import Server
    from tfdist.serving.serving import read_token
    from tfdist.serving.watched import EXPECTED, Watched

    served = Served.from_json(config["served"])
    # Not in the configuration, which everybody on this machine can read.
    file = config["token_file"]
    token = None if file is None else read_token(Path(file))
    door = Door(body_bytes=config["body_bytes"], token=token)
    # Taken before the replicas start, which takes long; nobody is let in before the gate.
    public = _bound(config["host"], config["port"])
    batches = config["max_batch"], config["batch_wait_s"]
    replica = Replica(*batches, **config["divided"])
    limits_s = config["timeout_s"], config["start_timeout_s"]
    server = Server(
        served, replica, Scaling(**config["scaling"]), *limits_s, ServerRoutes(served, door).add
    )
    gate = config["gate"] and Path(config["gate"])
    exam = gate and Exam(gate, served.weights.parent / EXPECTED)
    watched = config["watch"] and Watched(Path(config["watch"]), config["mark"])
    follower = watched and Follower(server, served, watched, gate)
    with public, server.started():
        if exam:
            through_gate(server, exam, served.name, door.token)
        if not server.is_stopped:
            _listen(public, config["host"], config["port"])
            host, port = public.getsockname()[:2]
            compared = len(exam.instances) if exam else 0
            emit({"event": "listening", "host": host, "port": port, "compared": compared})
            emit({"event": "serving"})
            server.serve(public, follower and follower.run)


def _bound(host: str, port: int) -> socket.socket:
    """Returns a socket that nobody can connect to before it listens, nor bind its address."""
    with _of_a_free_address(host, port):
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        try:
            return _socket(kind, address, is_shared=False)
        except OSError:  # Perhaps of connections of an earlier server, which the system keeps.
            return _socket(kind, address, is_shared=True)


def _socket(kind: int, address: Any, *, is_shared: bool) -> socket.socket:
    found = socket.socket(kind, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, is_shared)
        found.bind(address)
    except OSError:
        found.close()
        raise
    return found


def _listen(public: socket.socket, host: str, port: int) -> None:
    with _of_a_free_address(host, port):
        # Its connections have it from here: they are not to keep the next server from the port.
        public.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        public.listen()


@contextlib.contextmanager
def _of_a_free_address(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError) as error:  # UnicodeError: of a name with an empty part.
        raise OptionError(
            "--host and --port must be an address of this machine that is free",
            received=f"{host}:{port}: {getattr(error, 'strerror', error)}",
            mend="Choose another, such as --port 0 for any",
        ) from None


def through_gate(server: Any, exam: Any, name: str, token: str | None) -> None:
    """Raises TfdistError: a record is not answered as it must be."""
    from tfdist.serving.gate import compare

    errors: list[Exception] = []

    def ask(port: int) -> None:
        try:
            compare(exam, f"http://{_LOOPBACK}:{port}", name, token)
        except Exception as error:  # Whatever it is, what was not compared is not served.
            errors.append(error)
        finally:
            server.stop()

    with _bound(_LOOPBACK, 0) as private:
        private.listen()
        port = private.getsockname()[1]
        threading.Thread(target=ask, args=(port,), daemon=True).start()
        server.serve(private)
    if errors and not server.is_stopped:
        raise errors[0]


if __name__ == "__main__":
    ranks.main(serve)
