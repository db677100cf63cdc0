"""What the folder of an application says of its model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfdist.errors import read_json
from tfdist.runs.files import write_json
from tfdist.serving.served import Served
from tfdist.training.engine import model_path

#: The folder of a model within that of its application.
MODEL = "model"
_FILE = "serving.json"


@dataclass(frozen=True)
class Hosting:
    """What ``serving.json`` of a folder says.

    Attributes:
        served: the model; its files are called as they are in the folder.
        max_batch: most requests together, and most rows of a forward pass.
        batch_wait_s: how long the first request of a batch waits for others.
        body_bytes: of a request, at most.
        timeout_s: until a request is given up.
        options: of the deployment, as the server's own configuration calls them.
    """

    served: Served
    max_batch: int
    batch_wait_s: float
    body_bytes: int
    timeout_s: float
    options: dict[str, Any]

    def write(self, folder: Path) -> None:
        write_json(folder / _FILE, {**vars(self), "served": self.served.to_json()})

    @classmethod
    def read(cls, folder: Path) -> Hosting:
        """Returns what the folder says, its files with their whole paths."""
        told = read_json((folder / _FILE).read_bytes())
        served = Served.from_json(told["served"])
        place, called = model_path.parts(served.model)
        model = f"{folder / place}:{called}" if place.endswith(".py") else served.model
        weights = folder / served.weights
        served = replace(served, model=model, file=weights, weights=weights)
        return cls(**{**told, "served": served})
