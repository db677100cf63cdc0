"""FastAPI by hand: ``serve_fastapi KIND MODEL PORT predict|function``.

A function that is not async runs in one of Starlette's threads, so that requests do not wait for
each other at the door. Keras' predict has state in the model: one thread at a time asks it.
"""

from __future__ import annotations

import sys
import threading

import fastapi
import uvicorn
from pydantic import BaseModel
from tensorflow import keras

from benchmarks.programs import served

_KIND, _MODEL, _PORT, _WAY = sys.argv[1:]
_model = keras.models.load_model(_MODEL)
_read, _function = served.READERS[_KIND], served.traced(_model)
app = fastapi.FastAPI()
_one_at_a_time = threading.Lock()


class Asked(BaseModel):
    instances: list


@app.post("/predict")
def predict(asked: Asked) -> dict[str, list]:
    x = _read(asked.instances)
    if _WAY == "predict":
        with _one_at_a_time:
            rows = _model.predict(x, verbose=0)
    else:
        rows = _function(x).numpy()
    return {"predictions": rows.tolist()}


uvicorn.run(app, host="127.0.0.1", port=int(_PORT), log_level="warning")
