"""The deployment of Ray Serve: replicas that Ray starts, ends and sends requests to."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ray import serve

from tfdist.serving.applications.hosted import Hosted
from tfdist.serving.applications.hosting import MODEL, Hosting


class _Batched(Hosted):
    """Requests that come together are answered together, by Ray's own batches."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        batched = serve.batch(
            max_batch_size=self.hosting.max_batch, batch_wait_timeout_s=self.hosting.batch_wait_s
        )
        self._batched = batched(self.together)

    async def answered(self, records: list[bytes]) -> Any:
        return await self._batched(records)


@serve.deployment
@serve.ingress()
class Model:
    """A replica.

    Args:
        module: the program in the folder; where that lies, each node finds for itself.
    """

    def __init__(self, module: str):
        self._hosted = _Batched(_folder_of(module))

    def __serve_build_asgi_app__(self) -> Any:
        """Returns what Ray calls with each request."""
        return self._hosted.app


def application(module: str) -> serve.Application:
    """Returns the application of a folder that ``tfdist serve --to ray`` has written.

    Args:
        module: the program in it, by its name.
    """
    options = Hosting.read(_folder_of(module)).options
    return Model.options(**options).bind(module)


def _folder_of(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return Path(spec.origin).parent / MODEL
