"""Elastic jobs without TensorFlow: what is refused, what a loss leads to, what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from tiers import long

from tfdist import topology
from tfdist.errors import LaunchError, OptionError
from tfdist.launch import discovery, elastic, hosts, jobs
from tfdist.launch.hosts import Host
from tfdist.launch.membership import Elasticity, Membership

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_workers": 3}, "at most --workers"),
        ({"min_workers": 1, "max_workers": 1}, "--max-workers must be at least --workers"),
        ({"min_workers": 1, "max_workers": 3}, "Give --host-discovery SCRIPT"),
        ({"max_workers": 3}, "Give --min-workers"),
        ({"host_discovery": "x"}, "Give --min-workers"),
        ({"min_workers": 1, "hosts": "a:2"}, "Give --host-discovery SCRIPT instead"),
        ({"min_workers": 1, "controller": "mpi"}, "Leave --controller out"),
        (
            {"min_workers": 1, "strategy": "multi_worker"},
            "an elastic job must have strategy horovod",
        ),
    ],
)
def test_options_that_do_not_fit(options, message):
    strategy = options.pop("strategy", "horovod")
    with pytest.raises(OptionError, match=message):
        jobs.job_for(strategy, ["x"], workers=2, **options)


def test_a_job_carries_its_own_numbers(monkeypatch):
    monkeypatch.setattr(hosts, "physical_cores", lambda: 4)
    job = elastic.job(["x"], workers=3, min_workers=2, start_timeout_s=50, environ={"PATH": "/bin"})
    assert job.elasticity == Elasticity(min_workers=2, is_fixed=True)
    assert (job.world_size, job.tags) == (3, "elastic")
    assert job.env["TFDIST_ELASTIC_WORKERS"] == "3"
    with pytest.raises(LaunchError, match="5 workers for 4 slots"):
        elastic.job(["x"], workers=5, min_workers=2)


@pytest.fixture
def script(tmp_path):
    """Writes a discovery script that prints what stands in a file; returns both."""

    def write(text: str):
        slots, path = tmp_path / "slots", tmp_path / "discover me"
        slots.write_text(text)
        path.write_text(f"#!/bin/sh\ncat '{slots}'\n")
        path.chmod(0o755)
        return path, slots

    return write


def test_discovery_scripts_that_cannot_be_used(script, tmp_path):
    path, slots = script("localhost:2\n")
    discovery.check(str(path))
    assert discovery.run(str(path)) == [Host("localhost", 2)]
    for text, error, message in (
        ("", OptionError, "must print the hosts that there are"),
        ("localhost:many\n", OptionError, "'localhost:many'"),
        ("elsewhere:2\n", OptionError, "run on this machine, but found host elsewhere"),
    ):
        slots.write_text(text)
        with pytest.raises(error, match=message):
            discovery.check(str(path))
    slots.write_bytes(b"h\xfcgel:2\n")
    with pytest.raises(OptionError, match=r"one host or host:slots|run on this machine"):
        discovery.check(str(path))
    slots.unlink()
    with pytest.raises(LaunchError, match=r"exit code 0, but found exit code 1 of .*No such file"):
        discovery.check(str(path))
    path.chmod(0o644)
    with pytest.raises(OptionError, match="Run chmod"):
        discovery.check(str(path))
    with pytest.raises(OptionError, match="must name a file"):
        discovery.check(str(tmp_path / "none"))


def test_a_lost_slot_stays_lost_until_it_is_offered_again():
    offered = [Host("localhost", 2)]
    slots = discovery.Slots(lambda: offered, max_workers=3)

    def names(count: int) -> list[str]:
        offered[0] = Host("localhost", count)
        slots.ask()
        return slots.names

    first, second = names(2)
    assert [discovery.local_rank(name) for name in (first, second)] == [0, 1]
    assert discovery.host_of(second) == "localhost"
    slots.lose(first)
    assert slots.names == names(2) == [second]
    assert names(1) == [second]  # The lost one goes first.
    again = names(2)
    assert again[0] == second
    assert again[1] not in (first, second)
    assert discovery.local_rank(again[1]) == 0  # The GPU of the lost one.
    assert names(9)[:2] == again
    assert len(slots.names) == 3


def test_what_a_user_hears_of_changes():
    members = Membership(Elasticity(min_workers=1, is_fixed=False), timeout_s=60)
    assert members.take({"event": "world", "ranks": {"0": 0, "1": 1}, "given_up": 0}) is None
    members.note_step(0, {"event": "step", "step": 3, "steps": 9})  # Of a prediction.
    members.note_step(0, {"event": "step", "epoch": 1, "step": 7})
    assert members.take({"event": "lost", "number": 0, "rank": 0, "host": "h", "code": 137}) is None
    assert members.take({"event": "world", "ranks": {"1": 0}, "given_up": 0}) == (
        "rank 0 on h was lost (exit code 137 (SIGKILL), last heard of at step 7 of epoch 2); "
        "going on with 1 worker"
    )
    assert members.rank_of(1) == 0
    assert not members.is_member(0)
    unfit = members.take({"event": "unfit", "host": "h", "code": 1})
    assert unfit == "a worker on h ended before it could join (exit code 1)"
    grown = members.take({"event": "world", "ranks": {"1": 0, "3": 1}, "given_up": 0})
    assert grown == "1 worker joined; going on with 2 workers"
    shrunk = members.take({"event": "world", "ranks": {"1": 0}, "given_up": 1})
    assert shrunk == "1 worker no longer offered; going on with 1 worker"
    assert members.first_failure is None


def test_a_worker_that_ends_well_is_not_told_as_one_without_a_slot():
    members = Membership(Elasticity(min_workers=1, is_fixed=False), timeout_s=60)
    members.take({"event": "world", "ranks": {"0": 0, "1": 1, "2": 2}, "given_up": 0})
    members.take({"event": "lost", "number": 1, "rank": 1, "host": "h", "code": 1})
    told = members.take({"event": "world", "ranks": {"2": 0}, "given_up": 0})
    assert told == "rank 1 on h was lost (exit code 1); going on with 1 worker"


def test_those_that_go_on_must_meet_within_the_deadline():
    members = Membership(Elasticity(min_workers=1, is_fixed=False), timeout_s=0)
    members.take({"event": "world", "ranks": {"0": 0, "1": 1}, "given_up": 0})
    members.check_deadline()
    members.take({"event": "waiting"})  # As when another hangs.
    with pytest.raises(LaunchError, match="must meet again within 0 s"):
        members.check_deadline()


def test_the_place_of_a_worker_comes_from_the_driver():
    environ = {
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_SIZE": "2",
        "HOROVOD_RANK": "1",
        "HOROVOD_LOCAL_RANK": "0",
        "TFDIST_LOCAL_RANK": "1",
        "TFDIST_ELASTIC_WORKERS": "2",
        "TFDIST_DRIVER": "5,6",
        "TFDIST_KEPT": "/kept/1",
    }
    place = topology.from_environ(environ)
    assert (place.rank, place.local_rank, place.local_size) == (1, 1, 2)
    assert (place.elastic_workers, place.driver, place.kept) == (2, (5, 6), "/kept/1")
    with pytest.raises(OptionError, match="started by tfdist"):
        topology.from_environ({"HOROVOD_ELASTIC": "1", "HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"})
    del environ["HOROVOD_SIZE"], environ["HOROVOD_RANK"]
    joining = topology.from_environ(environ)
    assert (joining.world_size, joining.rank) == (3, 2)  # Without a rank before it joins.


# Real processes ---------------------------------------------------------------------------------

RANK = "import os, signal, sys, time; rank = int(os.environ['HOROVOD_RANK']); "
KILL = RANK + "rank == 1 and os.kill(os.getpid(), signal.SIGKILL); "


def launch(*more: str, code: str, token: str) -> list[str]:
    options = ["launch", "--workers", "2", *more]
    return [*options, "--", sys.executable, "-c", code, token]


def test_a_loss_that_the_others_can_do_without(run_cli, traces):
    done = run_cli(
        *launch(
            "--min-workers", "1", code=KILL + "time.sleep(2); print('done')", token=traces.token
        )
    )
    assert (done.returncode, done.stdout) == (0, "[0] done\n")
    assert "rank 1 on localhost was lost (exit code 137 (SIGKILL))" in done.stderr
    assert traces.alive() == []


def test_too_few_are_left(run_cli, traces, script):
    """At once where no other can come, and else within the deadline."""
    path, _ = script("localhost:2\n")
    waiting = ("--host-discovery", str(path), "--start-timeout", "4")
    for more in ((), waiting):
        done = run_cli(
            *launch("--min-workers", "2", *more, code=KILL + "time.sleep(600)", token=traces.token)
        )
        assert done.returncode == 2
        assert "must have at least 2 workers to go on, but found 1 left: rank 1" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        traces.wait_for(0)


def test_a_script_that_fails_later_is_told_once(run_cli, traces, script):
    path, slots = script("localhost:2\n")
    code = RANK + f"rank == 0 and os.remove({str(slots)!r}); time.sleep(3)"
    done = run_cli(
        *launch("--min-workers", "2", "--host-discovery", path, code=code, token=traces.token)
    )
    assert done.returncode == 0
    assert done.stderr.count("a discovery script must end with exit code 0") == 1


def test_the_error_of_all_is_the_jobs(run_cli, traces):
    done = run_cli(
        *launch("--min-workers", "1", code=RANK + "sys.exit('no data')", token=traces.token)
    )
    assert done.returncode == 1
    assert "ended with exit code 1; its last lines:" in done.stderr
    assert "no data" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), *long((signal.SIGINT, 130))])
def test_nothing_outlives_a_signal(traces, tmp_path, number, code):
    arguments = launch(
        "--min-workers", "1", code="import time; time.sleep(600)", token=traces.token
    )
    with open(tmp_path / "output", "wb") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "tfdist", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    deadline = time.monotonic() + 60
    while sum(process.cmdline()[1] == "-c" for process in traces.alive()) != 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(launcher.pid, number)
    assert launcher.wait(timeout=60) == code
    traces.wait_for(0)


# Meetings, by ranks that talk to the driver as Horovod's do ----------------------------------

MEET = (
    "import json, os, signal, sys, time\n"
    "words, orders = map(int, os.environ['TFDIST_DRIVER'].split(','))\n"
    "kept = os.environ['TFDIST_KEPT']\n"
    "number = int(os.path.basename(kept))\n"
    "start = len(open(kept).read()) if os.path.exists(kept) else 0\n"
    "print('.', end='', file=open(kept, 'a'))\n"
    "def die(signal): os.kill(os.getpid(), signal)\n"
    "def ask():\n"
    "    os.write(words, b'r')\n"
    "    return json.loads(os.read(orders, 4096))['variables']\n"
    "def met(place):\n"
    "    os.write(words, b'm')\n"
    "    print(number, 'is', place['HOROVOD_RANK'], 'of', place['HOROVOD_SIZE'], flush=True)\n"
)


@pytest.fixture
def meet(run_cli, traces, script):
    """Runs three ranks; ``code`` is what each does."""

    def run(code: str, *options: str):
        path, _ = script("localhost:3\n")
        launch = ("launch", "--workers", "3", "--min-workers", "1", "--host-discovery", path)
        done = run_cli(*launch, *options, "--", sys.executable, "-c", MEET + code, traces.token)
        assert traces.alive() == []
        return done

    return run


def test_a_loss_among_those_that_connect(meet):
    """Horovod ends some of the others, and leaves others waiting: all of them start anew."""
    done = meet(
        "place = ask()\n"
        "if start == 0: time.sleep(600) if number == 0 else die({1: 9, 2: 6}[number])\n"
        "met(place)\n"
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 is 0 of 2", "[2] 2 is 1 of 2"]
    assert "the others start anew and go on from their last commit" in done.stderr
    assert "rank 1 on localhost was lost (exit code 137 (SIGKILL))" in done.stderr


def test_a_second_loss_among_those_that_start_anew(meet):
    done = meet(
        "if start == 1 and number == 2: die(9)\n"
        "place = ask()\n"
        "if start == 0: die(9) if number == 1 else time.sleep(600)\n"
        "met(place)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0] 0 is 0 of 1\n"
    assert done.stderr.count("was lost (exit code 137 (SIGKILL))") == 2


def test_a_loss_after_the_first_has_asked(meet):
    """It waits for nobody who is gone; nothing was connected, so nothing starts anew."""
    done = meet("if number == 1: time.sleep(1); die(9)\nmet(ask())\n")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 is 0 of 2", "[2] 2 is 1 of 2"]
    assert "start anew" not in done.stderr


def test_meetings_that_break_without_a_loss_have_an_end(meet):
    done = meet(
        "place = ask()\n"
        "if number: die(6)\n"
        "met(place)\n"
        "time.sleep(600 if place['HOROVOD_SIZE'] == '3' else 0)\n"
    )
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "[0] 0 is 0 of 1"
    assert "start anew" in done.stderr


def test_a_chief_that_is_lost_at_the_end_is_not_done_without(meet):
    """It writes the results, and may not have."""
    done = meet("met(ask())\nif number == 0: time.sleep(1); die(9)\n")
    assert done.returncode == 137


def test_a_stopped_driver_is_woken(meet, traces):
    done = meet(
        "place = ask()\n"
        "import psutil\n"
        "if number == 0: psutil.Process().parent().parent().suspend()\n"
        "time.sleep(1)\nmet(place)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "of the launcher was stopped; woken" in done.stderr
