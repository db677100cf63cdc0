"""``tfdist bench`` as a user runs it, with real processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tiers import long

pytestmark = pytest.mark.timeout(240)


def test_strategies_side_by_side(run_cli, model_file, shards, tmp_path):
    asked = ("--model", f"{model_file}:mlp", "--data", shards, "--workers", "1,2")
    more = ("--strategies", "single,horovod,single", "--rounds", 1, "--epochs", 3, "--json")
    done = run_cli("bench", *asked, *more, "--plot", "p.png", cwd=tmp_path, timeout_s=200)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    rows = {(row["strategy"], row["devices"]): row for row in told["rows"]}
    assert list(rows) == [("single", 1), ("horovod", 1), ("horovod", 2)]
    assert told["compared_with"] == "single on 1"
    for row in rows.values():
        assert len(row["epoch_seconds"]) == 2  # The first of three does not count.
        assert row["replicas"] == row["devices"]
        assert row["efficiency"] == pytest.approx(row["speed_up"] / row["devices"])
    # 200 records in an epoch.
    single = rows["single", 1]
    assert single["samples_per_s"] == pytest.approx(
        200 * sum(1 / s for s in single["epoch_seconds"]) / 2, rel=0.05
    )
    planned = {(row["strategy"], row["devices"]): row for row in told["planned"]["rows"]}
    powers = [2**power for power in range(7)]
    assert list(planned) == [("single", 1), *(("horovod", count) for count in powers)]
    assert [key for key, row in planned.items() if row["fitted"]] == [("single", 1), ("horovod", 2)]
    for key, row in rows.items():
        assert row["planned_samples_per_s"] == planned[key]["samples_per_s"]
    speed = planned["horovod", 1]["samples_per_s"]
    assert speed == pytest.approx(single["samples_per_s"])
    # [8, 16] and [16, 3] with their biases, in float32; each rank sends half of them, and takes it.
    assert planned["horovod", 2]["sent_bytes"] == 4 * (8 * 16 + 16 + 16 * 3 + 3)
    # The same training on one rank of horovod as on single.
    assert rows["horovod", 1]["metrics"] == pytest.approx(single["metrics"], abs=1e-5)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"p.png", "shards"}


@pytest.mark.long  # It takes 20 s.
def test_a_rank_that_is_killed_spoils_its_own_row_alone(
    model_file, shards, shell_environ, traces, tmp_path
):
    output = tmp_path / traces.token  # All of its processes name it.
    command = [sys.executable, "-m", "tfdist", "bench", "--json", "--output", output]
    asked = ["--model", f"{model_file}:slow", "--data", shards, "--strategies", "horovod"]
    more = ["--workers", "1,2", "--rounds", "1", "--epochs", "3", "--global-batch-size", "20"]
    environ = shell_environ | {"STEP_SECONDS": "0.1"}  # 10 steps in an epoch.
    killed, told = False, {}
    with subprocess.Popen(
        [*map(str, [*command, *asked, *more])],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as bench:
        for line in bench.stdout:
            told = json.loads(line)
            if not killed and told.get("row") == "horovod on 2" and told["of"]["event"] == "step":
                ranks = [
                    process
                    for process in traces.alive()
                    if process.cmdline()[1:3] == ["-m", "tfdist.runs.train_rank"]
                ]
                assert len(ranks) == 2
                ranks[1].kill()
                killed = True
    assert (killed, bench.returncode) == (True, 1)
    whole, broken = told["rows"]
    assert len(whole["epoch_seconds"]) == 2
    assert "ended with exit code 137 (SIGKILL)" in broken["failed"]
    traces.wait_for(0)


@pytest.mark.parametrize("way", ["gloo", *long("tensorflow")])
def test_sums_of_real_processes(run_cli, tmp_path, way):
    asked = ("--ways", way, "--sizes", "1KiB:4KiB")
    done = run_cli("bench", "allreduce", *asked, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["sums"]
    assert [(row["way"], row["bytes"]) for row in found] == [
        (way, 1024),
        (way, 4096),
    ]
    assert all(row["bus_bytes_per_s"] == row["bytes"] / row["seconds"] for row in found)


SINGLE = ["--strategies", "single"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--workers", "1,x"], "--workers must be whole numbers above 0"),
        ([*SINGLE, "--model", "resnet"], "resnet50v2, resnet152v2, mlp, transformer"),
        (["--strategies", "singel"], "single, mirrored, horovod"),
        ([*SINGLE, "--epochs", "1"], "epochs must be at least 2"),
        ([*SINGLE, "--epochs", "1", "--output", "new"], "epochs must be at least 2"),
        ([*SINGLE, "--data", "nowhere", "--output", "new"], "nowhere"),
        ([*SINGLE, "--model", "m", "--output", "new"], "resnet50v2, resnet152v2"),
        ([*SINGLE, "--data", "cifar-10-batches-py", "--output", "new"], "data_batch_1"),
        ([*SINGLE, "--model", "m.py:f"], "the file of a model must exist"),
        ([*SINGLE, "--plot", "p.jpg"], "a chart must be written to a .png file"),
        ([*SINGLE, "--output", "."], "--output must be a new folder"),
        (["allreduce", "--ways", "mpi,ring"], "mpi, gloo, tensorflow"),
        (["allreduce", "--sizes", "1"], "Write them as --sizes"),
    ],
)
def test_a_mistake_is_one_line(tfdist, tmp_path, asked, said):
    code, out, err = tfdist("bench", *asked)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
