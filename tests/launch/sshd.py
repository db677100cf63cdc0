"""A stand-in for ssh and its server: other hosts, played by this machine.

What runs "there" is no descendant of the launcher's: it is reached, and lost, through a connection
alone. ``python sshd.py SOCKET [-OPTIONS] HOST COMMAND`` is the client.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

_BARE = {"PATH": "/usr/bin:/bin"}


class Server:
    """Runs the commands of clients as sshd does: by a shell, in the user's home.

    Args:
        folder: where the program ``ssh`` is put, and the socket on which it is answered.
    """

    def __init__(self, folder: Path):
        self.processes: list[subprocess.Popen] = []
        self.connections: dict[str, list[socket.socket]] = {}
        self._folder = folder
        self._half_open: dict[str, socket.socket] = {}
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(folder / "s"))
        self._socket.listen()
        program = folder / "ssh"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {folder / "s"} "$@"\n')
        program.chmod(0o755)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def environ(self) -> dict[str, str]:
        """The environment in which this ssh is found."""
        return {**os.environ, "PATH": os.pathsep.join([str(self._folder), os.environ["PATH"]])}

    def drop(self, host: str) -> None:
        """Loses the connections to a host."""
        for connection in self.connections[host]:
            connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
        for process in self.processes:
            process.kill()
            process.wait()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            # One connection carries standard input and output, another the errors.
            lines = client.makefile("rb", buffering=0)
            number, *words = (lines.readline().decode().rstrip("\n") for _ in range(3))
            other = self._half_open.pop(number, None)
            if other is None:
                self._half_open[number] = client
                continue
            served = (*words, client, other)
            threading.Thread(target=self._serve, args=served, daemon=True).start()

    def _serve(self, host: str, command: str, client: socket.socket, error: socket.socket) -> None:
        self.connections.setdefault(host, []).extend([client, error])
        process = subprocess.Popen(
            ["sh", "-c", command],
            env=_BARE,
            cwd="/",
            stdin=client,
            stdout=client,
            stderr=error,
            start_new_session=True,
        )
        self.processes.append(process)
        code = process.wait()
        with contextlib.suppress(OSError):
            error.sendall(f"\x04{code}\n".encode())
        for connection in (client, error):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _copy(read, write) -> None:
    while data := read(1 << 16):
        while data:
            data = data[write(data) :]


def main() -> int:
    path, *words = sys.argv[1:]
    while words[0].startswith("-"):
        del words[0]
    host, command = words
    if host.endswith(".invalid"):
        print(f"ssh: Could not resolve hostname {host}: Name or service not known", file=sys.stderr)
        return 255
    error, server = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    for each in (error, server):
        each.connect(path)
        each.sendall(f"{os.getpid()}\n{host}\n{command}\n".encode())

    def say() -> None:
        _copy(lambda size: os.read(0, size), server.send)
        server.shutdown(socket.SHUT_WR)

    threading.Thread(target=say, daemon=True).start()
    hearing = threading.Thread(
        target=_copy, args=(server.recv, lambda data: os.write(1, data)), daemon=True
    )
    hearing.start()
    code = None
    for line in error.makefile("rb"):
        before, mark, number = line.partition(b"\x04")
        os.write(2, before)
        code = int(number) if mark else code
    hearing.join()
    if code is None:
        print(f"Connection to {host} closed by remote host.", file=sys.stderr)
        return 255
    return code


if __name__ == "__main__":
    sys.exit(main())
