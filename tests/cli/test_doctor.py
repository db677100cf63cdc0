from __future__ import annotations

import json
import sys

import pytest

from tfdist.launch import engines
from tfdist.launch.engines import Engine, Finding

WELL = Finding("good", version="1.0", imports=True, runs=True, gpus=["/gpu:0"], note="summed")
ILL = Finding("bad", problem="bad is not installed", mend="Run `make setup`")


@pytest.fixture
def doctor_with(monkeypatch, tfdist):
    def invoke(findings: list[Finding], *arguments: str):
        found = {finding.engine: finding for finding in findings}
        made_up = [Engine(name=name, distribution=name, mend="") for name in found]
        monkeypatch.setattr(engines, "ENGINES", made_up)
        monkeypatch.setattr(engines, "probe", lambda engine, run: found[engine.name])
        return tfdist("doctor", *arguments)

    return invoke


def test_all_is_well(doctor_with):
    code, out, _ = doctor_with([WELL])
    assert code == 0
    assert "good" in out
    assert "GPUs: /gpu:0" in out
    assert "TensorFlow 2." in out


def test_what_is_missing_comes_with_its_mend(doctor_with):
    code, out, _ = doctor_with([WELL, ILL])
    assert code == 1
    assert "bad: bad is not installed. Run `make setup`." in out


def test_json_is_complete(doctor_with):
    code, out, err = doctor_with([WELL, ILL], "--json")
    assert code == 1
    assert "bad: bad is not installed. Run `make setup`." in err
    told = json.loads(out)
    assert (told["ok"], told["gpus"]) == (False, ["/gpu:0"])
    assert told["tensorflow"].startswith("2.")
    assert told["keras"].startswith("2.")
    assert [engine["ok"] for engine in told["engines"]] == [True, False]
    assert told["engines"][1]["mend"] == "Run `make setup`"


def test_what_cores_do_at_once_is_told(doctor_with, monkeypatch):
    monkeypatch.setattr(engines, "cores_at_once", lambda: (4, 0.875))
    _, out, _ = doctor_with([WELL], "--run")
    assert "4 cores at once: each does 0.88 of what it does alone" in out
    _, out, _ = doctor_with([WELL], "--run", "--json")
    assert json.loads(out)["cores"] == {"count": 4, "at_once": 0.875}
    _, out, _ = doctor_with([WELL], "--json")
    assert json.loads(out)["cores"] is None


@pytest.mark.timeout(280)
def test_every_engine_takes_a_real_step(run_cli):
    done = run_cli("doctor", "--run", "--json", timeout_s=270)
    told = json.loads(done.stdout)
    assert [engine["engine"] for engine in told["engines"] if not engine["runs"]] == []
    assert (done.returncode, told["ok"]) == (0, True)
    assert all(engine["version"] for engine in told["engines"])
    assert told["cores"] is None or 0.05 < told["cores"]["at_once"] < 5


def test_an_engine_that_is_not_installed():
    absent = Engine(name="tensorflow", distribution="no-such-thing", mend="Install it")
    finding = engines.probe(absent, run=False)
    assert finding.problem == "no-such-thing is not installed"
    assert finding.mend == "Install it"


def test_an_engine_that_does_not_import(tmp_path, monkeypatch):
    (tmp_path / "mesh_tensorflow.py").write_text("raise ImportError('libfoo.so is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine = next(engine for engine in engines.ENGINES if engine.name == "mesh-tensorflow")
    finding = engines.probe(engine, run=False)
    assert (finding.imports, finding.ok) == (False, False)
    assert finding.problem == "ImportError: libfoo.so is missing"


def test_a_missing_mpirun(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    engine = next(engine for engine in engines.ENGINES if engine.name == "openmpi")
    finding = engines.probe(engine, run=True)
    assert (finding.runs, finding.ok) == (False, False)
    assert "must have the program mpirun" in finding.problem
