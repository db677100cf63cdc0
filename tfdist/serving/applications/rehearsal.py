"""A folder is asked before it is given away. Run as ``python -m ... CONFIG``; without Ray."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn

import tfdist
from tfdist.launch.events import emit
from tfdist.runs import ranks
from tfdist.serving.applications.hosted import Hosted
from tfdist.serving.gate import Exam
from tfdist.serving.program import through_gate
from tfdist.serving.watched import EXPECTED


class _Local:
    """A server of this machine, for the gate alone."""

    is_stopped = False

    def __init__(self, app: Any):
        config = uvicorn.Config(app, log_level="error", access_log=False)
        self._server = uvicorn.Server(config)

    def serve(self, listening: socket.socket) -> None:
        self._server.run(sockets=[listening])

    def stop(self) -> None:
        self._server.should_exit = True


def rehearse(config: dict[str, Any]) -> None:
    # What lies in the folder of whoever calls, or in PYTHONPATH, no other machine has.
    own = {Path(place).resolve() for place in os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    own = (own | {Path.cwd()}) - {Path(tfdist.__file__).resolve().parents[1]}
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() not in own]
    sys.dont_write_bytecode = True  # The folder is given away as it was written.
    os.chdir(config["folder"])
    hosted = Hosted(Path(config["folder"]))
    compared = 0
    if config["gate"] is not None:
        gate = Path(config["gate"])
        exam = Exam(gate, gate / EXPECTED)
        through_gate(_Local(hosted.app), exam, hosted.hosting.served.name, None)
        compared = len(exam.instances)
    emit({"event": "rehearsed", "compared": compared})


if __name__ == "__main__":
    ranks.main(rehearse)
