"""One process of LitServe's that has the model, and how it takes requests together."""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import litserve
from litserve.loops import inference_worker
from litserve.loops.simple_loops import BatchedLoop

from tfdist.errors import TfdistError, notice
from tfdist.records.writing.instances import InstanceError
from tfdist.serving.served import Served

# What ends LitServe's loop: its own sentinel.
_STOP = (None, None, None, None)
#: How long a replica waits at the queue at a time.
LOOK_S = 1.0


class Replica(litserve.LitAPI):
    """The hooks that LitServe calls.

    Args:
        max_batch: most requests together, and most rows of a forward pass.
        batch_wait_s: how long the first request of a batch waits for others.
        strategy, options: what divides the model.
    """

    def __init__(
        self, max_batch: int, batch_wait_s: float, strategy: str, options: Mapping[str, Any]
    ):
        # What was taken together is there at once: nothing is waited for but at the queue.
        super().__init__(max_batch_size=max_batch, batch_timeout=0.0, loop=Batches())
        #: See ``Requests.take``.
        self.batch_bounds = max_batch, LOOK_S, batch_wait_s
        self._strategy, self._options = strategy, options

    def of(self, served: Served, number: int, door: Connection) -> Replica:
        """Returns a process of this kind.

        Args:
            served: its model.
            number: its own.
            door: the end of a pipe: closed on the other side, the process is to leave.
        """
        found = copy.copy(self)
        found.served, found.number, found.door = served, number, door
        return found

    def started(self, queue: Any, *told: Any) -> Any:
        """Returns a process that answers what is in a queue. Raises OSError: there is none.

        Args:
            told: by which it tells, as LitServe's: a transport, states, and callbacks.
        """
        process = multiprocessing.get_context("spawn").Process(
            target=inference_worker,
            args=(self, "cpu", self.number, queue, *told, False),  # The queue knows what it has.
            name=f"replica-{self.number}",
        )
        queue.begin(self.number)
        try:
            process.start()
        except OSError:
            queue.end(self.number)
            raise
        return process

    def setup(self, device: str) -> None:
        # Several replicas share a GPU, which the first would have alone.
        os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
        # Here, for the process that speaks HTTP has no TensorFlow.
        from tfdist.serving.handler import Handler

        try:
            self._handler = Handler(self.served, self.max_batch_size, self._strategy, self._options)
        except TfdistError as error:
            notice(self.served.told(error))
            sys.exit(2)

    def decode_request(self, request: Any) -> Any:
        return request

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, x: list[list[bytes] | None]) -> list[Any]:
        """Returns (what a request gets, rows of this batch); the rows once a batch, then 0.

        A request without records gets the shapes and dtypes of the outputs.
        """
        asked = [records for records in x if records]
        answers = iter(self._handler.predict(asked) if asked else ())
        rows = sum(len(records or ()) for records in x)
        found = [next(answers) if records else self._handler.outputs for records in x]
        texts = [str(one) if isinstance(one, InstanceError) else one for one in found]
        return [(one, 0 if number else rows) for number, one in enumerate(texts)]

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: Any) -> Any:
        return output


class Batches(BatchedLoop):
    """LitServe's batches, each of which is taken, and answered, by one message; idle, it sleeps.

    Between two of them it looks at its door.
    """

    def get_batch_requests(self, lit_api: Any, request_queue: Any, transport: Any) -> Any:
        transport.flush()  # The answers of the batch before.
        taken: list[Any] | None = []
        while taken == []:
            try:
                is_leaving = lit_api.door.poll()
                if is_leaving:
                    request_queue.end(lit_api.number)
                    taken = None
                else:
                    taken = request_queue.take(lit_api.number, *lit_api.batch_bounds)
            except (EOFError, OSError):  # The server is no more.
                taken = None
        batch = SimpleQueue()
        for request in [_STOP] if taken is None else taken:
            batch.put(request)
        return super().get_batch_requests(lit_api, batch, transport)
