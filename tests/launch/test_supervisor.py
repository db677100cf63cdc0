"""The supervisor with real processes, under real mpirun and under tfdist's own launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import psutil
import pytest
from tiers import long

from tfdist.errors import LaunchError
from tfdist.launch import hosts, local, mpi, restarts, supervisor, tf_cluster
from tfdist.launch.supervisor import Job

pytestmark = pytest.mark.timeout(120)


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


class Sink:
    def __init__(self) -> None:
        self.lines: list = []
        self.events: list = []

    def on_line(self, rank: int | None, stream: str, text: str) -> None:
        self.lines.append((rank, stream, text))

    def on_event(self, rank: int, event: dict) -> None:
        self.events.append((rank, event))

    def run(self, job: Job) -> supervisor.Outcome:
        return supervisor.run(job, on_line=self.on_line, on_event=self.on_event)


def test_another_thread_may_have_a_job_ended():
    stop = threading.Event()
    code = "from tfdist.launch.events import emit; import os, time; "
    code += "emit({'event': 'here', 'pid': os.getpid()}); time.sleep(90)"
    job = dataclasses.replace(local.job(python(code)), stop=stop)
    pids = []

    def take(rank: int, event: dict) -> None:
        if event["event"] == "here":
            pids.append(event["pid"])
            stop.set()

    with pytest.raises(SystemExit):
        supervisor.run(job, on_line=Sink().on_line, on_event=take)
    assert len(pids) == 1
    assert not psutil.pid_exists(pids[0])


RANK = "import os, sys, time; from tfdist import topology; rank = topology.current().rank; "
BOTH = pytest.mark.parametrize("launcher", [mpi, tf_cluster], ids=["mpi", "own"])
# Ends nobody can ask for nicely: a daemon in a session of its own that ignores SIGTERM.
DAEMON = (
    "import signal, subprocess, sys; "
    "subprocess.Popen([sys.executable, '-c', 'import signal, time; "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)', sys.argv[1]], "
    "start_new_session=True); "
)


@BOTH
def test_lines_and_events_come_with_their_rank(launcher):
    code = RANK + (
        "from tfdist.launch.events import emit; "
        "print('out', rank); print('err', rank, file=sys.stderr); "
        "print('half', end='', flush=True); "
        "emit({'event': 'progress', 'step': rank}); print(' line')"
    )
    sink = Sink()
    outcome = sink.run(launcher.job(python(code), workers=2))
    assert outcome == supervisor.Outcome(0)
    assert sorted(sink.lines) == sorted(
        line
        for rank in (0, 1)
        for line in [
            (rank, "stdout", f"out {rank}"),
            (rank, "stdout", "half line"),
            (rank, "stderr", f"err {rank}"),
        ]
    )
    told = sorted((rank, event["event"], event.get("step")) for rank, event in sink.events)
    assert told == [
        (0, "progress", 0),
        (0, "started", None),
        (1, "progress", 1),
        (1, "started", None),
    ]


@pytest.mark.parametrize(
    ("end", "exit_code", "reason"),
    [
        ("sys.exit(3)", 3, "rank 1 ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 ended with exit code 137 (SIGKILL)"),
    ],
)
@BOTH
def test_the_first_failing_rank_is_named(launcher, end, exit_code, reason):
    code = RANK + f"print('rank', rank, flush=True); {end} if rank == 1 else time.sleep(600)"
    outcome = Sink().run(launcher.job(python(code), workers=2))
    assert outcome == supervisor.Outcome(exit_code, 1, ["rank 1"], reason)


@pytest.mark.skipif(hosts.physical_cores() < 2, reason="needs two cores")
@BOTH
def test_ranks_are_bound_to_cores_of_their_own(launcher):
    sink = Sink()
    sink.run(launcher.job(python("import os; print(sorted(os.sched_getaffinity(0)))"), workers=2))
    first, second = (set(json.loads(text)) for _, _, text in sink.lines)
    assert first
    assert second
    assert not first & second


def test_only_the_last_lines_are_kept():
    code = "import sys; [print('line', i) for i in range(100)]; sys.exit(5)"
    outcome = Sink().run(local.job(python(code)))
    assert outcome == supervisor.Outcome(
        5, 0, [f"line {i}" for i in range(80, 100)], "rank 0 ended with exit code 5"
    )


def test_a_single_process_ended_by_a_signal():
    outcome = Sink().run(local.job(python("import os; os.kill(os.getpid(), 15)")))
    assert (outcome.exit_code, outcome.failed_rank) == (143, 0)


def test_a_command_that_does_not_exist():
    outcome = Sink().run(local.job(["no-such-program"]))
    assert outcome.exit_code == 127
    assert outcome.last_lines == [
        "tfdist: cannot run 'no-such-program': No such file or directory",
    ]


@BOTH
def test_much_output_passes(launcher):
    code = RANK + "[print(rank, 'x' * 1000) for _ in range(5000)]"
    sink = Sink()
    assert sink.run(launcher.job(python(code), workers=2)).exit_code == 0
    assert sorted(sink.lines) == sorted(
        (rank, "stdout", f"{rank} {'x' * 1000}") for rank in (0, 1) for _ in range(5000)
    )


def test_a_rank_that_does_not_start_is_named(traces):
    # Started without the bootstrap, so that rank 1 can stay silent.
    code = RANK + "print('up') if rank == 0 else None; sys.stdout.flush(); time.sleep(600)"
    job = mpi.job([], workers=2, start_timeout_s=3)
    bare = job.command[: job.command.index(sys.executable)]
    job = dataclasses.replace(job, command=[*bare, *python(code, traces.token)])
    with pytest.raises(
        LaunchError, match=r"within 3 s, but found no sign of life from rank 1 of 2"
    ):
        Sink().run(job)
    assert traces.alive() == []


@pytest.mark.parametrize("launcher", [mpi, *long(tf_cluster)])
def test_a_rank_that_falls_silent_is_named(launcher, traces):
    code = RANK + (
        "from tfdist.launch.events import emit; emit({'event': 'ready'}); "
        "steps = range(10 if rank == 0 else 1); "
        "[(emit({'event': 'progress', 'epoch': 1, 'step': i}), time.sleep(0.2)) for i in steps]; "
        "print('waiting', flush=True); time.sleep(600)"
    )
    job = launcher.job(python(code, traces.token), workers=2, stall_timeout_s=3)
    sink = Sink()
    place = rf"rank 1 on {socket.gethostname()} was last heard of in epoch 2, step 0 \(progress\)"
    words = rf"first of rank 1, \d+ s ago: {place} \(last words: waiting\)"
    with pytest.raises(LaunchError, match=words):
        sink.run(job)
    assert (0, {"event": "progress", "epoch": 1, "step": 9}) in sink.events
    assert traces.alive() == []


@pytest.mark.long
def test_a_task_that_serves_is_not_called_silent(traces):
    code = RANK + (
        "from tfdist.launch.events import emit; "
        "rank == 0 and emit({'event': 'ready'}); time.sleep(600)"
    )
    job = tf_cluster.job(python(code, traces.token), workers=1, ps=1, stall_timeout_s=2)
    with pytest.raises(LaunchError, match="silence, first of rank 0,"):
        Sink().run(job)


@pytest.mark.parametrize(
    ("end", "exit_code"), [("os.kill(os.getpid(), 9)", 0), ("sys.exit(3)", 3)], ids=str
)
def test_only_a_rank_that_is_killed_may_be_lost(end, exit_code):
    code = RANK + f"{end} if rank == 1 else time.sleep(1); print('rank', rank)"
    sink = Sink()
    outcome = sink.run(tf_cluster.job(python(code), workers=1, ps=1))
    assert outcome.exit_code == exit_code
    assert (0, "stdout", "rank 0") in sink.lines or exit_code


def test_a_stopped_rank_is_named_though_all_fall_silent_at_once(traces):
    code = RANK + (
        "from tfdist.launch.events import emit; emit({'event': 'ready'}); "
        "os.kill(os.getpid(), 19) if rank == 1 else time.sleep(600)"
    )
    job = mpi.job(python(code, traces.token), workers=2, stall_timeout_s=2)
    with pytest.raises(
        LaunchError, match=r"silence of rank 1, .*last heard of \(ready\), and is stopped"
    ):
        Sink().run(job)
    assert traces.alive() == []


@pytest.mark.long
def test_a_stopped_rank_is_silent_however_loud_the_others_are(traces):
    """They may poll for it, or go on."""
    code = RANK + (
        "from tfdist.launch.events import emit; emit({'event': 'ready'})\n"
        "if rank == 1: os.kill(os.getpid(), 19)\n"
        "while True: print('on'); emit({'event': 'step', 'step': 1}); time.sleep(0.05)"
    )
    job = tf_cluster.job(python(code, traces.token), workers=2, stall_timeout_s=3)
    words = r"every 3 s, but found silence of rank 1, .*last heard of \(ready\), and is stopped"
    with pytest.raises(LaunchError, match=words):
        Sink().run(job)
    assert traces.alive() == []


@pytest.mark.long
def test_what_takes_long_is_waited_for_longer(traces):
    """The import, the first step, the writing of a checkpoint: but not without end."""
    code = (
        "import time; from tfdist.launch.events import emit; "
        "emit({'event': 'writing', 'long': True}); time.sleep(3); emit({'event': 'written'}); "
        "time.sleep(600)"
    )
    job = local.job(python(code, traces.token), start_timeout_s=60, stall_timeout_s=1)
    with pytest.raises(LaunchError, match=r"every 1 s.*last heard of \(written\)"):
        Sink().run(job)
    job = local.job(python("import time; time.sleep(600)"), start_timeout_s=1, stall_timeout_s=1)
    with pytest.raises(LaunchError, match=r"every 2 s.*last heard of \(started\)"):
        Sink().run(job)


def test_output_is_no_progress(traces):
    code = "import time\nwhile True: print('waiting', flush=True); time.sleep(0.1)"
    job = local.job(python(code, traces.token), start_timeout_s=1, stall_timeout_s=1)
    with pytest.raises(LaunchError, match="must report progress"):
        Sink().run(job)
    assert traces.alive() == []


@BOTH
def test_what_a_job_leaves_behind_is_ended(launcher, traces):
    outcome = Sink().run(launcher.job(python(DAEMON, traces.token), workers=2))
    assert outcome.exit_code == 0
    assert traces.alive() == []


@BOTH
def test_an_error_of_the_caller_ends_the_job(launcher, traces):
    def fail(rank, stream, text):
        raise ZeroDivisionError

    code = DAEMON + "print('up', flush=True); import time; time.sleep(600)"
    with pytest.raises(ZeroDivisionError):
        supervisor.run(launcher.job(python(code, traces.token), workers=2), on_line=fail)
    assert traces.alive() == []


def test_a_process_that_ignores_sigterm_is_ended(traces):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('up', flush=True); time.sleep(600)"
    )

    def fail(rank, stream, text):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        supervisor.run(local.job(python(code, traces.token)), on_line=fail)
    assert traces.alive() == []


KILLED = [
    (mpi, "tfdist.launch.cleanup"),
    (tf_cluster, "tfdist.launch.cleanup"),
    (tf_cluster, "tfdist.launch.tasks"),
]


@pytest.mark.parametrize(("launcher", "module"), KILLED, ids=["mpi", "own", "own launcher"])
def test_a_killed_launcher_takes_its_ranks_along(launcher, module, traces):
    code = RANK + "print('up', flush=True); time.sleep(600)"

    def kill(rank, stream, text):
        for process in traces.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in process.cmdline()[:3]:
                    process.kill()

    outcome = supervisor.run(launcher.job(python(code, traces.token), workers=2), on_line=kill)
    assert outcome.exit_code != 0
    traces.wait_for(0)


STOPPED = [
    (mpi, "tfdist.launch.cleanup"),
    *long((mpi, "tfdist.launch.rank"), (mpi, "mpirun")),
    (tf_cluster, "tfdist.launch.tasks"),
]


@pytest.mark.parametrize(("launcher", "module"), STOPPED, ids=lambda each: str(each)[-10:])
def test_a_stopped_process_of_the_launcher_is_woken(launcher, traces, module):
    """It is none of the ranks' doing, and they need not wait for it."""
    code = (
        "from tfdist.launch.events import emit; import sys, time; "
        "print('up', flush=True); time.sleep(2); emit({'event': 'ready'}); print('end')"
    )
    stopped: set[int] = set()

    def stop(rank: int | None, stream: str, text: str) -> None:
        sink.on_line(rank, stream, text)
        for process in traces.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                is_one = any(word.endswith(module) for word in process.cmdline()[:3])
                if text == "up" and is_one and not stopped:
                    stopped.add(process.pid)
                    process.suspend()

    sink = Sink()
    job = launcher.job(python(code, traces.token), workers=2, stall_timeout_s=30)
    assert supervisor.run(job, on_line=stop).exit_code == 0
    (pid,) = stopped
    told = f"tfdist: process {pid} of the launcher was stopped; woken"
    assert (None, "stderr", told) in sink.lines
    assert sorted(line for line in sink.lines if line[2] == "end") == [
        (rank, "stdout", "end") for rank in (0, 1)
    ]


