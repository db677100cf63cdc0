"""What a shell completes, as click asks for it."""

from __future__ import annotations

import pytest
from click.shell_completion import ShellComplete, get_completion_class

from tfdist.cli.main import tfdist as command


def completed(args: str, incomplete: str = "") -> list[str]:
    complete = ShellComplete(command, {}, "tfdist", "_TFDIST_COMPLETE")
    return [item.value for item in complete.get_completions(args.split(), incomplete)]


def test_commands_and_their_options():
    assert completed("", "in") == ["init", "inspect", "install"]
    assert completed("train", "--early") == ["--early-stopping"]
    assert completed("train", "--js") == ["--json"]
    assert completed("train --controller") == ["mpi", "gloo"]


@pytest.mark.parametrize("args", ["train --strategy", "verify --strategy", "rehearse --strategy"])
def test_strategies(args):
    assert completed(args, "m") == ["mirrored", "multi_worker", "mesh"]
    assert completed(args, "a") == ["auto"]
    assert completed("launch --strategy", "a") == completed("options", "au") == []
    assert completed("options", "f") == ["federated"]


def test_options_of_the_strategy():
    assert completed("train --strategy mirrored -o", "devi") == ["devices=", "device_speeds="]
    assert completed("train --strategy pipeline --option", "sta") == ["stages="]
    assert completed("train -o", "dev") == completed("train --strategy auto -o", "dev") == []


def test_folders_and_splits(shards, monkeypatch):
    monkeypatch.chdir(shards.parent)
    assert completed("train --data", "sh") == ["shards/"]
    assert completed("train --data", "shards/") == [
        f"shards/{s}" for s in ("train", "validation", "test")
    ]
    assert completed("inspect", "shards/v") == ["shards/validation"]
    assert completed("export --data", "nowhere/") == completed("verify --data", "s3://b/") == []
    (shards / "manifest.json").write_text("{")
    assert completed("train --data", "shards/") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_of_the_shells(shell, monkeypatch):
    kind = get_completion_class(shell)
    monkeypatch.setattr(kind, "_check_version", staticmethod(lambda: None), raising=False)
    script = kind(command, {}, "tfdist", "_TFDIST_COMPLETE").source()
    assert f"_TFDIST_COMPLETE={shell}_complete" in script
