"""The newest numbers of a training, in Prometheus' text format."""

from __future__ import annotations

import os
import re

import pytest

from tfdist.errors import OptionError
from tfdist.records.replacing import replacing
from tfdist.runs.metrics_file import MetricsFile

_LINE = re.compile(r'tfdist_training_\w+\{output="[^"\\]*(?:\\.[^"\\]*)*"(?:,\w+="\w+")*\} \S+')


def numbers(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(map(_LINE.fullmatch, lines)), lines
    return dict(line.removeprefix("tfdist_training_").rsplit(" ", 1) for line in lines)


def test_the_file_has_the_newest_numbers(tmp_path):
    path = tmp_path / "digits.prom"
    file = MetricsFile(path, 'runs/"digits"\\')
    file.take({"event": "ready", "epochs": 3, "steps_per_epoch": 4})
    file.take({"event": "step", "epoch": 1, "step": 2, "samples_per_s": 10.5})
    file.take({"event": "step", "epoch": 1, "step": None})
    metrics = {"loss": 0.5, "val_loss": float("nan"), "val_mse": float("inf")}
    file.take({"event": "epoch", "epoch": 1, "data_wait": 0.25, "metrics": metrics})
    used = {"cpu_cores": 1.5, "memory_peak_mib": 2.0, "energy_rapl_j": 8.0}
    for _ in range(2):
        file.take({"event": "resources", "rank": 1, "epoch": 1, "seconds": 2.0, **used})
    file.take({"event": "warning", "rank": 0, "text": "slow"})
    found = numbers(path.read_text())
    label = 'output="runs/\\"digits\\"\\\\"'
    expected = {"epoch": "1", "epochs": "3", "step": "2", "samples_per_second": "10.5"}
    expected |= {"data_wait_ratio": "0.25", "warnings_total": "1", "restarts_total": "0"}
    for name, value in expected.items():
        assert found[f"{name}{{{label}}}"] == value
    for name, value in (("loss", "0.5"), ("val_loss", "NaN"), ("val_mse", "+Inf")):
        assert found[f'metric{{{label},name="{name}"}}'] == value
    assert found[f'cpu_cores{{{label},rank="1"}}'] == "1.5"
    assert found[f'memory_peak_bytes{{{label},rank="1"}}'] == repr(2.0 * 2**20)
    assert found[f'energy_joules_total{{{label},rank="1",source="rapl"}}'] == "16.0"
    assert not any(name.startswith("gpu") for name in found)
    assert [p.name for p in tmp_path.iterdir()] == ["digits.prom"]
    text = path.read_text()
    assert text.count("# TYPE tfdist_training_metric gauge\n") == 1
    assert text.count("# TYPE tfdist_training_warnings_total counter\n") == 1


def test_a_file_that_cannot_be_written_is_one_warning(tmp_path, capsys):
    with pytest.raises(OptionError, match="must lie in a folder that exists"):
        MetricsFile(tmp_path / "nowhere" / "a.prom", "run")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError, match=r"regular file, but found .*pipe, a pipe or a device"):
        MetricsFile(tmp_path / "pipe", "run")
    with pytest.raises(OptionError, match="must be a regular file"), replacing(tmp_path / "pipe"):
        pytest.fail("nothing is to be written")
    (tmp_path / "pipe").unlink()
    (tmp_path / "a.prom").mkdir()
    file = MetricsFile(tmp_path / "a.prom", "run")
    file.take({"event": "ready", "epochs": 3})
    file.take({"event": "ready", "epochs": 3})
    assert capsys.readouterr().out.count("cannot be written, and the training goes on") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a.prom"]
