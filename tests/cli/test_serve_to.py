"""``tfdist serve --to``: what other servers take, of the same model."""

from __future__ import annotations

import importlib.util
import io
import json
import tarfile
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfdist.aws import evaluation
from tfdist.aws.rehearsal import serving
from tfdist.records.reading.stored import Stored

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def saved(shards, model_file, tmp_path) -> tf.keras.Model:
    """A model whose weights its function does not make, in model.keras."""
    spec = importlib.util.spec_from_file_location("models_to_serve", model_file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.mlp()
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(size=each.shape) for each in model.get_weights()])
    model.save(tmp_path / "model.keras")
    return model


@pytest.fixture
def serve_to(tfdist, saved, shards, model_file):
    def run(*given: str) -> tuple[int, str, str]:
        about = ("--model", f"{model_file}:mlp", "--trained-on", str(shards))
        return tfdist("serve", "model.keras", *about, "--to", *given)

    return run


@pytest.mark.parametrize(
    ("target", "options", "named"),
    [
        ("ray", ("--port", "1"), "--port beside --to ray"),
        ("ray", ("--replicas", "2"), "--replicas beside --to ray"),
        ("ray", ("-o", "stages=2"), "-o beside --to ray"),
        ("tf-serving", ("--max-batch", "2"), "--max-batch beside --to tf-serving"),
        ("sagemaker", ("--name", "a"), "--name beside --to sagemaker"),
    ],
)
def test_what_another_server_has_no_use_for_is_one_line(tfdist, target, options, named):
    code, told, errors = tfdist("serve", "runs/none", "--to", target, "out", *options)
    assert (code, told) == (2, "")
    rule = f"tfdist: --to {target} must go with options that its server has"
    assert errors == f"{rule}, but found {named}. Leave it out.\n"


def test_to_tf_serving_is_what_export_writes(serve_to, saved, tmp_path):
    for version in ("1", "2"):
        code, told, errors = serve_to("tf-serving", "mlp")
        assert code == 0, errors
        assert f"written {tmp_path / 'mlp' / version}: version {version} of mlp" in told
    served = tf.saved_model.load(str(tmp_path / "mlp" / "2")).signatures["serving_default"]
    x = np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32)
    (found,) = served(x=tf.constant(x)).values()
    np.testing.assert_allclose(found, saved.predict(x, verbose=0), atol=1e-6)


def test_to_sagemaker_is_what_its_container_serves_and_evaluates(
    serve_to, saved, shards, tmp_path, capsys
):
    code, told, errors = serve_to("sagemaker", "out")
    assert code == 0, errors
    assert "written out/model.tar.gz: 40 records within" in told
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.tar.gz"]
    with tarfile.open(tmp_path / "out" / "model.tar.gz") as packed:
        packed.extractall(tmp_path / "there", filter="data")
    there = tmp_path / "there"
    assert serving.find_models(there) == [there]
    # As the container does it: inference.py around the model's answer.
    handlers = serving.handlers(there)
    x = np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32)
    context = SimpleNamespace(request_content_type="application/jsonlines", accept_header=None)
    lines = "".join(f"{json.dumps(row.tolist())}\n" for row in x)
    body = handlers.input_handler(io.BytesIO(lines.encode()), context)
    answer, _ = handlers.output_handler(serving.Served(there).answer(body), context)
    found = json.loads(answer)["predictions"]
    np.testing.assert_allclose(found, saved.predict(x, verbose=0), atol=1e-6)
    # As an evaluation step does it.
    stored = Stored(manifest=shards, split="test", folder=shards)
    (report,) = evaluation.evaluate(there, stored).values()
    assert 0 <= report["accuracy"]["value"] <= 1
    assert (there / "code" / "requirements.txt").read_text().endswith("crc32c>=2.3\n")
    code, _, errors = serve_to("sagemaker", "out")
    assert code == 2
    assert "model.tar.gz must be a new file" in errors
