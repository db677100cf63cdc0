"""A stuck process ends in an error that names rank, host and place, within the deadline.

Until then nothing of the job listens on the network.

Here the strategies of one process, and a parameter server. The others: test_lost_processes.py; data
that never come: test_mishaps.py.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tfdist.records.writing.writer import write
from tfdist.strategies import REGISTRY
from tfdist.training.checkpoints import checkpoint_files

pytestmark = pytest.mark.timeout(200)

OPTIONS = {
    **{
        name: [word for option in spec.example.items() for word in ("-o", "{}={}".format(*option))]
        for name, spec in REGISTRY.items()
        if spec.example
    },
    "parameter_server": ["--workers", "2", "--ps", "1"],
}
# strategy -> the rank that is stopped, and where it is then.
STOPPED = {"parameter_server": (3, r"\(serving\)")}
#: Ranks of MPI, processes with TF_CONFIG, and one process: others stop as one of these does.
SHORT = ("horovod", "multi_worker", "mirrored")
MODEL = f"{Path(__file__).parents[1] / 'cli' / 'models.py'}:mlp"


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=() if name in SHORT else pytest.mark.long, id=name)
        for name in OPTIONS
    ],
)
def test_a_stopped_process_is_noticed_and_ended(
    strategy, records, ranks_of, listening_on_all, shell_environ, tmp_path
):
    clients = 3 if strategy == "federated" else None
    number, place = STOPPED.get(strategy, (0, "in epoch"))
    write(records, tmp_path / "shards", split="train=5,validation=1", clients=clients)
    command = [
        *(sys.executable, "-m", "tfdist", "train", "--strategy", strategy, *OPTIONS[strategy]),
        *("--model", MODEL, "--data", str(tmp_path / "shards"), "--output", str(tmp_path / "run")),
        *("--epochs", "9999", "--global-batch-size", "20", "--stall-timeout", "5"),
        *("--start-timeout", "40"),
    ]
    with (
        open(tmp_path / "stderr", "w+") as error,
        subprocess.Popen(
            command,
            env=shell_environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=error,
            text=True,
        ) as process,
    ):
        assert any(line.startswith("epoch 2/") for line in process.stdout)
        while len(checkpoint_files.finished(tmp_path / "run" / "checkpoints")) < 2:
            time.sleep(0.01)  # The writing of a checkpoint has a longer deadline.
        started = psutil.Process(process.pid).children(recursive=True)
        assert listening_on_all(started) == set()
        ranks_of(process)[number].suspend()
        process.stdout.read()
        assert process.wait(timeout=60) == 2
        error.seek(0)
        (line,) = error.read().splitlines()
    assert re.search("a running job must report progress at least every (5|45) s", line)
    assert re.search(f"rank {number} on {socket.gethostname()} was last heard of {place}", line)
    assert "and is stopped" in line
    assert [each for each in started if each.is_running()] == []


@pytest.mark.long
def test_a_rank_that_is_stopped_while_parts_are_written(run_cli, shell_environ, traces, tmp_path):
    """Nobody asks ranks of ``tfdist launch`` for progress, and MPI waits without a limit."""
    folder = tmp_path / traces.token
    # Horovod's own deadline, which such a rank blocks, is not for steps on a busy machine.
    patient = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "90",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "99",
    }
    done = run_cli(
        *("launch", "--strategy", "horovod", "--workers", 2, "--"),
        *(sys.executable, Path(__file__).with_name("stopped_writer.py"), folder),
        env=shell_environ | patient,
    )
    assert done.returncode == 1, done.stderr
    place = f"rank 0 on {socket.gethostname()} has waited for the others in the writing of ckpt-2"
    assert place in done.stderr
    assert checkpoint_files.finished(folder) == []
    assert traces.alive() == []
