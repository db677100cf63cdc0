"""Batch transform here: ``python -m tfdist.aws.rehearsal.serving REQUEST MODEL INPUT OUTPUT``.

What AWS's container and the transform do around TensorFlow Serving: the model is found in the
folder of what was in model.tar.gz, its code/inference.py is asked with so many whole records at a
time, and OUTPUT/NAME.out has the answers to INPUT/NAME. The SavedModel's signatures stand in for
TensorFlow Serving.
"""

from __future__ import annotations

import base64
import gzip
import importlib.util
import io
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tfdist.aws import entry
from tfdist.compat import import_tensorflow, keras
from tfdist.errors import DataError, ModelError

# Of a record of a TFRecord file: its length and checksum before it, its own checksum behind it.
_HEADER, _FOOTER = 12, 4


def find_models(folder: Path) -> list[Path]:
    """Returns the models as AWS's container finds them: folders of numbered SavedModels.

    The same rule as ``find_models`` in scripts/docker/tensorflow/inference/sagemaker/tfs_utils.py
    of aws/deep-learning-containers, of 2.20 and all before. Both 1/ and NAME/1/ are found; a
    multi-model endpoint looks into the folder itself alone, and so finds 1/ only.
    """
    bundles = [file.parent for file in folder.rglob("saved_model.pb")]
    return sorted({bundle.parent for bundle in bundles if bundle.name.isdecimal()})


class Served:
    """A model as TensorFlow Serving's REST interface answers for it.

    Raises:
        ModelError: there is none where AWS's container looks for it.
    """

    def __init__(self, folder: Path):
        os.environ.setdefault(keras.VARIABLE, keras.KERAS_3[0])
        self._tf = import_tensorflow()
        models = find_models(folder)
        if not models:
            raise ModelError(
                "model.tar.gz must have a SavedModel in a folder that is a number",
                received=", ".join(sorted(path.name for path in folder.iterdir())),
                mend="Have the training write it to SM_MODEL_DIR/1, as model.export does",
            )
        versions = [each for each in models[0].iterdir() if each.name.isdecimal()]
        newest = max(versions, key=lambda each: int(each.name))
        self._loaded = self._tf.saved_model.load(str(newest))

    def answer(self, body: str) -> SimpleNamespace:
        """Returns the answer to a request to predict: in rows ("instances") or columns."""
        request = json.loads(body)
        signature = self._loaded.signatures[request.get("signature_name", "serving_default")]
        specs = signature.structured_input_signature[1]
        columns = request.get("inputs", request.get("instances"))
        if "instances" in request and len(specs) > 1:
            columns = {name: [row[name] for row in columns] for name in specs}
        elif not isinstance(columns, dict):
            columns = {next(iter(specs)): columns}
        tensors = {
            name: self._tf.constant([_value(item) for item in column], specs[name].dtype)
            for name, column in columns.items()
        }
        outputs = {name: value.numpy().tolist() for name, value in signature(**tensors).items()}
        (only, *more) = outputs.values()
        found: Any = outputs if more else only
        if "inputs" in request:
            return _response({"outputs": found})
        rows = [dict(zip(outputs, row, strict=True)) for row in zip(*outputs.values(), strict=True)]
        return _response({"predictions": rows if more else only})


def _value(item: Any) -> Any:
    return base64.b64decode(item["b64"]) if isinstance(item, dict) else item


def _response(value: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(status_code=200, content=json.dumps(value).encode())


def handlers(folder: Path) -> ModuleType:
    """Returns the module code/inference.py of what was in model.tar.gz."""
    spec = importlib.util.spec_from_file_location("inference", folder / "code" / "inference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batches(data: bytes, most: int) -> Iterator[bytes]:
    """Yields whole TFRecords, with all around them, as many as fit into ``most`` bytes.

    Raises:
        DataError: a record that does not fit.
    """
    begun = end = 0
    while end < len(data):
        (length,) = struct.unpack_from("<Q", data, end)
        after = end + _HEADER + length + _FOOTER
        if after - end > most:
            raise DataError(
                "a record must fit into a request of transform.max_payload_mb",
                received=f"one of {after - end} bytes",
                mend="Choose a larger one, at most 100, or write smaller records",
            )
        if after - begun > most:
            yield data[begun:end]
            begun = end
        end = after
    if end > begun:
        yield data[begun:end]


def transform(request: dict[str, Any], model: Path, source: Path, target: Path) -> None:
    """Carries out a CreateTransformJob request on the files in ``source``."""
    wanted, inference = request["TransformInput"], handlers(model)
    served = Served(model)
    context = SimpleNamespace(
        request_content_type=wanted["ContentType"],
        accept_header=request["TransformOutput"]["Accept"],
    )
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if wanted["CompressionType"] == "Gzip":
            data = gzip.decompress(data)
        answers = []
        for batch in batches(data, request["MaxPayloadInMB"] << 20):
            body = inference.input_handler(io.BytesIO(batch), context)
            answers.append(inference.output_handler(served.answer(body), context)[0])
        (target / f"{path.name}.out").write_text("".join(answers))


def main(arguments: list[str]) -> None:
    request, *folders = arguments
    transform(json.loads(request), *map(Path, folders))


if __name__ == "__main__":
    entry.run(main, output_dir=None)
