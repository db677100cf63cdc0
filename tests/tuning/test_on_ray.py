"""Trials on a Ray cluster of two nodes, which are processes of this machine: lost, and killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import tfdist
from tfdist.errors import EngineMissingError, OptionError
from tfdist.runs.files import read_rows
from tfdist.runs.folder import RunFolder
from tfdist.tuning.on_ray import Share, connected, shares

EPOCHS = 60
_MODEL = """
from tensorflow import keras

def model_fn(width):
    layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(width, "relu")]
    model = keras.Sequential([*layers, keras.layers.Dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
"""


def test_a_trial_has_the_largest_share_with_which_all_run():
    nodes = [{"CPU": 8.0}, {"CPU": 4.0}, {"memory": 1e9}]
    assert shares(nodes, 1, 2) == [Share(8)]
    assert shares(nodes, 2, 2) == [Share(4)] * 2
    assert shares(nodes, 4, 2) == [Share(2)] * 4
    gpus = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 64.0}]
    assert shares(gpus, 3, 2) == [Share(2, 1)] * 3
    assert shares(gpus, 2, 1) == [Share(1, 2)] * 2


def test_what_does_not_fit_is_told():
    nodes = [{"CPU": 8.0}, {"CPU": 4.0}]
    with pytest.raises(OptionError, match=r"must have 3 CPUs.*parallel=5 on nodes.*parallel=3"):
        shares(nodes, 5, 3)
    with pytest.raises(OptionError, match=r"must have 9 CPUs of one node.*Give fewer workers"):
        shares(nodes, 1, 9)
    with pytest.raises(OptionError, match=r"must have 1 GPU of one node.*parallel=2"):
        shares([{"CPU": 8.0, "GPU": 2.0}], 3, 2)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(EngineMissingError, match=r"ray must be.*pip install 'tfdist\[ray\]'"),
        connected(10),
    ):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:here"])
def test_an_address_without_a_cluster_is_told(monkeypatch, address):
    pytest.importorskip("ray", reason="tfdist[ray] is not installed")
    monkeypatch.setenv("RAY_ADDRESS", address)
    told = rf"RAY_ADDRESS must name a Ray cluster that runs.*{address}"
    with pytest.raises(OptionError, match=told), connected(10):
        pass


def test_hosts_are_refused(tmp_path):
    tfdist.records.write("digits", tmp_path / "data", num_shards=4, split="train=5,validation=1")
    model = tmp_path / "model.py"
    model.write_text(_MODEL)
    with pytest.raises(OptionError, match="must have its processes on the node that Ray gives it"):
        tfdist.tune(
            *(f"{model}:model_fn", tmp_path / "data", tmp_path / "search"),
            space={"width": [8]},
            on="ray",
            hosts="a:1",
            strategy="horovod",
        )


@pytest.fixture
def cluster(monkeypatch) -> Iterator[Any]:
    pytest.importorskip("ray", reason="tfdist[ray] is not installed")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False}
    before = signal.getsignal(signal.SIGTERM)
    cluster = Cluster(initialize_head=True, head_node_args=head)
    signal.signal(signal.SIGTERM, before)  # Ray's own ends the tests when a node of it ends.
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


class Search:
    """A search of one long trial on the cluster."""

    def __init__(self, folder: Path, cluster: Any, output: str):
        tfdist.records.write("digits", folder / "data", num_shards=4, split="train=5,validation=1")
        (folder / "model.py").write_text(_MODEL)
        (folder / "space.yaml").write_text(json.dumps({"width": [8, 16]}))
        self._output = output
        command = [sys.executable, "-m", "tfdist", "tune", "--model", "model.py:model_fn"]
        command += ["--space", "space.yaml", "--data", "data", "--strategy", "single", "--json"]
        command += ["--epochs", str(EPOCHS), "--grace", str(EPOCHS)]
        command += ["--trials", "1", "--on", "ray"]
        self.process = subprocess.Popen(
            [*command, "--output", output],
            cwd=folder,
            env=os.environ | {"RAY_ADDRESS": cluster.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        # Ended by a limit, so that reading its events is not without one.
        self._limit = threading.Timer(240, self.process.kill)
        self._limit.start()

    def come_to(self, epoch: int) -> None:
        """Waits until its trial has come to an epoch."""
        for line in self.process.stdout:
            if (json.loads(line).get("epoch") or 0) >= epoch:
                return
        pytest.fail(self.process.stderr.read())

    def node_of_trial(self, cluster: Any) -> Any:
        """Returns the node whose raylet has started the trial's process."""
        above = {parent.pid for process in self.trial() for parent in process.parents()}
        (node,) = (
            node
            for node in cluster.worker_nodes
            if node.all_processes["raylet"][0].process.pid in above
        )
        return node

    def trial(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                if "tfdist.tuning.trial" in command and self._output in command[-1]:
                    found.append(process)
        return found

    def end(self) -> None:
        self._limit.cancel()
        self.process.kill()
        self.process.communicate()


@pytest.mark.long
@pytest.mark.timeout(280)
@pytest.mark.honest_start
def test_a_trial_whose_node_is_lost_goes_on_from_its_checkpoint_on_another(
    tmp_path, cluster, traces
):
    search = Search(tmp_path, cluster, traces.token)
    try:
        search.come_to(3)
        cluster.remove_node(search.node_of_trial(cluster), allow_graceful=False)
        rest, errors = search.process.communicate()
    finally:
        search.end()
    assert search.process.returncode == 0, errors
    told = [event["epoch"] for event in map(json.loads, rest.splitlines()) if event.get("epoch")]
    assert min(told) >= 3  # Not from the beginning.
    assert max(told) == EPOCHS
    assert len(read_rows(RunFolder(tmp_path / traces.token / "trials/000").history)) == EPOCHS


@pytest.mark.long
@pytest.mark.timeout(280)
@pytest.mark.honest_start
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_search_that_is_ended_ends_its_trials(tmp_path, cluster, traces, number, code):
    search = Search(tmp_path, cluster, traces.token)
    try:
        search.come_to(1)
        search.process.send_signal(number)
        _, errors = search.process.communicate(timeout=60)
        assert search.process.returncode == code, errors
        traces.wait_for(0)
    finally:
        search.end()
