"""The rule of replicas, by numbers; then one server under a load that comes and goes."""

from __future__ import annotations

import base64
import http.client
import io
import itertools
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from litserve.utils import WorkerSetupStatus
from PIL import Image

from tfdist.serving.fleet import Fleet
from tfdist.serving.scaling import Rule, Scaling


def _followed(least: int, most: int, *loads: tuple[float, int]) -> list[tuple[float, int]]:
    """Returns when there are how many, of loads (seconds, requests), at a look each 0.5 s."""
    rule = Rule(Scaling(least, most, 4.0, up_delay_s=5.0, down_delay_s=60.0))
    found = [(0.0, rule.replicas)]
    number = 0
    for seconds, ongoing in loads:
        for _ in range(int(seconds * 2)):
            replicas = rule.observe(number / 2, ongoing)
            if replicas != found[-1][1]:
                found.append((number / 2, replicas))
            number += 1
    return found


def test_more_after_five_seconds_and_fewer_after_a_minute():
    """12 at a time want 3 of 4 each: from 100 s on, when the mean of 4 looks passes 4 at once.

    From 200 s on there are none: the mean of 4 looks is 9, 6, 3, 0, so that 0 is wanted at last.
    """
    found = _followed(1, 8, (100, 1), (100, 12), (100, 0))
    assert found == [(0.0, 1), (105.5, 3), (260.5, 1)]


def test_a_short_rise_or_fall_changes_nothing():
    assert _followed(1, 8, (50, 1), (3, 30), (50, 1)) == [(0.0, 1)]
    assert _followed(3, 8, (9, 20), (55, 12), (9, 20), (55, 12))[1:] == [(5.0, 5)]


def test_bounds_hold():
    assert _followed(2, 3, (100, 1000), (100, 0)) == [(0.0, 2), (5.0, 3), (161.5, 2)]


def test_none_are_left_without_requests_and_the_first_one_starts_one_at_once():
    assert _followed(0, 4, (70, 0), (20, 1)) == [(0.0, 1), (60.0, 0), (70.0, 1)]


def _replicas(client) -> int:
    lines = client.get("/metrics")[1].decode().splitlines()
    (line,) = [line for line in lines if line.startswith("tfdist_serve_replicas ")]
    return int(line.rpartition(" ")[2])


def _until(client, wanted: int) -> None:
    deadline = time.monotonic() + 300
    while _replicas(client) != wanted:
        assert time.monotonic() < deadline, client.log.read_text()
        time.sleep(0.1)


def _asked() -> dict:
    file = io.BytesIO()
    Image.fromarray(np.zeros((4, 5, 3), np.uint8)).save(file, "PNG")
    return {"instances": [{"b64": base64.b64encode(file.getvalue()).decode()}]}


