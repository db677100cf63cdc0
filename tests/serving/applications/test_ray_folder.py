"""The folder for Ray Serve: what is in it answers alone, and on a cluster of two nodes."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from tensorflow import keras

from tfdist.errors import EngineMissingError, OptionError
from tfdist.serving import gate, served
from tfdist.serving.applications import ray_folder
from tfdist.serving.applications.hosting import MODEL, Hosting
from tfdist.serving.scaling import Scaling

pytestmark = pytest.mark.timeout(300)
_ROOT = Path(__file__).parents[3]


def _hosting(run: Path, scaling: Scaling) -> Hosting:
    given = {"max_batch": 4, "batch_wait_s": 0.002, "body_bytes": 1 << 20, "timeout_s": 200.0}
    options = ray_folder.deployment_options(scaling, 4)
    # With a module beside it, which the folder has, too.
    (run.parent / "beside.py").write_text((run.parent / "model.py").read_text())
    (run.parent / "mine.py").write_text("from beside import model_fn\n")
    found = served.find(run, model=f"{run.parent / 'mine.py'}:model_fn", name=None)
    return Hosting(served=found, options=options, **given)


@pytest.fixture(scope="module")
def folder(run_folder, tmp_path_factory) -> Path:
    pytest.importorskip("ray.serve", reason="tfdist[ray] is not installed", exc_type=ImportError)
    told: list[str] = []
    folder = tmp_path_factory.mktemp("ray") / "app"
    hosting = _hosting(run_folder, Scaling(0, 3, 2.5, 5.0, 60.0))
    assert ray_folder.write(hosting, folder, 0, told.append) == 0
    assert told == ["nothing was compared with `tfdist predict`: --check 0"]
    assert not [*folder.rglob("__pycache__")], "of the rehearsal"
    return folder


def test_the_folder_has_all_that_another_machine_needs(folder, run_folder):
    # What another test of this process has imported from there is its own.
    written = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    files = {str(path.relative_to(folder)) for path in written}
    own = {f"{MODEL}/{name}" for name in ("mine.py", "beside.py", "model.keras", "serving.json")}
    assert files == {"app.py", "serve.yaml", "requirements.txt"} | own
    assert list(folder.parent.iterdir()) == [folder]
    told = (folder / MODEL / "serving.json").read_text()
    assert str(run_folder.parent) not in told
    config = yaml.safe_load((folder / "serve.yaml").read_text())
    (application,) = config["applications"]
    (deployment,) = application["deployments"]
    assert (application["name"], application["import_path"]) == ("lights", "app:app")
    assert deployment["max_ongoing_requests"] == 8
    scaling = deployment["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (0, 3)
    assert (scaling["upscale_delay_s"], scaling["downscale_delay_s"]) == (5.0, 60.0)
    assert scaling["target_ongoing_requests"] == 2.5
    pins = (folder / "requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", pin) for pin in pins)
    names = {pin.partition("==")[0] for pin in pins}
    assert {"tfdist", "tensorflow", "tf-keras", "ray", "fastapi", "pillow", "numpy"} <= names


def test_its_program_is_an_application_of_rays(folder, monkeypatch):
    """Ray's own schema takes its configuration, and Ray its program."""
    from ray.serve.schema import ServeDeploySchema

    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "app", raising=False)
    app = __import__("app").app
    config = ServeDeploySchema.model_validate(yaml.safe_load((folder / "serve.yaml").read_text()))
    (deployment,) = config.applications[0].deployments
    own = app._bound_deployment
    assert own.name == deployment.name
    assert own.max_ongoing_requests == deployment.max_ongoing_requests
    assert own._deployment_config.autoscaling_config.max_replicas == 3
    monkeypatch.delitem(sys.modules, "app")


def _photo(pixels: np.ndarray) -> dict[str, str]:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {"b64": base64.b64encode(file.getvalue()).decode()}


