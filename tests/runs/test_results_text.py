"""Events for programs, from those of ranks."""

from __future__ import annotations

import logging

import pytest

from tfdist.runs.epoch_rows import EpochRows
from tfdist.runs.progress import Progress, Silent
from tfdist.runs.results_text import described, told


@pytest.mark.parametrize(
    ("event", "public"),
    [
        ({"event": "data", "steps": 4, "long": True}, {"event": "ready", "steps_per_epoch": 4}),
        (
            {"event": "step", "epoch": 0, "step": 2, "samples_per_s": 5.0},
            {"event": "step", "epoch": 1, "phase": "training", "step": 2, "steps_per_epoch": 4},
        ),
        (
            {"event": "step", "epoch": 1, "step": None},
            {"event": "step", "epoch": 2, "phase": "validation", "step": None},
        ),
        (
            {"event": "epoch", "row": {"epoch": 1, "loss": 0.5, "seconds": 2.0}},
            {"event": "epoch", "epoch": 1, "seconds": 2.0, "metrics": {"loss": 0.5}},
        ),
        ({"event": "checkpoint", "path": "c", "long": True}, {"event": "checkpoint", "path": "c"}),
        (
            {"event": "said", "text": "tfdist: WARNING: loss is nan"},
            {"event": "warning", "rank": 0, "text": "loss is nan"},
        ),
        (
            {"event": "said", "text": "tfdist: warning: 3 rows"},
            {"event": "warning", "rank": 0, "text": "3 rows"},
        ),
        ({"event": "said", "text": "tfdist: hello"}, {"event": "message", "text": "hello"}),
    ],
)
def test_what_is_told(event, public):
    found = told(event, 0, epochs=3, steps=4)
    assert found.items() >= public.items()
    assert "long" not in found


def test_of_other_ranks_their_words_alone():
    assert told({"event": "step", "epoch": 0, "step": 1}, 1, 1, 1) is None
    assert told({"event": "said", "text": "tfdist: hello"}, 1, 1, 1)["rank"] == 1
    assert told({"event": "written"}, 0, 1, 1) is None


def test_an_epoch_of_a_batch_that_has_grown_has_fewer_steps():
    heard, sent = [], []

    class Rows(EpochRows):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            sent.append({"event": "step", "epoch": 1, "step": batch + 1, "steps": self._steps})
            self.records_told = self.speed() * (self._trained_at - self._begun_at)

    rows = Rows(24, stop_on_nan=False)
    progress = Silent(2, on_event=heard.append)
    progress.take(0, {"event": "data", "steps": 4})
    rows.set_params({"steps": 2})
    rows.on_epoch_begin(1)
    rows.on_train_batch_end(0)
    assert rows.records_told == pytest.approx(12)
    progress.take(0, sent[0])
    assert [event["steps_per_epoch"] for event in heard] == [4, 2]


def test_logging_and_callers_hear_of_them(caplog, capsys):
    heard = []
    progress = Silent(2, on_event=heard.append)
    with caplog.at_level(logging.DEBUG, logger="tfdist"):
        progress.take(0, {"event": "data", "steps": 4})
        progress.take(0, {"event": "epoch", "row": {"epoch": 1, "loss": 0.5, "seconds": 2.0}})
        progress.take(1, {"event": "said", "text": "tfdist: warning: slow"})
    assert [event["event"] for event in heard] == ["ready", "epoch", "warning"]
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING"]
    assert caplog.records[1].tfdist_event == heard[1]
    assert caplog.records[1].message == "epoch epochs=2 epoch=1 seconds=2 loss=0.5"
    assert described(heard[2]) == "slow"
    assert capsys.readouterr() == ("", "")


def test_an_epochs_line_has_the_time_of_a_step(capsys):
    row = {"epoch": 1, "loss": 0.5, "seconds": 2.0, "samples_per_s": 1150.1}
    Progress(2).take(0, {"event": "epoch", "row": row, "step_ms": 41.67})
    assert capsys.readouterr().out == (
        "epoch 1/2  2.0 s  1,150 samples/s  41.67 ms/step  loss 0.5\n"
    )
