"""``tfdist rehearse`` as a user runs it: real signals to real ranks."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("strategy", ["single", "horovod"])
def test_a_killed_rank_costs_no_weight(rehearse, strategy):
    rank = 0 if strategy == "single" else 1
    done = rehearse("--strategy", strategy, "--kill", f"rank={rank},step=5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SIGKILL of rank {rank} after its step 5" in done.stdout
    assert "all processes ended" in done.stdout
    assert f"{strategy} survives this" in done.stdout
    assert "restart 1 of 1" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_stopped_rank_is_noticed(rehearse):
    options = ("--stop", "rank=1,step=5", "-o", "stall_timeout_s=4")
    done = rehearse("--strategy", "multi_worker", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "multi_worker survives this" in done.stdout
    assert "rank 0 on" in done.stderr
    assert "has waited for the others in epoch 2" in done.stderr


def test_a_fault_that_never_struck_is_said(rehearse):
    done = rehearse("--strategy", "single", "--kill", "rank=7,step=5")
    assert done.returncode == 1
    assert "no fault struck" in done.stdout


def test_what_never_repeats_its_weights_is_not_rehearsed(rehearse):
    done = rehearse("--strategy", "parameter_server", "--kill", "rank=1,step=5")
    assert done.returncode == 2
    assert "parameter_server, which is asynchronous" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "a rehearsal needs a fault"),
        (("--kill", "1,20"), "--kill rank=1,step=20"),
        (("--stop", "rank=0,step=0"), "--stop rank=1,step=20"),
    ],
)
def test_faults_that_cannot_be_read(rehearse, options, message):
    done = rehearse("--strategy", "single", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
