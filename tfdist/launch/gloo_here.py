"""horovodrun on this machine alone: ``python -m tfdist.launch.gloo_here ARGUMENTS``.

The server at which the ranks meet believes whoever calls it, and horovodrun lets it listen on all
interfaces whatever it is told. Here it listens on the loopback interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod.runner.http import http_server
from horovod.runner.launch import run_commandline


def _find_port(server_factory: Callable[[tuple[str, int]], Any]) -> tuple[Any, int]:
    server = server_factory(("127.0.0.1", 0))
    return server, server.server_address[1]


if __name__ == "__main__":
    http_server.find_port = _find_port
    run_commandline()
