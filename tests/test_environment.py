"""The one environment of `make setup` holds every engine; each in a process of its own."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

from tfdist.launch import local, supervisor

REQUIREMENTS = Path(__file__).parent.parent / "requirements"

IMPORTS = {
    "tensorflow": "import tensorflow as tf; assert tf.keras.Model",
    "horovod": "import horovod.tensorflow as h; assert h.mpi_built() and h.gloo_built()",
    "mesh_tensorflow": (
        "from tfdist.compat import import_mesh_tensorflow as load; assert load().einsum"
    ),
    "tensorflow_federated": "import tensorflow_federated as tff; assert tff.federated_sum",
}


@pytest.mark.parametrize("engine", IMPORTS)
def test_every_engine_imports(engine):
    lines: list[str] = []
    # Under the supervisor, which ends the children that TensorFlow Federated leaves behind.
    outcome = supervisor.run(
        local.job([sys.executable, "-c", IMPORTS[engine]]),
        on_line=lambda rank, stream, text: lines.append(text),
    )
    assert outcome.exit_code == 0, lines


def pins() -> dict[str, str]:
    found = {}
    for path in REQUIREMENTS.glob("*.txt"):
        for line in path.read_text().splitlines():
            if not line.startswith("#"):
                name, version = line.split("==")
                assert name not in found, f"{name} is pinned twice"
                found[name] = version
    return found


def test_what_is_installed_is_what_is_pinned():
    installed = {name: importlib.metadata.version(name) for name in pins()}
    assert installed == pins()


def test_a_pin_is_a_name_and_a_version_only():
    for path in REQUIREMENTS.glob("*.txt"):
        for line in path.read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", line), line
