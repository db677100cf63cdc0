"""MLflow and Weights & Biases hear of a training: stand-ins always, themselves where installed."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from tfdist.errors import EngineMissingError, OptionError
from tfdist.runs.progress import Silent
from tfdist.runs.trackers import tracked

_EPOCHS = [{"loss": 0.5, "val_loss": 0.25}, {"loss": 0.25, "val_loss": float("nan")}]


def train(config: dict, fails: bool = False) -> None:
    progress = Silent(2)
    settings = {"output": "runs/digits", "epochs": 2, "lr": None, "options": {"devices": 2}}
    with tracked(settings | config, progress) as last:
        for number, metrics in enumerate(_EPOCHS, start=1):
            row = {"epoch": number, "seconds": 2.0, "samples_per_s": 10.0, **metrics}
            progress.take(0, {"event": "epoch", "row": row})
            progress.take(1, {"event": "epoch", "row": row})  # Of another rank: not told.
        if fails:
            raise KeyboardInterrupt
        last["test_loss"] = 0.125


@pytest.fixture
def heard(monkeypatch):
    """Stand-ins for both packages, and the calls that they hear."""
    calls = []

    def hear(name, result=None):
        return lambda *args, **options: calls.append((name, args, options)) or result

    names = ("set_tracking_uri", "set_experiment", "start_run", "log_params", "log_metrics")
    mlflow = types.SimpleNamespace(**{name: hear(name) for name in (*names, "end_run")})
    run = types.SimpleNamespace(log=hear("log"), finish=hear("finish"))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=hear("init", run)))
    return calls


def test_mlflow(heard):
    train({"mlflow": "file:runs"})
    names = [name for name, *_ in heard]
    assert names[:4] == ["set_tracking_uri", "set_experiment", "start_run", "log_params"]
    assert heard[0][1] == ("file:runs",)
    assert heard[2][2] == {"run_name": "digits"}
    assert heard[3][1][0]["options"] == "{'devices': 2}"
    times = {"seconds": 2.0, "samples_per_s": 10.0}
    assert heard[4:] == [
        ("log_metrics", ({"loss": 0.5, "val_loss": 0.25, **times},), {"step": 1}),
        ("log_metrics", ({"loss": 0.25, **times},), {"step": 2}),
        ("log_metrics", ({"test_loss": 0.125},), {"step": 2}),
        ("end_run", ("FINISHED",), {}),
    ]


def test_wandb(heard, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    train({"wandb": ""})
    assert heard[0][2]["project"] == "tfdist"
    assert [(name, options) for name, _, options in heard[1:]] == [
        *(("log", {"step": 1}), ("log", {"step": 2}), ("log", {"step": 2})),
        ("finish", {"exit_code": 0}),
    ]


def test_a_training_that_fails(heard):
    with pytest.raises(KeyboardInterrupt):
        train({"wandb": "mine", "mlflow": ""}, fails=True)
    assert ("end_run", ("FAILED",), {}) in heard
    assert ("finish", (), {"exit_code": 1}) in heard
    assert "set_tracking_uri" not in [name for name, *_ in heard]


def test_a_service_that_fails_ends_no_training(heard, capsys, monkeypatch):
    def unreachable(*args, **options):
        raise ConnectionError("no route\nto it")

    monkeypatch.setattr(sys.modules["mlflow"], "log_metrics", unreachable)
    train({"mlflow": ""})
    said = capsys.readouterr().out
    assert said == "tfdist: warning: mlflow has failed, and the training goes on: no route\n"
    monkeypatch.setattr(sys.modules["mlflow"], "start_run", unreachable)
    with pytest.raises(OptionError, match="--mlflow must name a place where a run can begin"):
        train({"mlflow": "http://nowhere"})


@pytest.mark.parametrize("package", ["mlflow", "wandb"])
def test_a_package_that_is_missing_is_named(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EngineMissingError, match=rf"pip install 'tfdist\[{package}\]'"):
        train({package: ""})


def test_mlflow_itself(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    train({"mlflow": uri})
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("tfdist")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["epochs"] == "2"
    assert run.data.metrics["test_loss"] == 0.125
    told = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in told] == [(1, 0.5), (2, 0.25)]


def test_wandb_itself(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    train({"wandb": "mine"})
    assert wandb.run is None
    (folder,) = Path(tmp_path, "wandb").glob("offline-run-*")
    assert list(folder.glob("run-*.wandb"))
