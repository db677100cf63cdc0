"""Schedules as data; no TensorFlow."""

from __future__ import annotations

import itertools

import pytest

from tfdist.errors import OptionError
from tfdist.strategies.pipeline import gantt, schedule
from tfdist.strategies.pipeline.schedule import WHOLE

SHAPES = [
    (name, stages, microbatches, chunks)
    for stages, microbatches in ((1, 1), (1, 4), (2, 2), (2, 8), (3, 6), (4, 4), (4, 8), (5, 10))
    for name, chunks in (("gpipe", None), ("1f1b", None), ("interleaved", 2), ("interleaved", 3))
]


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), SHAPES)
def test_bubble_equals_theory(name, stages, microbatches, chunks):
    numbers = {"stages": stages, "microbatches": microbatches, "chunks_per_stage": chunks}
    found = schedule.make(name, **numbers).bubble_fraction()
    assert found == pytest.approx(schedule.theoretical_bubble(name, **numbers), abs=1e-12)


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), SHAPES)
def test_every_task_is_done_once_on_its_device(name, stages, microbatches, chunks):
    made = schedule.make(name, stages=stages, microbatches=microbatches, chunks_per_stage=chunks)
    slots = made.timeline()
    tasks = {(s.task.is_forward, s.task.microbatch, s.task.chunk) for s in slots}
    assert len(tasks) == len(slots) == 2 * microbatches * stages * (chunks or 1)
    assert all(made.device_of[slot.task.chunk] == slot.device for slot in slots)


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), SHAPES)
def test_no_device_does_two_things_and_no_task_comes_too_early(name, stages, microbatches, chunks):
    made = schedule.make(name, stages=stages, microbatches=microbatches, chunks_per_stage=chunks)
    last = made.num_chunks - 1
    slots = {(s.task.is_forward, s.task.microbatch, s.task.chunk): s for s in made.timeline()}
    for (forward, microbatch, chunk), slot in slots.items():
        if forward and chunk:
            assert slots[True, microbatch, chunk - 1].end <= slot.start
        if not forward:
            before = (True, microbatch, last) if chunk == last else (False, microbatch, chunk + 1)
            assert slots[before].end <= slot.start
    for device in range(stages):
        own = sorted((s.start, s.end) for s in slots.values() if s.device == device)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(own))


def test_1f1b_keeps_few_activations_and_gpipe_all():
    one = schedule.make("1f1b", stages=4, microbatches=8)
    assert [one.most_in_flight(stage) for stage in range(4)] == [4, 3, 2, 1]
    all_of_them = schedule.make("gpipe", stages=4, microbatches=8)
    assert [all_of_them.most_in_flight(stage) for stage in range(4)] == [8] * 4


def test_a_chunk_that_takes_a_batch_whole_waits_for_all_microbatches():
    made = schedule.gpipe((0, 1, 1, 1), 3, whole=frozenset({2}))
    places = {(s.task.is_forward, s.task.chunk, s.task.microbatch): s for s in made.timeline()}
    assert [place for place in places if place[1] == 2] == [(True, 2, WHOLE), (False, 2, WHOLE)]
    whole = places[True, 2, WHOLE]
    assert whole.start == max(places[True, 1, m].end for m in range(3)) == 4
    assert whole.end == places[True, 3, 0].start == 7  # As long as three microbatches.
    back = places[False, 2, WHOLE]
    assert back.start >= max(places[False, 3, m].end for m in range(3))
    assert places[False, 1, 0].start == back.end
    assert [made.most_in_flight(device) for device in range(2)] == [3, 9]


def test_a_whole_batch_has_a_letter_in_the_chart():
    made = schedule.gpipe((0, 1), 2, whole=frozenset({1}))
    assert gantt.text(made, width=12) == "stage 0 |01      0-1-|\nstage 1 |  w.w---    |"


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "chunks", "part"),
    [
        ("pipedream", 2, 4, None, "Choose one of gpipe, 1f1b, interleaved"),
        ("gpipe", 0, 4, None, "stages must be"),
        ("gpipe", 2, True, None, "microbatches must be"),
        ("1f1b", 2, 4, 2, "must go with schedule='interleaved'"),
        ("interleaved", 4, 6, 2, "Choose microbatches=8"),
        ("interleaved", 2, 4, 1, "schedule='1f1b'"),
    ],
)
def test_numbers_that_do_not_fit(name, stages, microbatches, chunks, part):
    with pytest.raises(OptionError) as caught:
        schedule.make(name, stages=stages, microbatches=microbatches, chunks_per_stage=chunks)
    assert part in str(caught.value)


def test_chart_as_text():
    made = schedule.make("gpipe", stages=2, microbatches=2)
    assert gantt.text(made, width=9) == "stage 0 |01   0-1-|\nstage 1 | 010-1-  |"


def test_chart_as_png(tmp_path):
    made = schedule.make("interleaved", stages=2, microbatches=4)
    gantt.draw(made, tmp_path / "chart.png", "title")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["chart.png"]
    with pytest.raises(OptionError, match="folder that exists"):
        gantt.draw(made, tmp_path / "missing" / "chart.png", "title")
