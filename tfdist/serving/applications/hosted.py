"""A model behind its addresses within one process, whatever server brings the requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from tfdist.compat import follow_program
from tfdist.records.writing.instances import InstanceError
from tfdist.serving.applications.hosting import Hosting
from tfdist.serving.bodies import RefusedError
from tfdist.serving.routes import Door, Routes
from tfdist.training.engine import model_path


class Hosted:
    """A model with its weights, and an app that asks it.

    Args:
        folder: see ``Hosting``.

    Attributes:
        app: takes requests, each answered for itself.
    """

    def __init__(self, folder: Path):
        self.hosting = Hosting.read(folder)
        served = self.hosting.served
        # Several replicas may share a GPU, which the first would have alone.
        os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
        follow_program(os.environ, model_path.parts(served.model)[0], served.weights)
        # After what says which Keras it is to be.
        from tfdist.serving.handler import Handler

        self._handler = Handler(served, self.hosting.max_batch, "single", {})
        self.app = FastAPI(openapi_url=None)
        Routes(served, Door(body_bytes=self.hosting.body_bytes)).add(self.app, self)

    def admitted(self) -> AbstractContextManager[None]:
        """Encloses a request: the server in front has counted it."""
        return contextlib.nullcontext()

    async def ask(self, records: list[bytes] | None) -> Any:
        """Returns what the model says of some records; of None, what its outputs are.

        Raises:
            RefusedError: not in time.
        """
        if records is None:
            return self._handler.outputs
        try:
            async with asyncio.timeout(self.hosting.timeout_s):
                found = await self.answered(records)
        except TimeoutError:
            raise RefusedError(504, "no answer in time") from None
        return str(found) if isinstance(found, InstanceError) else found

    async def answered(self, records: list[bytes]) -> Any:
        """Returns the answer to one request, see ``Handler.predict``."""
        return (await self.together([records]))[0]

    async def together(self, requests: list[list[bytes]]) -> list[Any]:
        """Returns the answers to some requests, predicted together."""
        return await asyncio.to_thread(self._handler.predict, requests)
