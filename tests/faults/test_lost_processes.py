"""Processes that die or hang at a random step: ``tfdist rehearse`` strikes, resumes and compares.

A strategy joins with its line in ``RANKS``; each rank of ``GRID`` holds a model that is divided.
One process alone, and checkpoints in parts: test_mishaps.py; a parameter server, whose trainings
cannot be compared: there and in test_stalls.py.
"""

from __future__ import annotations

import json

import pytest
from tiers import long

from tfdist.strategies import names_of

pytestmark = pytest.mark.timeout(580)

EPOCHS, STEPS = 3, 10
# strategy -> the ranks that are killed, and that which is stopped.
RANKS = {
    "horovod": ([1, 0], 1),
    "multi_worker": ([0, 1], 1),
}
GRID = "pipeline -o stages=2 -o microbatches=2 -o replicas=multi_worker -o shard=optimizer"


def test_each_strategy_of_several_processes_has_its_line():
    assert list(RANKS) == names_of(lambda spec: spec.launchers and not spec.has_servers)


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [("horovod", 1), *long(("horovod", 2), ("multi_worker", 2), (GRID, 1))],
)
def test_a_lost_process_costs_no_weight(run_cli, model, shards, rng, traces, strategy, kills):
    killed, stopped = RANKS.get(strategy, ([0], 1))
    killed = killed[-kills:]
    # Not an epoch's last: the first step of an evaluation, which traces, may take longer.
    within = [step for step in range(1, EPOCHS * STEPS) if step % STEPS]
    steps = sorted(rng.sample(within, len(killed) + 1))
    faults = [("--kill", rank, step) for rank, step in zip(killed, steps, strict=False)]
    faults.append(("--stop", stopped, steps[-1]))
    done = run_cli(
        *("rehearse", "--json", "--model", model, "--data", shards),
        *("--strategy", *strategy.split(), "--workers", 2),
        *("--epochs", EPOCHS, "--global-batch-size", 20, "--checkpoint-every", 3),
        *("--stall-timeout", 10),
        *(word for option, r, s in faults for word in (option, f"rank={r},step={s}")),
        timeout_s=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["survived"]
    assert verdict["largest_difference"] <= 1e-6
    assert [(f["rank"], f["step"]) for f in verdict["faults"]] == [f[1:] for f in faults]
    *kills, stop = (fault["reason"] for fault in verdict["faults"])
    assert all("SIGKILL" in reason for reason in kills), kills
    assert f"rank {stopped}" in stop
    if "report progress" in stop:  # Else its engine was faster.
        assert f"silence of rank {stopped}, " in stop
        assert "was last heard of in epoch" in stop
        assert "is stopped" in stop
    assert traces.alive() == []
