"""FastAPI by hand: ``serve_fastapi KIND MODEL PORT predict|function``.

A function that is not async runs in one of Starlette's threads, so that requests do not wait for
each other at the door.
"""

from __future__ import annotations

import sys

import fastapi
import uvicorn
from pydantic import BaseModel
from tensorflow import keras

from benchmarks.programs import served

_KIND, _MODEL, _PORT, _WAY = sys.argv[1:]
_model = keras.models.load_model(_MODEL)
_read, _function = served.READERS[_KIND], served.traced(_model)
app = fastapi.FastAPI()


class Asked(BaseModel):
    instances: list


@app.post("/predict")
def predict(asked: Asked) -> dict[str, list]:
    x = _read(asked.instances)
    rows = _model.predict(x, verbose=0) if _WAY == "predict" else _function(x).numpy()
    return {"predictions": rows.tolist()}


uvicorn.run(app, host="127.0.0.1", port=int(_PORT), log_level="warning")
