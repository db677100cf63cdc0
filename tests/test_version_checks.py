"""What stands between a user and an engine of other versions: every verb looks before it begins."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from tfdist.cli import main
from tfdist.compat import import_horovod, versions
from tfdist.errors import EngineMissingError

_VERBS = [
    *("init", "shard", "inspect", "train", "verify", "options", "export", "rehearse", "aws"),
    *("launch", "adopt", "predict", "evaluate", "plan", "bench", "tune", "trace", "merge"),
]


@pytest.mark.parametrize("verb", _VERBS)
def test_every_verb_that_does_something_is_refused_first(monkeypatch, verb):
    monkeypatch.setattr(versions, "tensorflow_version", lambda: "2.22.0")
    assert CliRunner().invoke(main.tfdist, [verb, "--help"]).exit_code == 0
    done = CliRunner().invoke(main.tfdist, [verb, "never", "looked", "at"])
    assert isinstance(done.exception, EngineMissingError), done.exception
    assert "found 2.22.0" in str(done.exception)


def test_the_verbs_that_mend_are_not_refused(monkeypatch):
    monkeypatch.setattr(versions, "tensorflow_version", lambda: "2.22.0")
    assert {*_VERBS, "install", "doctor"} == set(main._VERBS)
    assert CliRunner().invoke(main.tfdist, ["install", "mesh", "--dry-run"]).exit_code == 0
    assert "No such option" in str(CliRunner().invoke(main.tfdist, ["doctor", "--never"]).output)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ('{"tensorflow": "2.13.1", "dummy": "none"}', "built for TensorFlow 2.13.1, and this is"),
        ('{"dummy": "none"}', "built for no TensorFlow"),
    ],
)
def test_a_horovod_of_another_tensorflow_is_not_loaded(monkeypatch, tmp_path, metadata, words):
    (tmp_path / "horovod/tensorflow").mkdir(parents=True)
    (tmp_path / "horovod/__init__.py").touch()
    (tmp_path / "horovod/tensorflow/__init__.py").write_text("raise SystemExit('loaded')")
    (tmp_path / "horovod/metadata.json").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=words):
        import_horovod()
