"""TensorFlow is imported in a process of its own: this one may have it already."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tfdist.compat import versions
from tfdist.errors import EngineMissingError

_PROGRAM = """
import gc
from tfdist.compat import import_tensorflow
tf = import_tensorflow()
assert tf.reduce_sum(tf.ones(3)).numpy() == 3
assert gc.isenabled()
print(gc.get_freeze_count())
"""


def test_the_collector_runs_on_and_leaves_tensorflow_alone():
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) > 100_000


def versions_of(
    monkeypatch, tensorflow: str | None, keras: str | None, variable: str | None
) -> None:
    found = {"tensorflow": tensorflow, "tf-keras": keras}
    monkeypatch.setattr(versions, "_version", found.get)
    monkeypatch.setattr(versions, "sys", type("NothingImported", (), {"modules": {}}))
    monkeypatch.setattr(versions.os, "environ", {versions.VARIABLE: variable} if variable else {})


@pytest.mark.parametrize(
    "found", [("2.14.1", None, None), ("2.15.1", None, None), ("2.21.0", "2.21.0", "1")]
)
def test_what_tfdist_runs_on_is_taken(monkeypatch, found):
    versions_of(monkeypatch, *found)
    versions.check_versions()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ((None, None, None), ["TensorFlow 2.14 to 2.21 must be installed", "pip install"]),
        (("2.13.1", None, None), ["found 2.13.1", "'tensorflow>=2.14,<2.22'"]),
        (("2.22.0rc0", "2.22.0", "1"), ["found 2.22.0rc0"]),
        (("2.21.0", None, None), ["tf_keras 2.21", "found none", "'tf_keras~=2.21.0'"]),
        (("2.21.0", "2.20.1", "1"), ["tf_keras 2.21", "found 2.20.1"]),
        (("2.21.0", "2.21.0", "0"), ["TF_USE_LEGACY_KERAS must be 1", "found '0'"]),
    ],
)
def test_what_it_does_not_run_on_is_one_line(monkeypatch, found, words):
    versions_of(monkeypatch, *found)
    with pytest.raises(EngineMissingError) as raised:
        versions.check_versions()
    assert all(word in str(raised.value) for word in words), raised.value
    assert "\n" not in str(raised.value)


def test_keras_3_that_is_in_use_is_one_line():
    if importlib.util.find_spec("tf_keras") is None:
        pytest.skip("this TensorFlow has no Keras 3 (the modern lane tries it)")
    program = (
        "import tensorflow as tf; tf.keras.Model\n"
        "from tfdist.compat import check_versions; from tfdist.errors import TfdistError\n"
        "try: check_versions()\n"
        "except TfdistError as error: print(error)\n"
    )
    environ = {key: value for key, value in os.environ.items() if key != versions.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.startswith("tf.keras must be Keras 2 (tf_keras), but found Keras 3"), done
