from __future__ import annotations

import json

import pytest

from tfdist.launch import events
from tfdist.launch.failure import Failure, GlooVerdict, MpiVerdict, TogetherVerdict

DASHES = "-" * 74


def framed(text: str) -> list[str]:
    return [DASHES, *text.splitlines(), DASHES]


# Recorded from mpirun 4.1.8.
PREAMBLE = framed(
    "Primary job  terminated normally, but 1 process returned\n"
    "a non-zero exit code. Per user-direction, the job has been aborted."
)
EXITED = framed(
    "mpirun detected that one or more processes exited with non-zero status, thus causing\n"
    "the job to be terminated. The first process to do so was:\n\n"
    "  Process name: [[32354,1],1]\n  Exit code:    3"
)
KILLED = framed(
    "mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed)."
)
ABORTED = framed(
    "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\nwith errorcode 7."
)


@pytest.mark.parametrize(
    ("lines", "failure"),
    [
        (PREAMBLE + EXITED, Failure(1, 3)),
        (PREAMBLE + KILLED, Failure(1, 137)),
        (ABORTED, Failure(1, 7)),
        (KILLED + EXITED, Failure(1, 137)),
    ],
)
def test_mpirun_names_the_first_failure(lines, failure):
    verdict = MpiVerdict()
    shown = [text for line in lines for text in verdict.take(line)]
    assert verdict.first_failure == failure
    assert shown == []


def test_other_words_of_mpirun_are_shown():
    verdict = MpiVerdict()
    lines = ["ssh: no such host", *framed("a warning\nof two lines")]
    shown = [text for line in lines for text in verdict.take(line)]
    assert shown == ["ssh: no such host", "a warning", "of two lines"]
    assert verdict.first_failure is None


def test_a_message_that_is_cut_off_is_shown():
    verdict = MpiVerdict()
    assert [verdict.take(DASHES), verdict.take("half a message")] == [[], []]
    assert verdict.close() == ["half a message"]


def test_horovodrun_names_the_first_failure():
    verdict = GlooVerdict()
    for line in ["Traceback (most recent call last):", "Process name: 1", "Exit code: 137", ""]:
        assert verdict.take(line) == []
    assert verdict.first_failure == Failure(1, 137)


def test_tfdist_tells_of_a_failure_and_of_a_host_in_events():
    failed = {"event": "failed", "rank": 1, "code": 137}
    lost = {"event": "no host", "host": "b", "ranks": [1, 2], "reason": "closed", "code": 255}
    told = {}
    for event in (failed, lost, {**lost, "ranks": []}):
        told[len(told)] = verdict = TogetherVerdict()
        assert verdict.take(f"{events.MARK}{json.dumps(event)}") == []
        assert verdict.take("a warning") == ["a warning"]
    assert told[0].first_failure == Failure(1, 137)
    assert "the loss of b with its ranks 1, 2, of which ssh says: closed" in str(told[1].no_host)
    assert "must be reachable by ssh, but found b" in str(told[2].no_host)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("me@node1: Permission denied (publickey).", "node1, of which ssh says: Permission denied"),
        ("Host key verification failed.", "one, of which ssh says: Host key verification failed"),
    ],
)
def test_a_host_that_does_not_let_us_in_is_named(line, words):
    verdict = MpiVerdict()
    assert verdict.take(line) == []
    assert words in str(verdict.no_host)


def test_a_host_that_ssh_does_not_find_is_named_and_the_rest_is_not_repeated():
    verdict = MpiVerdict()
    lines = [
        "ssh: Could not resolve hostname nowhere: Name or service not known",
        "-" * 20,
        "ORTE was unable to reliably start one or more daemons.",
        "This usually is caused by:",
        "-" * 20,
    ]
    assert [shown for line in lines for shown in verdict.take(line)] == []
    words = "but found nowhere, of which ssh says: Name or service not known."
    assert words in str(verdict.no_host)
    verdict = MpiVerdict()
    assert [shown for line in lines[1:] for shown in verdict.take(line)] == lines[2:4]


def test_a_host_that_is_lost_is_named():
    verdict = MpiVerdict()
    lines = [
        "-" * 20,
        "ORTE has lost communication with a remote daemon.",
        "",
        "  HNP daemon   : [[14405,0],0] on node node0",
        "  Remote daemon: [[14405,0],1] on node node1",
        "",
        "This is usually due to either a failure of the TCP network",
        "-" * 20,
    ]
    assert [shown for line in lines for shown in verdict.take(line)] == []
    assert "but found the loss of node1, which no longer answers." in str(verdict.no_host)
