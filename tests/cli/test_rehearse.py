"""``tfdist rehearse`` as a user runs it: real signals to real ranks."""

from __future__ import annotations

import json
import re

import pytest

from tfdist.cli.rehearse import Blow

pytestmark = pytest.mark.timeout(280)


@pytest.fixture
def rehearse(run_cli, shards, model_file):
    def run(*options: str):
        return run_cli(
            "rehearse",
            *("--model", f"{model_file}:mlp", "--data", shards, "--global-batch-size", 64),
            *("--epochs", 2, "--checkpoint-every", 2, *options),
            timeout_s=240,
        )

    return run


def test_the_verdict_is_a_table(rehearse):
    done = rehearse("--strategy", "mirrored", "--kill", "rank=0,step=5")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [line for line in done.stdout.splitlines() if "after step 5" in line]
    assert re.search(r"SIGKILL of rank 0 after step 5 .*SIGKILL.* \d+\.\d s .* \d+\.\d s", row)
    assert "mirrored survives this: all weights are those of the unbroken training" in done.stdout
    assert "restart 1 of 1" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_what_is_printed_meanwhile_is_not_in_the_json(tfdist, shards, model_file, monkeypatch):
    def train(config, where, story, title, restarts=0):
        print("[0] tfdist: tracing the first step of training of 'mlp' for 5 s so far")
        story.to_come.clear()
        story.blows += [Blow(fault, 0.0) for fault in config["faults"]]

    monkeypatch.setattr("tfdist.cli.rehearse._train", train)
    monkeypatch.setattr("tfdist.cli.rehearse.saved_weights.largest_difference", lambda *files: 0.0)
    what = ("--model", f"{model_file}:mlp", "--data", str(shards), "--workers", "2")
    code, out, err = tfdist("rehearse", *what, "--kill", "rank=0,step=2", "--json")
    assert (code, json.loads(out)["survived"]) == (0, True)
    assert "because 2 workers were asked for" in err
    assert err.count("so far") == 2


def test_a_step_beyond_the_end_is_refused_before_anything_is_trained(rehearse):
    done = rehearse("--strategy", "single", "--kill", "rank=0,step=9")
    assert done.returncode == 2
    assert "after one of the 8 steps of the training, but found rank=0,step=9" in done.stderr
    assert "epoch 1/2" not in done.stdout


def test_what_never_repeats_its_weights_is_not_rehearsed(rehearse):
    done = rehearse("--strategy", "parameter_server", "--kill", "rank=1,step=5")
    assert done.returncode == 2
    assert "parameter_server, which is asynchronous" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "a rehearsal must have a fault"),
        (
            ("--kill", "1,20"),
            "the part of --kill must be a known one, but found '1'. Choose one of rank, step",
        ),
        (("--kill", "rank=1,stpe=20"), "but found 'stpe'. Did you mean 'step'?"),
        (("--kill", "rank=1"), "--kill rank=1,step=20"),
        (("--kill", "rank=1,rank=1"), "--kill rank=1,step=20"),
        (("--stop", "rank=-1,step=3"), "--stop rank=1,step=20"),
        (("--stop", "rank=0,step=0"), "--stop rank=1,step=20"),
        (("--kill", "rank=7,step=5"), "rank 0 of strategy 'single', but found rank=7"),
    ],
)
def test_faults_that_cannot_be_read(rehearse, options, message):
    done = rehearse("--strategy", "single", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
