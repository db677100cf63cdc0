"""LitServe by hand: ``serve_litserve KIND MODEL PORT MAX_BATCH BATCH_WAIT_S``, an instance each."""

from __future__ import annotations

import sys
from typing import Any

import litserve

from benchmarks.programs import served


class Api(litserve.LitAPI):
    def __init__(self, kind: str, model: str, max_batch: int, wait_s: float):
        super().__init__(max_batch_size=max_batch, batch_timeout=wait_s)
        self._kind, self._model = kind, model

    def setup(self, device: str) -> None:
        from tensorflow import keras

        self._read = served.READERS[self._kind]
        self._function = served.traced(keras.models.load_model(self._model))

    def decode_request(self, request: dict[str, list]) -> Any:
        return request["instances"][0]

    def batch(self, inputs: list[Any]) -> Any:
        return self._read(inputs)

    def predict(self, x: Any) -> Any:
        return self._function(x).numpy()

    def unbatch(self, output: Any) -> list[Any]:
        return list(output)

    def encode_response(self, output: Any) -> dict[str, list]:
        return {"predictions": [output.tolist()]}


if __name__ == "__main__":
    kind, model, port, max_batch, wait_s = sys.argv[1:]
    server = litserve.LitServer(Api(kind, model, int(max_batch), float(wait_s)), accelerator="cpu")
    server.run(host="127.0.0.1", port=int(port), generate_client_file=False, log_level="warning")
