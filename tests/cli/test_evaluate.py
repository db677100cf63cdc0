"""``tfdist evaluate`` as a user runs it, with real processes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tensorflow import keras
from tiers import long

import tfdist
from tfdist.errors import OptionError
from tfdist.runs import evaluating
from tfdist.training.engine import model_path

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def run(model_file, shards, tmp_path):
    """The folder of a training: as far as others read it."""
    model = model_path.load(f"{model_file}:mlp")()
    model.train_on_batch(np.ones((4, 8)), np.arange(4) % 3)
    (tmp_path / "run").mkdir()
    model.save(tmp_path / "run/model.keras")
    asked = {"model": f"{model_file}:mlp", "data": str(shards), "splits": {}, "strategy": "single"}
    asked |= {"output": "run", "global_batch_size": 8, "seed": 0, "working_folder": str(tmp_path)}
    (tmp_path / "run/config.json").write_text(json.dumps(asked))
    return tmp_path / "run"


@pytest.mark.parametrize(
    "where",
    [*long("--strategy single"), "--strategy horovod --workers 2"],
    ids=["one", "two ranks"],
)
def test_numbers_are_those_of_one_device(run_cli, run, shards, tmp_path, where):
    """To the last record: batches of 7 do not divide them."""
    data = ("--data", shards / "validation", "--global-batch-size", 7)
    done = run_cli("evaluate", "run", *data, *where.split(), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout.splitlines()[-1])["evaluations"]
    model = keras.models.load_model(run / "model.keras")
    batches = tfdist.records.read(shards / "validation", batch_size=64)
    expected = model.evaluate(batches, verbose=0, return_dict=True)
    assert found["weights"] == "run/model.keras"
    split = tfdist.records.load_manifest(shards).splits["validation"]
    assert found["records"] == split.records
    assert found["metrics"] == pytest.approx(expected, abs=1e-5)


def test_several_stand_side_by_side(capsys):
    from tfdist.cli.evaluate import _print

    first = evaluating.Evaluation("a/model.keras", 1234, {"loss": 0.25})
    _print([first, evaluating.Evaluation("b.h5", 1234, {"loss": 0.5, "accuracy": 0.75})])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "1,234" in line]
    assert [[cell for cell in row if cell not in "│|"] for row in rows] == [
        ["a/model.keras", "1,234", "0.25"],
        ["b.h5", "1,234", "0.5", "0.75"],
    ]


def test_what_is_no_trained_model(run, tmp_path, monkeypatch):
    with pytest.raises(OptionError, match=r"trained models must be given\. Name a folder"):
        evaluating.find([], None)
    with pytest.raises(OptionError, match=r"a trained model must be a file.*nowhere, which is non"):
        evaluating.find([str(tmp_path / "nowhere")], None)
    with pytest.raises(OptionError, match=r"must be made in the folder that.*or give model"):
        evaluating.find([str(run)], None)
    assert evaluating.find([str(run)], "model.b:c")[0].model == "model.b:c"
    monkeypatch.chdir(tmp_path)
    assert evaluating.find(["run"], None) == evaluating.find(["run/model.keras"], None)
    (run / "config.json").unlink()
    with pytest.raises(OptionError, match=r"the function that makes it.*no config\.json beside it"):
        evaluating.find(["run"], None)