@pytest.mark.long
def test_time_without_a_core_is_no_silence(traces):
    """A rank that others keep from its core is slow; one that sleeps beside them is silent."""
    on_one_core = (
        "import os, sys, time; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from tfdist.launch.events import emit; emit({'event': 'ready'}); "
    )
    work = "begun = time.process_time()\nwhile time.process_time() - begun < 0.7: pass"
    rivals = [
        subprocess.Popen(python(on_one_core + "\nwhile True: pass", traces.token))
        for _ in range(12)
    ]
    try:
        job = local.job(python(on_one_core + "\n" + work, traces.token), stall_timeout_s=3)
        assert Sink().run(job).exit_code == 0
        job = local.job(python(on_one_core + "time.sleep(600)", traces.token), stall_timeout_s=3)
        with pytest.raises(LaunchError, match=r"every 3 s.*last heard of \(ready\)"):
            Sink().run(job)
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()


@pytest.mark.parametrize(
    "stall_timeout_s", [None, *long(1.0)], ids=["its time is over", "it is silent"]
)
def test_sigterm_gives_the_ranks_time_and_ends_them_all_the_same(
    traces, monkeypatch, stall_timeout_s
):
    monkeypatch.setattr(supervisor, "_LAST_CALL_S", 3.0)
    code = (
        "import signal, time; "
        "signal.signal(signal.SIGTERM, lambda *_: print('heard', flush=True)); "
        "from tfdist.launch import events; events.emit({'event': 'ready'}); "
        "print('up', flush=True); [time.sleep(1) for _ in range(600)]"
    )
    sink = Sink()

    def strike(rank, stream, text):
        sink.on_line(rank, stream, text)
        if text == "up":
            os.kill(os.getpid(), signal.SIGTERM)

    restarted = []
    job = local.job(python(code, traces.token), stall_timeout_s=stall_timeout_s)
    with pytest.raises(SystemExit) as ended:
        restarts.run(
            lambda attempt: job,
            max_restarts=1,
            on_restart=lambda *told: restarted.append(told),
            on_line=strike,
        )
    assert ended.value.code == 143
    assert (0, "stdout", "heard") in sink.lines
    assert restarted == []
    assert traces.alive() == []


