"""Traces of known numbers: what a step's time went into, who is late, what took longest."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from made_traces import Made, write

from tfdist.traces import intervals, perfetto, rank, xplane
from tfdist.traces.operations import layer_of
from tfdist.traces.report import report
from tfdist.traces.shares import PARTS

# Of two steps of 100 ms each the second is as the first.
_STEP = 100.0


def _rank(late: float, clock_ms: float = 1_000_000.0) -> Made:
    """A rank that computes so much longer before its collective, which ends at 70 on all."""
    computes, meets, waits, steps = [], [], [], []
    for number in range(2):
        at = 10 + number * _STEP
        steps.append((at, at + 90, number + 1, number + 1))
        waits.append(("next", "IteratorGetNext", at, at + 10))
        computes.append(("PartitionedCall/net/dense/MatMul", "MatMul", at + 10, at + 30 + late))
        meets.append(("sum", "HorovodAllreduce", at + 30 + late, at + 70))
        computes.append(("gradients/net/other_1/Mul", "Mul", at + 60, at + 75))
    return Made(steps, computes, meets, waits, clock_ms=clock_ms, layers=["dense", "other"])


@pytest.mark.parametrize("wrong_ms", [0, 5_000, -70])
def test_each_part_is_what_was_made(tmp_path, wrong_ms):
    """Whatever the clock of rank 1 says."""
    write(tmp_path, [_rank(0), _rank(20, 1_000_000.0 + wrong_ms)])
    found = report(tmp_path)
    early, late = found.shares
    # From the first begin to the last end: 190 ms, and 20 of them in the first step's pause.
    assert early.step == late.step == 95
    assert (early.compute, late.compute) == (35, 55)
    assert (early.for_rank, late.for_rank) == (20, 0)  # 30 to 50 of each step.
    assert (early.exposed, late.exposed) == (10, 10)  # 50 to 60.
    assert early.for_data == late.for_data == 10
    assert early.for_host == pytest.approx(20)  # 75 to 90, and the pause between the steps.
    assert (early.communication, late.communication) == (40, 20)
    assert early.overlap == pytest.approx(10 / 40)
    assert late.overlap == pytest.approx(10 / 20)
    for share in found.shares:
        assert share.step == pytest.approx(sum(getattr(share, name) for name in PARTS))
    straggler = found.straggler
    assert (straggler.rank, straggler.times, straggler.executions) == (1, 2, 2)
    assert straggler.late_ms == pytest.approx(20, abs=1e-3)
    assert straggler.is_clear
    told = found.to_json()["ranks"][1]["clock_behind_ms"]
    assert told == pytest.approx(-wrong_ms, abs=1e-3)


def test_ranks_that_come_together_have_no_straggler(tmp_path):
    write(tmp_path, [_rank(0), _rank(0)])
    assert not report(tmp_path).straggler.is_clear


def test_the_longest_operations_have_layers(tmp_path):
    write(tmp_path, [_rank(0), _rank(20)])
    first, second = report(tmp_path).longest
    assert (first.name, first.layer) == ("net/dense/MatMul", "dense")
    assert (first.backward, first.ms) == (False, 30)
    assert (second.layer, second.backward, second.ms) == ("other", True, 15)
    assert layer_of("a/b/c/MatMul", {"a", "c"}) == "c"
    assert layer_of("dense/MatMul", {"b"}) is None


def test_alone_nothing_is_said_of_others(tmp_path):
    write(tmp_path, [_rank(0)], strategy="single")
    found = report(tmp_path)
    assert found.straggler is None
    assert found.shares[0].for_rank == 0
    assert found.shares[0].exposed == 30
    assert found.unknown == []


def test_ranks_that_do_nothing_together_are_told(tmp_path):
    write(tmp_path, [replace(_rank(late), collectives=()) for late in (0, 20)])
    assert "who is late is not known" in report(tmp_path).unknown[0]
    assert report(tmp_path).straggler is None


def test_a_gpu_computes_in_its_kernels(tmp_path):
    """Operations of the host only start them."""
    kernels = [("sgemm", 40.0, 60.0), ("ncclDevKernel_AllReduce", 55.0, 75.0)]
    write(tmp_path, [replace(_rank(0), kernels=kernels, collectives=())])
    (share,) = report(tmp_path).shares
    assert share.compute == 10  # 20 of two steps.
    assert share.communication == 10
    assert share.exposed == 7.5


def test_a_line_is_read_in_parts(tmp_path, monkeypatch):
    write(tmp_path, [_rank(0), _rank(20)])
    whole = report(tmp_path).to_json()
    monkeypatch.setattr(xplane, "_CHUNK", 40)
    assert report(tmp_path).to_json() == whole


def test_perfetto_has_all_ranks_on_one_clock(tmp_path):
    write(tmp_path, [_rank(0), _rank(20, 1_005_000.0)])
    perfetto.write(report(tmp_path), tmp_path / "all.json.gz")
    with gzip.open(tmp_path / "all.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"rank 0 on node0", "rank 1 on node1"}
    bars = [event for event in events if event["ph"] == "X"]
    sums = [(bar["pid"], bar["ts"], bar["dur"]) for bar in bars if bar["name"] == "sum"]
    assert sums == [(0, 30e3, 40e3), (0, 130e3, 40e3), (1, 50e3, 20e3), (1, 150e3, 20e3)]
    rows: dict[tuple, list] = {}
    for bar in sorted(bars, key=lambda bar: bar["ts"]):
        before = rows.setdefault((bar["pid"], bar["tid"]), [])
        assert not before or before[-1]["ts"] + before[-1]["dur"] <= bar["ts"] + 0.01
        before.append(bar)
    assert not list(tmp_path.glob(".all*"))


def test_intervals_are_sets():
    """Against a grid of moments."""
    rng = np.random.default_rng(0)
    moments = np.arange(0, 60) + 0.5

    def within(times):
        return (times[:, :1] < moments) & (moments < times[:, 1:])

    for _ in range(200):
        a, b = (
            intervals.union(np.sort(rng.integers(0, 60, (rng.integers(0, 8), 2)), axis=1))
            for _ in range(2)
        )
        in_a, in_b = within(a).any(axis=0), within(b).any(axis=0)
        for made, wanted in (
            (intervals.union(np.concatenate([a, b])), in_a | in_b),
            (intervals.intersect(a, b), in_a & in_b),
            (intervals.subtract(a, b), in_a & ~in_b),
        ):
            assert (within(made).sum(axis=0) == wanted).all()
            assert intervals.length(made) == wanted.sum()
            assert (made[1:, 0] > made[:-1, 1]).all()


def test_notes_that_name_other_steps_are_refused(tmp_path):
    write(tmp_path, [_rank(0)])
    notes = next(tmp_path.rglob("rank-0.json"))
    notes.write_text(notes.read_text().replace("[[1, 1], ", "["))
    with pytest.raises(rank.DataError, match="found 2 executions of 1"):
        report(tmp_path)
    notes.write_text(json.dumps({**json.loads(notes.read_text()), "horovod_timeline": 5}))
    with pytest.raises(rank.DataError, match=r"rank-0.json must be as tfdist wrote it"):
        report(tmp_path)


def test_notes_of_steps_that_are_no_numbers_are_refused(tmp_path):
    write(tmp_path, [_rank(0)])
    notes = next(tmp_path.rglob("rank-0.json"))
    notes.write_text(notes.read_text().replace("[[1, 1], ", '[["a", "b"], '))
    with pytest.raises(rank.DataError, match=r"rank-0\.json must be as tfdist wrote it"):
        report(tmp_path)


def test_damage_anywhere_is_named(tmp_path):
    """Of bytes within the planes: most of them are lengths, numbers of names, and the like."""
    write(tmp_path, [_rank(0), _rank(20)])
    path = next(tmp_path.rglob("rank-1.xplane.pb"))
    made, told = path.read_bytes(), []
    places = range(0, len(made), 23)
    for at in places:
        for wrong in (b"\0", b"\x7f", b"\xff\xff"):
            path.write_bytes(made[:at] + wrong + made[at + len(wrong) :])
            try:
                report(tmp_path)
            except rank.DataError as error:
                told.append(str(error))
    assert sum("must be a whole trace" in text for text in told) > len(places)


def _with_timeline(folder, text: str):
    """Rank 0 of a trace names a timeline of Horovod's, which began 50 ms before its clock."""
    write(folder, [_rank(0), _rank(20)])
    (folder / "timeline.json").write_text(text)
    notes = next(folder.rglob("rank-0.json"))
    about = {**json.loads(notes.read_text()), "horovod_timeline": str(folder / "timeline.json")}
    notes.write_text(json.dumps(about))
    return report(folder)


