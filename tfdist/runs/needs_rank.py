"""Traces a step of each of several strategies. Run as ``python -m tfdist.runs.needs_rank CONFIG``.

TensorFlow is imported once. Each step is traced in a fork of its own, since a strategy takes the
devices of its process, and since a large model may be the end of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import traceback
from collections import deque
from typing import Any, NoReturn

from tfdist.compat import import_tensorflow
from tfdist.launch.cleanup import die_with_parent
from tfdist.launch.events import emit
from tfdist.launch.failure import ending
from tfdist.runs import ranks
from tfdist.training.engine import model_path

#: Each takes a core to trace and some 600 MB.
_AT_ONCE = 2


def tell_needs(config: dict[str, Any]) -> None:
    # Each device that a strategy asks for is a logical CPU here: nothing is run on any.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    import_tensorflow()
    import tfdist.runs.traced_step  # noqa: F401 - and Keras with it: what forks then have.

    emit({"event": "ready", "long": True})
    waiting = deque(range(len(config["asked"])))
    running: dict[int, int] = {}
    while waiting or running:
        while waiting and len(running) < _AT_ONCE:
            row = waiting.popleft()
            pid = os.fork()
            if pid == 0:
                _trace(config, row)
            running[pid] = row
        pid, status = os.wait()
        row, code = running.pop(pid), os.waitstatus_to_exitcode(status)
        if code != 0:
            emit({"event": "died", "row": row, "how": ending(code if code > 0 else 128 - code)})


def _trace(config: dict[str, Any], row: int) -> NoReturn:
    """Tells in this fork what a row needs, or why it is refused, and ends it."""
    code = 1
    try:
        die_with_parent(signal.SIGKILL)
        name, options, devices = config["asked"][row]
        # What the model's file prints would come once for each row.
        with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence):
            from tfdist.runs.traced_step import needs_of, pool_threads

            model_fn = model_path.load(config["model"])
            threads = 0 if config["on_gpus"] else pool_threads()
            found = needs_of(model_fn, name, options, devices, config["rows"], threads)
        emit({"event": "needs", "row": row, "needs": dataclasses.asdict(found)})
        code = 0
    except (Exception, SystemExit) as error:
        event = ranks.mistake_of(error)
        if event is None:
            traceback.print_exc()
        else:
            emit(event | {"event": "refused", "row": row})
            code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # What the parent would do at its end is its own.


if __name__ == "__main__":
    ranks.main(tell_needs)