@pytest.mark.parametrize(
    ("start", "seconds"),  # More than mpirun or a guard gives who is to end.
    [
        (lambda command: mpi.job(command, workers=2), 2),
        *long(
            (lambda command: tf_cluster.job(command, workers=1, ps=1), 6),
            (lambda command: tf_cluster.job(command, workers=2), 6),
            (local.job, 6),
        ),
    ],
    ids=["mpi", "servers", "own", "one"],
)
def test_sigterm_to_all_processes_of_a_job_is_for_its_ranks(traces, start, seconds):
    code = RANK + (
        "import signal; serves = 'ps' in topology.current().roles and rank > 0; "
        f"leave = lambda *_: (time.sleep({seconds}), print('written', flush=True), os._exit(143)); "
        "serves or signal.signal(signal.SIGTERM, leave); "
        "print('up', flush=True); [time.sleep(1) for _ in range(600)]"
    )
    sink = Sink()
    job = start(python(code, traces.token))

    def strike(rank, stream, text):
        sink.on_line(rank, stream, text)
        if text == "up" and len(sink.lines) == job.world_size:
            for process in (*psutil.Process().children(recursive=True), psutil.Process()):
                process.terminate()

    with pytest.raises(SystemExit) as ended:
        supervisor.run(job, on_line=strike)
    assert ended.value.code == 143
    written = {rank for rank, _, text in sink.lines if text == "written"}
    assert written == ({0} if job.world_size == 3 else set(range(job.world_size)))
    assert traces.alive() == []


def test_the_environment_of_signals_is_given_back():
    before = signal.getsignal(signal.SIGTERM)
    Sink().run(local.job(python("pass")))
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_starts_without_heavy_imports():
    code = (
        "import sys, tfdist.launch.rank; "
        "print([m for m in ('numpy', 'tensorflow', 'psutil', 'click') if m in sys.modules])"
    )
    sink = Sink()
    sink.run(local.job(python(code)))
    assert sink.lines == [(0, "stdout", "[]")]