@pytest.mark.timeout(900)
@pytest.mark.honest_start
def test_replicas_come_and_go_with_the_load_and_no_request_fails(run_folder, serving, tmp_path):
    """None, one, two, one that is killed and replaced, none; each request is answered."""
    options = ("--min-replicas", "0", "--max-replicas", "2", "--target-requests", "2", "--check")
    delays = ("0", "--up-delay-s", "0.2", "--down-delay-s", "1", "--timeout-s", "300")
    # So long that clients, however slow, spend their time in waiting for answers.
    delays += ("--batch-wait-ms", "200")
    asked = _asked()
    with serving(run_folder, tmp_path / "log", *options, *delays) as client:
        _until(client, 0)
        assert client.get("/readyz")[0] == 200
        first = client.predict(asked)
        assert first[0] == 200, first
        found, is_over = [], threading.Event()

        def ask() -> None:
            while not is_over.is_set():
                try:
                    found.append(client.predict(asked))
                except OSError as error:
                    found.append((0, repr(error)))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        try:
            _until(client, 2)
            client.replicas()[0].kill()
            _until(client, 1)
            _until(client, 2)
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        assert len(found) > 8
        assert [answer for status, answer in found if status != 200] == []
        rows = [answer["predictions"] for _, answer in found]
        np.testing.assert_allclose(rows, [first[1]["predictions"]] * len(rows), atol=1e-6)
        _until(client, 0)
        text = client.log.read_text()
        assert "1 to 0 replicas" in text
        assert "1 to 2 replicas" in text
        assert "ended with code -9" in text


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.honest_start
def test_a_step_from_1_to_64_clients_and_back_changes_replicas_as_told(
    run_folder, serving, tmp_path
):
    options = ("--max-replicas", "2", "--up-delay-s", "1", "--down-delay-s", "2", "--check", "0")
    options += ("--target-requests", "4", "--max-batch", "128", "--batch-wait-ms", "300")
    body = json.dumps(_asked()).encode()
    with serving(run_folder, tmp_path / "log", *options, "--timeout-s", "300") as client:
        found, one_is_over, many_are_over = [], threading.Event(), threading.Event()

        def ask(is_over: threading.Event) -> None:
            address = client.address.removeprefix("http://")
            connection = http.client.HTTPConnection(address, timeout=310)
            while not is_over.is_set():
                connection.request("POST", "/v1/models/lights:predict", body)
                response = connection.getresponse()
                found.append((response.status, response.read()))
            connection.close()

        with ThreadPoolExecutor(64) as clients:
            asking = [clients.submit(ask, one_is_over)]
            try:
                _until_answered(found, 20)
                assert _replicas(client) == 1
                asking += [clients.submit(ask, many_are_over) for _ in range(63)]
                _until(client, 2)
                _until_answered(found, len(found) + 1000)
                assert _replicas(client) == 2
                many_are_over.set()
                _until(client, 1)
                _until_answered(found, len(found) + 20)
            finally:
                one_is_over.set()
                many_are_over.set()
        for each in asking:
            each.result()
        assert {status for status, _ in found} == {200}
        rows = [json.loads(answer)["predictions"] for _, answer in found]
        np.testing.assert_allclose(rows, rows[:1] * len(rows), atol=1e-6)
        told = re.findall(r"(\d) to (\d) replicas, for ([\d.e+]+) requests", client.log.read_text())
        assert [(before, after) for before, after, _ in told] == [("1", "2"), ("2", "1")]
        up, down = (float(requests) for *_, requests in told)
        assert down <= 4 < up


def _until_answered(found: list, count: int) -> None:
    deadline = time.monotonic() + 300
    while len(found) < count:
        assert time.monotonic() < deadline, found[-1:]
        time.sleep(0.01)


class _Process:
    """Of a replica that is told its end."""

    exitcode = 1

    def __init__(self):
        self.is_over = False

    def is_alive(self) -> bool:
        return not self.is_over


def test_after_failed_starts_they_come_one_by_one_and_the_last_one_stays():
    """Four are wanted beside one that answers; whoever starts ends at once."""
    states, launched = {}, []

    def launch(number: int, door) -> _Process:
        launched.append(_Process())
        states[number] = WorkerSetupStatus.STARTING
        return launched[-1]

    fleet = Fleet(launch, states.__getitem__, itertools.count(), 100, leave_timeout_s=100)
    fleet.follow(1)
    states[0] = WorkerSetupStatus.READY
    assert fleet.look() == []
    fleet.follow(2)
    assert len(launched) == 2
    for count in (3, 4):
        launched[-1].is_over = True
        assert [member.number for member in fleet.look()] == [count - 2]
        fleet.follow(4)
        fleet.follow(4)
        assert len(launched) == count
    launched[-1].is_over = True
    fleet.look()
    assert not fleet.may_start
    fleet.follow(0)
    assert [member.number for member in fleet.ready()] == [0]


def test_who_loads_leaves_before_who_answers():
    states = dict.fromkeys(range(2), WorkerSetupStatus.STARTING)
    numbers = itertools.count()
    fleet = Fleet(
        *(lambda number, door: _Process(), states.__getitem__, numbers, 100), leave_timeout_s=100
    )
    fleet.follow(2)
    states[1] = WorkerSetupStatus.READY
    fleet.look()
    fleet.follow(1)
    assert [member.number for member in fleet.present()] == [1]
