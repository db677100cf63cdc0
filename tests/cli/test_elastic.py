"""An elastic training as a user rehearses it."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.honest_start, pytest.mark.timeout(280)]


@pytest.mark.long
def test_a_rehearsal_goes_on_without_a_restart(run_cli, shards, model_file):
    done = run_cli(
        *("rehearse", "--strategy", "horovod", "--workers", 2, "--min-workers", 1),
        *("--model", f"{model_file}:mlp", "--data", shards, "--global-batch-size", 64),
        *("--epochs", 2, "--kill", "rank=0,step=6", "-o", "commit_every_steps=2"),
        timeout_s=260,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 was lost" in done.stdout
    assert "horovod survives this" in done.stdout
    assert "rank 0 on localhost was lost (exit code 137 (SIGKILL)" in done.stderr
    assert "going on with 1 worker" in done.stderr
    assert "restart" not in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_elastic_options_on_another_strategy(run_cli, shards, model_file, tmp_path):
    done = run_cli(
        *("train", "--strategy", "multi_worker", "--min-workers", 1),
        *("--model", f"{model_file}:mlp", "--data", shards, "--output", tmp_path / "run"),
    )
    assert done.returncode == 2
    assert "an elastic job must have strategy horovod" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
