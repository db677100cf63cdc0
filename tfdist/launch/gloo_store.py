"""The store at which Gloo's ranks leave their addresses for each other, on the loopback interface.

Horovod's own server believes whoever calls it, unpickles what it is sent, and listens on all
interfaces. This one knows the ranks of its job by a secret. Gloo's client can send no header, so
the secret is the beginning of each path, and comes to the ranks within the address of the server.
"""

from __future__ import annotations

import hmac
import http.server
import secrets
import threading

_HOST = "127.0.0.1"
# Between two bytes of a request.
_TIMEOUT_S = 3.0
# The addresses of one rank: some dozen bytes for each other rank.
_LONGEST_VALUE_BYTES = 1 << 20


#: What all ranks are told that meet here.
ON_LOOPBACK = {
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_GLOO_IFACE": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


def place(host: str, rank: int, size: int, *, is_alone: bool) -> dict[str, str]:
    """Returns a rank's place in the words of Horovod.

    Args:
        is_alone: whether each has a host of its own; else all are on one.
    """
    among, alone = (rank, size), (0, 1)
    local, cross = (alone, among) if is_alone else (among, alone)
    return {
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(local[0]),
        "HOROVOD_LOCAL_SIZE": str(local[1]),
        "HOROVOD_CROSS_RANK": str(cross[0]),
        "HOROVOD_CROSS_SIZE": str(cross[1]),
    }


class GlooStore:
    """Listens, in threads of its own, until ``close``."""

    def __init__(self) -> None:
        self._secret = secrets.token_hex(16)
        self._server = _Server((_HOST, 0), _Handler)
        self._server.secret = self._secret
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def variables(self, meeting: int) -> dict[str, str]:
        """Returns what Horovod reads of the store; each meeting has room of its own in it."""
        port = self._server.server_address[1]
        return {
            # Horovod appends ":port/scope/key" to it.
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{_HOST}:{port}/{self._secret}/{meeting}",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        }

    def put(self, meeting: int, scope: str, key: str, value: str) -> None:
        """Leaves a value for the ranks of a meeting, in place of those of earlier meetings."""
        port = self._server.server_address[1]
        self._server.values[f"{meeting}:{port}", scope, key] = value.encode()

    def forget(self) -> None:
        """Empties the store."""
        self._server.values.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *arguments: object):
        super().__init__(*arguments)
        self.secret = ""
        self.values: dict[tuple[str, str, str], bytes] = {}

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing of callers that hang up; a rank that was killed is one."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        place = self._place()
        if place is not None:
            value = self.server.values.get(place)
            self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        place = self._place()
        if place is None:
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _LONGEST_VALUE_BYTES:
            self._answer(400)
            return
        self.server.values[place] = self.rfile.read(int(length))
        self._answer(200)

    def do_DELETE(self) -> None:
        # A rank that has met all others. The store is emptied before the next meeting.
        if self._place() is not None:
            self._answer(200)

    def _place(self) -> tuple[str, str, str] | None:
        """Returns meeting, scope and key of a request; answers a stranger's."""
        parts = self.path.split("/")
        known = len(parts) == 5 and hmac.compare_digest(
            parts[1].encode(), self.server.secret.encode()
        )
        if not known:
            self._answer(403)
            return None
        return parts[2], parts[3], parts[4]

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keeps paths, which hold the secret, out of the output."""
