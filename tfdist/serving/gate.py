"""The gate: a server answers as ``tfdist predict`` does, or it does not listen.

The first records of the validation split are predicted by ``tfdist predict``'s own processes, and
asked of the server over HTTP, from the records' own bytes: files of images, numbers, text.
"""

from __future__ import annotations

import base64
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import ModelError
from tfdist.launch.jobs import Where
from tfdist.records.format.encoding import value_of
from tfdist.records.format.manifest import load_manifest
from tfdist.records.format.schema import Feature, Schema
from tfdist.records.writing.instances import B64
from tfdist.records.writing.shard_folders import write_head
from tfdist.runs import predicting
from tfdist.serving.served import Served

_SPLIT = "validation"
_TOLERANCE = 1e-5
_WAIT_S = 120.0


def prepare(served: Served, count: int, folder: Path, tell: Callable[[str], None]) -> bool:
    """Writes what a server is to be asked. Returns whether there is something to compare.

    Args:
        count: of the records, at most; 0: none.
        folder: an empty one.
        tell: is told in one line why nothing is compared.
    """
    why = "--check 0" if count == 0 else _prepare(served, count, folder)
    if why is not None:
        tell(f"nothing was compared with `tfdist predict`: {why}")
    return why is None


def _prepare(served: Served, count: int, folder: Path) -> str | None:
    if served.trained_on is None:
        return "the shards of the training are not known"
    manifest = load_manifest(served.trained_on)
    if manifest.schema.is_sequence_example:
        return "records are SequenceExamples, which no request holds"
    split = _SPLIT if _SPLIT in manifest.splits else next(iter(manifest.splits))
    place = manifest.shard_folder(Path(served.trained_on))
    paths = [place / shard.file for shard in manifest.splits[split].shards]
    lacking = [path for path in paths if not path.is_file()]
    if lacking:
        return f"{lacking[0]} is not here"
    records = write_head(paths, manifest, split, count, folder / "shards")
    inputs = Schema(manifest.schema.of_role("input"))
    asked = {"split": split, "instances": [_instance(inputs, record) for record in records]}
    (folder / "asked.json").write_text(json.dumps(asked))
    return None


def expect(
    served: Served, folder: Path, expected: Path, stop: threading.Event | None = None
) -> None:
    """Writes what a server is to answer.

    Args:
        folder: that of ``prepare``.
        expected: a new file .npz.
        stop: see ``Job``.

    Raises:
        TfdistError: as ``tfdist predict`` does.
    """
    asked = json.loads((folder / "asked.json").read_text())
    predicting.carry_out(
        Where(strategy="single", options={}),
        model=served.model,
        weights=served.weights,
        data=str(folder / "shards" / asked["split"]),
        output=expected,
        global_batch_size=len(asked["instances"]),
        overwrite=False,
        trained_on=served.trained_on,
        pads_as_trained=False,  # Else an answer would depend on what else is asked meanwhile.
        stop=stop,
    )


def _instance(inputs: Schema, record: bytes) -> Any:
    """Returns what a request says for a record."""
    values = {feature.name: _sent(feature, record) for feature in inputs.features}
    return next(iter(values.values())) if len(values) == 1 else values


def _sent(feature: Feature, record: bytes) -> Any:
    value = value_of(record, feature)
    # In a table categories may be called as numbers: a number would be taken for its name.
    is_named = feature.classes is not None and feature.columns
    return feature.classes[int(value)] if is_named else _json(value)


def _json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {B64: base64.b64encode(value).decode()}
    return [_json(one) for one in value] if isinstance(value, list) else value.tolist()


class Exam:
    """What a server is asked, and what it is to answer.

    Args:
        folder: that of ``prepare``.
        expected: the file of ``expect``.
    """

    def __init__(self, folder: Path, expected: Path):
        asked = json.loads((folder / "asked.json").read_text())
        self.instances: list[Any] = asked["instances"]
        self._split = asked["split"]
        with np.load(expected, allow_pickle=False) as found:
            self._expected = {output: _as_answered(rows) for output, rows in found.items()}

    def place(self, number: int) -> str:
        """Returns which record an instance is."""
        return f"record {number} of the {self._split} split"

    def check(self, number: int, outputs: Any) -> None:
        """Checks the columns that answer one instance.

        Raises:
            ModelError: they are others than those of ``tfdist predict``.
        """
        answers = outputs if isinstance(outputs, dict) else {next(iter(self._expected)): outputs}
        for output, rows in self._expected.items():
            wanted = rows[number]
            if rows.dtype.kind == "U":
                if np.any(np.array(answers[output])[0] != wanted):
                    raise differs(self.place(number), f"'{output}'")
                continue
            answer = np.array(answers[output], np.float64)[0]
            if not np.allclose(answer, wanted, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                difference = np.abs(answer - wanted).max()
                raise differs(self.place(number), f"'{output}' by {difference:.3g}")


def compare(exam: Exam, address: str, name: str, token: str | None) -> None:
    """Asks the server at ``address`` over HTTP.

    Raises:
        ModelError: an answer is another one than that of ``tfdist predict``.
    """
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for number, instance in enumerate(exam.instances):
        request = urllib.request.Request(
            f"{address}/v1/models/{name}:predict",
            json.dumps({"inputs": _columns(instance)}).encode(),
            headers,
        )
        try:
            with direct.open(request, timeout=_WAIT_S) as response:
                outputs = json.load(response)["outputs"]
        except (OSError, HTTPException, ValueError) as error:
            is_told = isinstance(error, urllib.error.HTTPError)
            text = error.read(500).decode(errors="replace") if is_told else repr(error)
            raise differs(exam.place(number), text) from None
        exam.check(number, outputs)


def _as_answered(rows: np.ndarray) -> np.ndarray:
    """Returns rows of ``tfdist predict`` as a server's JSON has them: what is infinite is null."""
    if rows.dtype.kind == "U":
        return rows
    rows = rows.astype(np.float64)
    return np.where(np.isfinite(rows), rows, np.nan)


def _columns(instance: Any) -> Any:
    is_value = not isinstance(instance, dict) or set(instance) == {B64}
    return [instance] if is_value else {name: [value] for name, value in instance.items()}


def differs(place: str, found: str) -> ModelError:
    return ModelError(
        "a server must answer as `tfdist predict` does, to 1e-5",
        received=f"{place}: {' '.join(found.split())}",
        mend="Look at what the model draws or keeps from call to call; --check 0 compares nothing",
    )
