from __future__ import annotations

import pytest

from tfdist.launch import events


def test_without_a_supervisor_nothing_is_written(monkeypatch, capfd):
    monkeypatch.delenv(events.VARIABLE, raising=False)
    events.emit({"event": "progress"})
    assert capfd.readouterr().out == ""


def test_an_event_survives_the_way(monkeypatch, capfd):
    monkeypatch.setenv(events.VARIABLE, "1")
    event = {"event": "progress", "epoch": 0, "loss": 0.5, "text": "ä\n\x1e"}
    events.emit(event)
    written = capfd.readouterr().out
    assert written.count("\n") == 1
    assert events.split(written.rstrip("\n")) == ("", event)


def test_many_numbers_come_in_parts(monkeypatch, capfd):
    monkeypatch.setenv(events.VARIABLE, "1")
    joined = events.Joined()
    for count in (0, 1, 400):
        row = {f"a_long_name_of_a_metric_{n}": n / 3 for n in range(count)}
        events.emit_numbers({"event": "epoch", "row": row, "step_ms": 2.5}, "row")
        lines = capfd.readouterr().out.removesuffix("\n").split("\n")
        assert (len(lines) > 1) == (count > 1)
        assert all(len(line) < 4096 for line in lines)
        told = [joined(1, events.split(line)[1]) for line in lines]
        assert told[:-1] == [None] * (len(lines) - 1)
        assert told[-1] == {"event": "epoch", "row": row, "step_ms": 2.5}


def test_text_before_an_event_is_given_back():
    line = f'12/20 [===>{events.MARK}{{"event": "progress"}}'
    assert events.split(line) == ("12/20 [===>", {"event": "progress"})


@pytest.mark.parametrize("line", ["plain", f"{events.MARK}not json", f"{events.MARK}[1]", ""])
def test_what_is_no_event_is_text(line):
    assert events.split(line) == (line, None)
