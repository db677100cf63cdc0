"""``--json``, ``--quiet`` and ``-v`` of every verb, in this process."""

from __future__ import annotations

import json
import logging

import click
import numpy as np
import pytest

from tfdist.cli import main, voice


def events(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def within(command: click.Command) -> list[click.Command]:
    inner = getattr(command, "commands", {}).values()
    return [command, *(each for one in inner for each in within(one))]


@pytest.mark.parametrize("verb", main._VERBS)
def test_every_verb_has_them(verb):
    for command in within(main.tfdist.get_command(click.Context(main.tfdist), verb)):
        names = [name for param in command.params for name in param.opts]
        for name in ("--quiet", "--verbose", "--json"):
            assert names.count(name) == 1, command.name


def test_events_on_stdout_and_words_on_stderr(tfdist, shards):
    code, out, err = tfdist("inspect", str(shards), "--check", "--json")
    assert code == 0
    first, *between, last = events(out)
    assert (first["event"], first["verb"]) == ("start", "inspect")
    assert {event["event"] for event in between} == {"progress"}
    assert between[0]["unit"] == "bytes"
    assert (last["event"], last["exit_code"], last["faults"]) == ("end", 0, [])
    assert last["splits"]["train"]["records"] == 200
    assert "clean: every byte" in err
    assert all("time" in event for event in events(out))


def test_a_mistake_is_an_event_and_one_line(tfdist):
    code, out, err = tfdist("inspect", "nowhere", "--json")
    assert code == 2
    assert [event["event"] for event in events(out)] == ["start", "error", "end"]
    assert events(out)[1]["text"] in err
    assert events(out)[2]["exit_code"] == 2
    assert err.count("\n") == 1


@pytest.mark.parametrize("order", [("--json", "--quiet"), ("--quiet", "--json")])
def test_quiet(tfdist, shards, order):
    assert tfdist("inspect", str(shards), "--quiet") == (0, "", "")
    code, out, err = tfdist("inspect", str(shards), *order)
    assert (code, err) == (0, "")
    assert [event["event"] for event in events(out)] == ["start", "end"]
    code, _, err = tfdist("inspect", "nowhere", "--quiet")
    assert (code, err.count("\n")) == (2, 1)
    assert "written by" in tfdist("inspect", str(shards))[1]  # And it speaks again.


@pytest.mark.parametrize("verb", [("options",), ("options", "mirrored")])
def test_a_verb_that_answers_has_its_document_alone_on_stdout(tfdist, verb):
    shown = tfdist(*verb)[1]
    code, out, err = tfdist(*verb, "--json")
    assert (code, err) == (0, shown)
    assert "mirrored" in shown
    assert json.loads(out)
    for order in (("--json", "--quiet"), ("--quiet", "--json")):
        assert tfdist(*verb, *order) == (0, out, "")
    assert tfdist("options", "mirored", "--json")[:2] == (2, "")


def test_what_happens_with_times(tfdist, monkeypatch, shards):
    def chatter(**options):
        logging.getLogger("tfdist").debug("one thing")

    command = main.tfdist.get_command(click.Context(main.tfdist), "inspect")
    monkeypatch.setattr(command, "callback", chatter)
    assert tfdist("inspect", str(shards)) == (0, "", "")
    _, _, err = tfdist("inspect", str(shards), "-v")
    assert err.endswith(" DEBUG tfdist: one thing\n")


def test_numbers_that_json_has_not(capsys):
    with voice.speaking():
        voice._voice.tells_events = True
        voice.tell("x", values=[np.float32(np.inf), float("nan"), np.int64(3)], at=("a", None))
    (event,) = events(capsys.readouterr().out)
    assert (event["values"], event["at"]) == (["inf", "nan", 3], ["a", None])


@pytest.mark.parametrize("ended", [KeyboardInterrupt(), SystemExit(143)])
def test_what_is_interrupted_says_how_to_go_on(tfdist, monkeypatch, shards, model_file, ended):
    from tfdist.cli import train

    def interrupted(*args, **options):
        raise ended

    monkeypatch.setattr(train, "carry_out", interrupted)
    command = ("train", "--model", f"{model_file}:mlp", "--data", str(shards), "--output", "run")
    words = "interrupted" if isinstance(ended, KeyboardInterrupt) else "ended by SIGTERM"
    assert tfdist(*command)[2].strip() == f"tfdist: {words}"
    kept = ["ckpt-4", "ckpt-8"]
    monkeypatch.setattr(train.checkpoint_files, "finished", lambda folder: kept)
    code, out, err = tfdist(*command, "--json")
    how = "the same command with --resume goes on from ckpt-8"
    assert err.strip() == f"tfdist: {words}; {how}"
    assert events(out)[-1]["exit_code"] == code == (130 if words == "interrupted" else 143)
    assert "goes on" not in tfdist("inspect", "nowhere")[2]