def test_horovods_own_timeline_joins_on_the_same_clock(tmp_path):
    lines = [
        '{"name": "process_name", "ph": "M", "pid": 0, '
        '"args": {"start_time_since_epoch_in_micros": 999950000}}',
        '{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "sum"}}',
        # Before the traced steps, around their beginning, and within them; then it is cut off.
        '{"ph": "B", "name": "ALLREDUCE", "ts": 10, "pid": 1},{"ph": "E", "ts": 20, "pid": 1}',
        '{"ph": "B", "name": "ALLREDUCE", "ts": 59000, "pid": 1}',
        '{"ph": "E", "ts": 61000, "pid": 1}',
        '{"ph": "B", "name": "SUM", "ts": 90000, "pid": 1},{"ph": "E", "ts": 99000, "pid": 1}',
    ]
    found = _with_timeline(tmp_path, "[\n" + ",\n".join(lines) + ",\n")
    perfetto.write(found, tmp_path / "all.json.gz")
    with gzip.open(tmp_path / "all.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    own = [event for event in events if event["pid"] >= 1_000_000]
    assert own[0]["args"] == {"name": "Horovod: sum"}
    # 90 ms of the timeline are 40 of the clock of rank 0, whose first step begins at 10.
    assert [(each["ph"], each["ts"]) for each in own[1:]] == [("B", 30e3), ("E", 39e3)]


@pytest.mark.parametrize("text", ["", "[", "[1]", '[{"ph": "M", "args": {}}]', "\x00"])
def test_a_timeline_that_is_none_is_named(tmp_path, text):
    found = _with_timeline(tmp_path, text)
    with pytest.raises(rank.DataError, match="must be the timeline that Horovod wrote"):
        perfetto.write(found, tmp_path / "all.json.gz")
    assert not list(tmp_path.glob(".all*"))


def test_without_horovods_timeline_the_rest_is_written_and_a_line_says_so(tmp_path):
    found = _with_timeline(tmp_path, "[")
    (tmp_path / "timeline.json").unlink()
    (line,) = perfetto.write(found, tmp_path / "all.json.gz")
    assert line.endswith(f"there is no file {tmp_path / 'timeline.json'}")
    with gzip.open(tmp_path / "all.json.gz", "rt") as file:
        assert {event["pid"] for event in json.load(file)["traceEvents"]} == {0, 1}
