"""Fixtures that every room's tests share."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.requirements import Requirement

from tfdist.compat import prefer_keras_2

_TESTS = Path(__file__).parent
_ROOT = _TESTS.parent
#: Rooms whose tests look at the processes themselves; and some of each other room. Their programs
#: start as a user's do.
_AND_ALL_IN = (
    *("faults/", "launch/", "topology/", "examples/test_gpt.py"),
    "test_benchmarks.py",
)
_STARTED_COLD = (
    *(f"conformance/test_conformance.py::{row}" for row in ("single", "horovod")),
    *("training/test_fit.py::single", "runs/test_folder.py", "export/test_strategies.py::keras_3"),
)
#: Names the file to which each process of Python adds a byte as it starts: see sitecustomize.
_STARTED = "TFDIST_TESTS_STARTED"
#: Folder of the server from which programs start warm.
_WARM = pytest.StashKey[str]()

# What files of several folders import.
sys.path += [str(_TESTS), str(_TESTS / "quick_start")]
pytest_plugins = ["scenario_plugin", "running_order"]

import tiers  # noqa: E402
import zygote  # noqa: E402

# Before a test uses Keras, here or in a process that it starts.
prefer_keras_2(os.environ)
# For the processes that tests start, pytest-xdist's workers among them: this tfdist, wherever they
# run. A test that changes it has them start cold.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(_TESTS / "quick_start"), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from running_order import group_of

    for item in items:
        group = group_of(item)
        if group in _STARTED_COLD or group.startswith(_AND_ALL_IN):
            item.add_marker(pytest.mark.honest_start)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cold-starts",
        action="store_true",
        help="has the programs of tests import TensorFlow each for itself: see quick_start",
    )


def pytest_configure(config: pytest.Config) -> None:
    tiers.tell(config)
    if not hasattr(config, "workerinput"):
        number, os.environ[_STARTED] = tempfile.mkstemp(prefix="started-")
        os.close(number)
        config.add_cleanup(functools.partial(os.unlink, os.environ[_STARTED]))
    if not (config.option.cold_starts or config.option.collectonly or _is_controller(config)):
        folder = tempfile.mkdtemp(prefix="zygote-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.stash[_WARM] = folder
        zygote.Start(folder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A test may have ended a run of pytest in this process, and its file with it."""
    with contextlib.suppress(OSError):
        count = os.path.getsize(os.environ[_STARTED])
        terminalreporter.write_line(f"{count} processes of Python were started")


def _is_controller(config: pytest.Config) -> bool:
    """Whether the workers of pytest-xdist run the tests, and not this process."""
    return bool(config.getoption("tx", None)) and not hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Has programs start warm where the test allows it; and processes hear Ctrl-C: a shell or a
    library may have had this one ignore it."""
    os.environ.pop(zygote.VARIABLE, None)
    is_warm = _WARM in item.config.stash and not item.get_closest_marker("honest_start")
    if is_warm:
        os.environ[zygote.VARIABLE] = item.config.stash[_WARM]
    if "tensorflow" in sys.modules:
        zygote.improve_graphs(not is_warm)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pinned() -> Callable[[str], dict[str, str]]:
    """Gives name -> version of what `make setup` installs for a lane on this Python."""

    def of_lane(lane: str) -> dict[str, str]:
        found: dict[str, str] = {}
        folder = _ROOT / "requirements"
        for path in (*folder.glob("*.txt"), folder / "lanes" / f"{lane}.txt"):
            pins = [Requirement(line) for line in path.read_text().splitlines() if line[0] != "#"]
            for pin in pins:
                if pin.marker is None or pin.marker.evaluate():
                    assert pin.name not in found, f"{pin.name} is pinned twice"
                    found[pin.name] = str(pin.specifier).removeprefix("==")
        return found

    return of_lane


@pytest.fixture
def shell_environ() -> dict[str, str]:
    """The environment of a user's shell: jax, which TensorFlow imports, adds to this process's."""
    return {key: value for key, value in os.environ.items() if key != "TF_CPP_MIN_LOG_LEVEL"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a checkout, where examples and scripts are links."""
    source = tmp_path_factory.mktemp("checkout")
    skipped = shutil.ignore_patterns("*.pyc", "__pycache__")
    for name in ("tfdist", "examples", "sagemaker"):
        shutil.copytree(_ROOT / name, source / name, symlinks=True, ignore=skipped)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(_ROOT / name, source)
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"),
            *("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, source),
        ],
        check=True,
        timeout=120,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def s3_server() -> Iterator[Any]:
    """The client of an S3 server on this machine, which has the bucket "bucket"."""
    import s3fs

    from tfdist.aws import sessions

    with sessions.loopback("us-east-1", "bucket") as (session, _):
        s3fs.S3FileSystem.clear_instance_cache()  # It keeps the address of another file's server.
        yield session.client("s3")


@pytest.fixture(scope="module")
def gcs_server() -> Iterator[str]:
    """The address of a Google Cloud Storage on this machine, which has the bucket "bucket"."""
    pytest.importorskip("gcsfs", reason="not in this lane")
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    address = f"http://127.0.0.1:{server._api._httpd.server_port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", address)
        # The stand-in tells no bucket's kind: gcsfs would look for one on Google's own machines.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        patch.setenv("NO_GCE_CHECK", "true")
        import gcsfs

        gcsfs.GCSFileSystem.clear_instance_cache()
        yield address
        gcsfs.GCSFileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture
def emptied_bucket(s3_server: Any) -> None:
    """The bucket of ``s3_server``, empty."""
    for item in s3_server.list_objects_v2(Bucket="bucket").get("Contents", ()):
        s3_server.delete_object(Bucket="bucket", Key=item["Key"])


@pytest.fixture
def run_cli(shell_environ: dict[str, str]) -> Callable[..., subprocess.CompletedProcess]:
    """Runs ``tfdist`` in a process of its own: ``run_cli("launch", ..., cwd=..., env=...)``."""

    def run(
        *arguments: object, timeout_s: float = 120, env: dict[str, str] = shell_environ, **options
    ) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "tfdist", *map(str, arguments)],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            **options,
        )

    return run


def open_to_all(processes: Iterable[psutil.Process]) -> set[str]:
    """Returns the programs that listen on more than the loopback interface."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections(kind="tcp"):
                if connection.status != psutil.CONN_LISTEN:
                    continue
                address = ipaddress.ip_address(connection.laddr.ip)
                if not (getattr(address, "ipv4_mapped", None) or address).is_loopback:
                    found.add(os.path.basename(process.cmdline()[0]))
    return found


@pytest.fixture
def listening_on_all() -> Callable[[Iterable[psutil.Process]], set[str]]:
    return open_to_all


class Traces:
    """Finds the processes that carry this test's token in an argument, as in a path."""

    def __init__(self) -> None:
        self.token = f"token-{uuid.uuid4().hex}"

    def alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                carries = any(self.token in argument for argument in process.cmdline())
                if carries and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def listening_on_all(self) -> set[str]:
        """Returns the programs among them that listen on more than the loopback interface."""
        return open_to_all(self.alive())

    def wait_for(self, count: int, timeout_s: float = 30) -> list[psutil.Process]:
        """Waits until exactly ``count`` such processes live; fails when that does not come."""
        deadline = time.monotonic() + timeout_s
        while len(alive := self.alive()) != count:
            assert time.monotonic() < deadline, [process.cmdline() for process in alive]
            time.sleep(0.05)
        return alive


@pytest.fixture
def traces():
    """Give ``traces.token`` to a process as an argument; what is left of it is killed."""
    traces = Traces()
    yield traces
    for process in traces.alive():
        process.kill()
