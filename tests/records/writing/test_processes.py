"""Work in several processes: its results in order, its errors, and that none is left."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a program of its own, without TensorFlow: what is forked here would have its threads.
_PROGRAM = """
import json, multiprocessing, os, sys
from pathlib import Path
from tfdist.errors import DataError
from tfdist.records import write
from tfdist.records.writing import column_shards, processes

folder = Path(sys.argv[1])
calls = []

def counted(jobs, work, **options):
    calls.append(len(jobs))
    return processes.run_in_processes(jobs, work, **options)

column_shards.run_in_processes = counted
rows = "".join(f"{n},word {n * n},{n % 3}\\n" for n in range(2000))
(folder / "table.csv").write_text("a,note,label\\n" + rows)
told = {"bytes": []}
clients = {"partition": "by:label", "compression": "gzip"}
for name, options in {"plain": {}, "clients": clients}.items():
    seen = []
    for workers in (1, 3):
        write(folder / "table.csv", folder / f"{name}{workers}", label="label", workers=workers,
              progress=lambda *now: seen.append(now), **options)
    first, second = ({path.name: path.read_bytes() for path in (folder / f"{name}{n}").iterdir()}
                     for n in (1, 3))
    told["bytes"].append([first == second, seen[-1]])
told["calls"] = list(calls)

def work(job, progress):
    progress(1)
    if job == "error":
        raise DataError("every job must be well", received=job, mend="Mend it")
    if job == "lost":
        os.kill(os.getpid(), 9)
    return job * 2

def run(*jobs):
    done, parts = [], []
    try:
        got = processes.run_in_processes(
            jobs, work, count=2, done=done.append, progress=parts.append)
        return [got, sorted(done), sum(parts)]
    except DataError as error:
        return str(error)

told["results"] = run("a", "b", "c", "d", "e")
told["none"] = run()
told["error"] = run("a", "error", "b", "c")
told["lost"] = run("a", "b", "lost", "c")
class Lost(column_shards.ShardFile):
    def write(self, data):
        if "train-00003" in self.path.name:
            os.kill(os.getpid(), 9)
        super().write(data)

real, column_shards.ShardFile = column_shards.ShardFile, Lost
try:
    write(folder / "table.csv", folder / "again", label="label", workers=2)
except DataError as error:
    told["kept"] = str(error)
column_shards.ShardFile = real
write(folder / "table.csv", folder / "again", label="label", workers=2, resume=True)
told["bytes"].append([all((folder / "again" / path.name).read_bytes() == path.read_bytes()
                          for path in (folder / "plain1").iterdir()), [2000, 2000]])
told["left"] = len(multiprocessing.active_children())
assert "tensorflow" not in sys.modules
print(json.dumps(told))
"""


@pytest.mark.timeout(120)
def test_processes(tmp_path):
    program = [sys.executable, "-c", _PROGRAM, str(tmp_path)]
    told = json.loads(
        subprocess.run(program, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1]
    )
    assert told["bytes"] == [[True, [2000, 2000]]] * 3
    assert told["calls"] == [8, 7]
    assert told["results"] == [["aa", "bb", "cc", "dd", "ee"], ["aa", "bb", "cc", "dd", "ee"], 5]
    assert told["none"] == [[], [], 0]
    assert told["error"] == "every job must be well, but found error. Mend it."
    assert "must reach its end, but found one that was ended by SIGKILL. If memory" in told["lost"]
    assert "ended by SIGKILL. If memory was short, give fewer workers=, and go on" in told["kept"]
    assert told["left"] == 0
