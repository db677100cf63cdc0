"""The strategy that fits where a program finds itself."""

from __future__ import annotations

import tfdist
from tfdist.strategies.auto import choose, choose_for


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


def test_it_prints_what_it_chose_and_why(capsys, monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setenv("HOROVOD_RANK", "0")
    assert tfdist.strategy("auto", op="adasum").name == "horovod"
    printed = capsys.readouterr().out
    assert printed == "tfdist: strategy 'horovod', because gloo started this process as rank 0\n"