def test_it_answers_as_the_server_does(folder, run_folder):
    from starlette.testclient import TestClient

    from tfdist.serving.applications.hosted import Hosted

    photos = np.random.default_rng(1).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
    expected = keras.models.load_model(run_folder / "model.keras").predict(photos, verbose=0)
    client = TestClient(Hosted(folder / MODEL).app)
    place = "/v1/models/lights"
    instances = [_photo(photo) for photo in photos]
    found = client.post(f"{place}:predict", json={"instances": instances})
    assert found.status_code == 200, found.text
    np.testing.assert_allclose(found.json()["predictions"], expected, atol=1e-6)
    found = client.post(f"{place}/versions/1:predict", json={"inputs": instances[:1]})
    np.testing.assert_allclose(found.json()["outputs"], expected[:1], atol=1e-6)
    assert client.get(place).json()["model_version_status"][0]["state"] == "AVAILABLE"
    assert client.get(f"{place}/metadata").json()["tfdist"]["classes"] == ["dark", "light"]
    cut = _photo(np.random.default_rng(2).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    cut = {"b64": cut["b64"][:4000]}
    for body, error in (({"instances": [1]}, "instance 0"), ({"instances": [cut]}, "decoded")):
        found = client.post(f"{place}:predict", json=body)
        assert found.status_code == 400
        assert error in found.json()["error"]
    assert client.post(f"{place}:predict", content=b"1" * (1 << 21)).status_code == 413
    assert client.get("/metrics").status_code == 404  # Ray has its own.


def test_what_cannot_be_written_is_refused(run_folder, tmp_path, monkeypatch):
    hosting = _hosting(run_folder, Scaling(1, 1, 8.0, 5.0, 60.0))
    for place in (tmp_path, tmp_path / "none" / "app"):
        with pytest.raises(OptionError, match="must be a new one, in a folder that exists"):
            ray_folder.write(hosting, place, 0, print)
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(EngineMissingError, match=r"ray\[serve\] must be.*'tfdist\[ray\]'"):
        ray_folder.write(hosting, tmp_path / "app", 0, print)
    assert list(tmp_path.iterdir()) == []


# On a cluster ------------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Deployed:
    """The application on a cluster, as its dashboard tells of it."""

    def __init__(self, dashboard: str, address: str):
        self._dashboard, self.address = dashboard, address
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def replicas(self) -> int:
        """Returns how many answer, -1 before the application runs."""
        with self._open(f"{self._dashboard}/api/serve/applications/", timeout=60) as told:
            application = json.load(told)["applications"].get("lights", {})
        assert application.get("status") not in ("DEPLOY_FAILED", "UNHEALTHY"), application
        if application.get("status") != "RUNNING":
            return -1
        replicas = application["deployments"]["Model"]["replicas"]
        return sum(replica["state"] == "RUNNING" for replica in replicas)

    def status(self, body: bytes) -> int:
        """Returns the status of a request to predict that is refused."""
        with pytest.raises(urllib.error.HTTPError) as refused:
            self._open(f"{self.address}/v1/models/lights:predict", body, timeout=60)
        with refused.value as error:
            assert list(json.load(error)) == ["error"]
            return error.code

    def come_to(self, replicas: int) -> None:
        deadline = time.monotonic() + 300
        while (found := self.replicas()) != replicas:
            assert time.monotonic() < deadline, f"{found} replicas, and not {replicas}"
            time.sleep(0.2)


@pytest.fixture
def cluster(monkeypatch) -> Iterator[str]:
    """A cluster of two nodes beside its head; gives the address of its dashboard."""
    pytest.importorskip("ray.serve", reason="tfdist[ray] is not installed", exc_type=ImportError)
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(_ROOT), prepend=os.pathsep)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    port = _free_port()
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": port}
    before = signal.getsignal(signal.SIGTERM)
    cluster = Cluster(initialize_head=True, head_node_args=head)
    signal.signal(signal.SIGTERM, before)  # Ray's own ends the tests when a node of it ends.
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        yield f"http://127.0.0.1:{port}"
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def _clients(count: int, ask: Callable[[], None]) -> Iterator[list[Any]]:
    """Encloses so many clients, each of which asks again and again; gives what went wrong."""
    over, failures, asked = threading.Event(), [], []

    def run() -> None:
        while not over.is_set():
            try:
                ask()
                asked.append(1)
            except Exception as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert asked


@pytest.mark.long
@pytest.mark.honest_start
@pytest.mark.timeout(900)
def test_on_two_nodes_it_follows_the_load_and_no_request_fails(run_folder, tmp_path, cluster):
    folder, asked = tmp_path / "app", tmp_path / "asked"
    # Each node has room for one replica; the second one is wanted above 2 requests at a time.
    hosting = _hosting(run_folder, Scaling(0, 2, 2.0, 1.0, 3.0))
    assert ray_folder.write(hosting, folder, 2, print) == 2
    asked.mkdir()
    assert gate.prepare(hosting.served, 8, asked, print)
    gate.expect(hosting.served, asked, tmp_path / "expected.npz")
    exam = gate.Exam(asked, tmp_path / "expected.npz")
    assert len(exam.instances) == 4
    config = yaml.safe_load((folder / "serve.yaml").read_text())
    port = _free_port()
    config["http_options"]["port"] = port
    config["proxy_location"] = "HeadOnly"  # All nodes are on this machine.
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    program = Path(sys.executable).with_name("serve")
    subprocess.run(
        [program, "deploy", tmp_path / "serve.yaml", "--address", cluster], check=True, timeout=200
    )
    deployed = Deployed(cluster, f"http://127.0.0.1:{port}")
    deployed.come_to(1)

    def ask() -> None:
        gate.compare(exam, deployed.address, "lights", None)

    assert deployed.status(b'{"instances": [1]}') == 400
    assert deployed.status(b" " * (2 << 20)) == 413
    with _clients(1, ask) as failures:
        deployed.come_to(1)
    assert failures == []
    with _clients(12, ask) as failures:
        deployed.come_to(2)
    assert failures == []
    with _clients(1, ask) as failures:
        deployed.come_to(1)
    assert failures == []
    deployed.come_to(0)
    ask()  # Has one started, and waits for it.
