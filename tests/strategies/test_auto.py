"""The strategy that fits where a program finds itself."""

from __future__ import annotations

import pytest

import tfdist
from tfdist.strategies import choose, choose_for
from tfdist.topology import tf_config


def test_the_number_of_gpus_decides():
    assert choose_for(0)[0] == "single"
    assert choose_for(1)[0] == "single"
    name, reason = choose_for(4)
    assert name == "mirrored"
    assert "4 GPUs" in reason


def test_a_launcher_means_horovod(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert choose() == ("horovod", "mpi started this process as rank 1")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "b"},
            "sagemaker names this process as worker",
        ),
        ({"TF_CONFIG": tf_config([("worker", "a:1"), ("worker", "b:1")], 0)}, "tf_config names"),
    ],
    ids=["sagemaker", "tf_config"],
)
def test_addresses_mean_multi_worker(monkeypatch, environ, expected):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    name, reason = choose()
    assert name == "multi_worker"
    assert expected in reason


def test_roles_beside_parameter_servers_mean_those(monkeypatch):
    cluster = [("chief", "a:1"), ("worker", "a:2"), ("ps", "a:3")]
    monkeypatch.setenv("TF_CONFIG", tf_config(cluster, 0))
    assert choose() == (
        "parameter_server",
        "tf_config names this process as chief, rank 0 of 3",
    )


def test_one_host_of_a_cluster_is_no_cluster(monkeypatch):
    monkeypatch.setenv("SM_HOSTS", '["algo-1"]')
    assert choose()[0] == "single"


def test_it_prints_what_it_chose_and_why(capsys, monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setenv("HOROVOD_RANK", "0")
    assert tfdist.strategy("auto", op="adasum").name == "horovod"
    printed = capsys.readouterr().out
    assert printed == "tfdist: strategy 'horovod', because gloo started this process as rank 0\n"
