"""``tfdist verify`` as a user runs it, with real processes."""

from __future__ import annotations

import pytest
from tiers import long

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def verify(run_cli, shards, model_file):
    def run(*options: str, model: str = "mlp"):
        where = ("--model", f"{model_file}:{model}", "--data", shards)
        return run_cli("verify", *where, "--steps", 6, "--global-batch-size", 32, *options)

    return run


@pytest.mark.parametrize(
    "options",
    [
        ("--strategy", "horovod", "--workers", "2"),
        *long(
            (("--strategy", "mirrored", "-o", "devices=2"),),
            (("--strategy", "pipeline", "-o", "replicas=multi_worker", "--workers", "2"),),
            (("--strategy", "mesh", "-o", "model=2", "-o", "replicas=horovod", "--workers", "2"),),
        ),
    ],
)
def test_an_exact_strategy_passes(verify, options):
    done = verify(*options)
    assert done.returncode == 0, done.stderr
    assert "dense" in done.stdout
    assert " is equal" in done.stdout
    assert done.stderr == ""


def test_a_strategy_that_is_not_exact_fails_and_names_the_cause(verify):
    done = verify("--strategy", "mirrored", "-o", "devices=2", model="with_dropout")
    assert done.returncode == 1, done.stderr
    assert "replicas differs" in done.stdout
    assert "layer 'dropout' draws other random numbers" in " ".join(done.stdout.split())


@pytest.mark.long
def test_an_option_that_rounds_is_the_cause_and_may_be_expected(verify):
    options = ("--strategy", "horovod", "-o", "compression=fp16", "--explain")
    done = verify(*options, "--expect", "different")
    assert done.returncode == 0, done.stdout + done.stderr
    told = " ".join(done.stdout.split())
    assert "differs, and must as it is set up (compression='fp16'" in told
    assert "Weights: apart after 1 step, first those of layer" in told
    assert "after 1" in done.stdout.splitlines()[1], "a column of the table"


@pytest.mark.long
def test_what_is_exact_is_not_what_was_expected(verify):
    done = verify("--strategy", "single", "--expect", "different")
    assert done.returncode == 1, done.stderr
    assert "--expect different, but it is one device's result" in done.stdout


def test_a_mistake_is_one_line(verify):
    done = verify("--strategy", "single", model="not_compiled")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.long
def test_an_asynchronous_strategy_is_checked_by_its_loss(verify):
    done = verify("--strategy", "parameter_server", "--workers", "2", "--ps", "1", "--steps", "24")
    told = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 2 workers is asynchronous, so only its loss is checked" in told
    assert "it is within the bound of" in told
