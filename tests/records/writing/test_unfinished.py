"""Runs that are ended: what they keep, and that going on gives the same bytes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from tfdist.errors import DataError, InUseError, OptionError
from tfdist.records import write
from tfdist.records.writing import column_shards
from tfdist.records.writing.images import files as image_files
from tfdist.records.writing.journal import Journal
from tfdist.records.writing.same_run import listing_of
from tfdist.records.writing.shard_files import staging_folder
from tfdist.records.writing.streams import writer as stream_writer
from tfdist.records.writing.unfinished import Unfinished

OPTIONS = {"label": "label", "num_shards": 4, "split": "train=1"}


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "in" / "table.csv"
    path.parent.mkdir()
    path.write_text("a,note,label\n" + "".join(f"{n},word {n},{n % 3}\n" for n in range(80)))
    return path


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def ended(source, out, after=2, error=KeyboardInterrupt, **options):
    """Ends a run while it writes the shard behind ``after`` whole ones."""
    shards = []

    def progress(_done, _total):
        shards.append(1)
        if len(shards) > after:
            raise error

    with pytest.raises(error if isinstance(error, type) else type(error)):
        write(source, out, **OPTIONS, **options, progress=progress)
    return out.with_name(f"{out.name}.unfinished")


_SLOW = """
import sys, time
from tfdist.cli.main import main
from tfdist.records.writing import column_shards

class Slow(column_shards.ShardFile):
    def write(self, data):
        super().write(data)
        time.sleep(0.5)

column_shards.ShardFile = Slow
main()
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("number", "code", "workers"),
    [
        (signal.SIGKILL, -9, 1),
        (signal.SIGKILL, -9, 2),
        (signal.SIGINT, 130, 2),
        (signal.SIGTERM, 143, 1),
    ],
)
def test_a_command_that_is_ended_goes_on(tmp_path, table, number, code, workers):
    write(table, tmp_path / "whole", **OPTIONS)
    out, left = tmp_path / "out", tmp_path / "out.unfinished"
    options = ["--label", "label", "--num-shards", "4", "--split", "train=1"]
    options += ["--workers", str(workers)]
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW, "shard", str(table), str(out), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (left / "shards.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, number)
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code
    assert (f"tfdist: {left}, with " in told) == (code != -9)
    assert ("kept; --resume goes on" in told) == (code != -9)
    assert not out.exists()
    while _running(out):  # What it had forked ends at the end of a block.
        time.sleep(0.05)
    write(table, out, **OPTIONS, resume=True, workers=2)
    assert files_of(out) == files_of(tmp_path / "whole")
    assert not left.exists()


def _running(out):
    commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    return [command for command in commands if str(out) in (command or ())]


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_whole_shards_are_not_written_again(tmp_path, table, compression, capsys):
    write(table, tmp_path / "whole", **OPTIONS, compression=compression)
    left = ended(table, tmp_path / "out", compression=compression)
    assert "2 whole shards, is kept" in capsys.readouterr().err
    before = {path.name: path.stat().st_ino for path in (left / "shards").iterdir()}
    seen = []
    options = {"compression": compression, "progress": lambda *now: seen.append(now)}
    write(table, tmp_path / "out", **OPTIONS, **options, resume=True)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    after = {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()}
    whole = sorted(before)[:2]
    assert [after[name] for name in whole] == [before[name] for name in whole]
    assert seen[-1] == (80, 80)
    assert "went on with what was kept, 2 whole shards" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["cut", "other bytes", "removed", "journal"])
def test_what_is_not_whole_any_more_is_written_again(tmp_path, table, damage):
    write(table, tmp_path / "whole", **OPTIONS)
    left = ended(table, tmp_path / "out")
    shard = left / "shards" / "train-00001-of-00004.tfrecord"
    data = shard.read_bytes()
    if damage == "journal":
        lines = (left / "shards.jsonl").read_bytes()
        (left / "shards.jsonl").write_bytes(lines[:-9])
    elif damage == "removed":
        shard.unlink()
    else:
        shard.write_bytes(data[:-7] if damage == "cut" else data[:-1] + b"?")
    ended(table, tmp_path / "out", after=3, resume=True)  # And ended once more.
    write(table, tmp_path / "out", **OPTIONS, resume=True)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_clients_are_gone_on_with(tmp_path, table):
    options = {"label": "label", "partition": "by:label"}
    write(table, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        write(table, tmp_path / "out", **options, progress=_end_at(40))
    write(table, tmp_path / "out", **options, resume=True)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def _end_at(records):
    def progress(done, _total):
        if done > records:
            raise KeyboardInterrupt

    return progress


def test_what_is_there_is_told_and_begun_anew_when_asked(tmp_path, table):
    left = ended(table, tmp_path / "out")
    for source in (table, np.zeros((80, 2))):
        with pytest.raises(
            DataError, match=r"2 whole shards\. Go on with resume=True, or begin anew"
        ):
            write(source, tmp_path / "out")
    assert left.exists()
    write(table, tmp_path / "out", **OPTIONS, seed=1, overwrite=True)
    write(table, tmp_path / "whole", **OPTIONS, seed=1)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert not left.exists()
    told = r"which holds something\. Remove it yourself, .* overwrite=True gives up what a run"
    with pytest.raises(DataError, match=told):
        write(table, tmp_path / "out", **OPTIONS, overwrite=True)


def test_files_of_the_users_in_it_are_never_removed(tmp_path, table):
    left = ended(table, tmp_path / "out")
    note = left / "note.txt"
    note.write_text("mine")
    for how in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(DataError, match=r"nothing but what tfdist shard left.*found note\.txt"):
            write(table, tmp_path / "out", **OPTIONS, **how)
    note.rename(tmp_path / "note.txt")
    done = []

    def progress(_done, _total):
        if not done:  # While it goes on.
            note.write_text("mine again")
        done.append(1)

    write(table, tmp_path / "out", **OPTIONS, resume=True, progress=progress)
    assert [path.name for path in left.iterdir()] == ["note.txt"]
    assert (tmp_path / "out" / "manifest.json").exists()


def test_another_run_is_not_gone_on_with(tmp_path, table):
    left = ended(table, tmp_path / "out")
    content = files_of(left / "shards")
    other = tmp_path / "in" / "other.csv"
    other.write_text(table.read_text())
    for source, options, message in (
        (table, {"seed": 3}, "seed 3 where it had 0. Give it the same"),
        (table, {"split": None}, "split none where it had train=1"),
        (other, {}, r"other\.csv where it had .*table\.csv"),
    ):
        with pytest.raises((DataError, OptionError), match=message):
            write(source, tmp_path / "out", **{**OPTIONS, **options}, resume=True)
    table.write_text(table.read_text() + "9,last,1\n")
    with pytest.raises(DataError, match="as it was when the run began, but found 1 files of"):
        write(table, tmp_path / "out", **OPTIONS, resume=True)
    assert files_of(left / "shards") == content


def test_there_must_be_something_to_go_on_with(tmp_path, table):
    out = tmp_path / "out"
    with pytest.raises(DataError, match="Leave it out, to begin"):
        write(table, out, **OPTIONS, resume=True)
    with pytest.raises(OptionError, match="on this machine, but found s3://bucket/out"):
        write(table, "s3://bucket/out", resume=True)
    with pytest.raises(OptionError, match="resume and overwrite must not go together"):
        write(table, out, resume=True, overwrite=True)
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "mine").write_text("x")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(DataError, match=r"no unfinished\.json of it"):
            write(table, out, **OPTIONS, **options)
    assert files_of(tmp_path / "out.unfinished") == {"mine": b"x"}


def _in_memory(kind, number=0):
    """Records of each kind of column, of which ``number`` is one value."""
    texts = np.array([f"text {n % 7}" for n in range(80)], object)
    texts[40] += str(number)
    if kind == "texts":
        return {"a": texts, "b": np.arange(80.0)}, np.arange(80) % 3
    if kind == "ragged":
        return [[n] * (1 + n % 4) if n != 40 else [n + number] for n in range(80)], np.arange(80)
    if kind == "dicts":
        return [{"x": np.full(3, n, np.float32), "label": n % 3 + number} for n in range(80)]
    x = np.arange(240, dtype=np.float32).reshape(80, 3)
    x[40, 1] += number
    return x, np.arange(80) % 3


@pytest.mark.parametrize("kind", ["arrays", "texts", "ragged", "dicts"])
def test_what_is_in_memory_is_gone_on_with_while_it_is_the_same(tmp_path, kind, capsys):
    options = {"num_shards": 4, "split": "train=1"}
    write(_in_memory(kind), tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        write(_in_memory(kind), tmp_path / "out", **options, progress=_end_at(40))
    kept = files_of(tmp_path / "out.unfinished" / "shards")
    with pytest.raises(DataError, match=r"found others\. Give the same in the same order"):
        write(_in_memory(kind, 1), tmp_path / "out", **options, resume=True)
    assert files_of(tmp_path / "out.unfinished" / "shards") == kept
    write(_in_memory(kind), tmp_path / "out", **options, resume=True)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert "went on with what was kept, 2 whole shards" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_what_nothing_is_kept_of_begins_anew_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stream_writer, "HEAD_BYTES", 200)
    note = "nothing was kept of an earlier run: this one began anew"

    def stream():
        return iter(_in_memory("dicts"))

    with pytest.raises(KeyboardInterrupt):
        write(stream, tmp_path / "stream", progress=_end_at(40))
    assert list(tmp_path.iterdir()) == []
    write(stream, tmp_path / "stream", resume=True)
    assert capsys.readouterr().out.count(note) == 1
    write(tmp_path / "stream", tmp_path / "anew", resume=True)
    assert capsys.readouterr().out.count(note) == 1
    write(_in_memory("arrays"), tmp_path / "arrays", resume=True)
    assert capsys.readouterr().out.count(note) == 1
    # A stream that was short when it was ended, and is so no more.
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt):
        write(stream, tmp_path / "grown", progress=_end_at(40))
    monkeypatch.setattr(stream_writer, "HEAD_BYTES", 200)
    with pytest.raises(
        DataError, match=r"of which nothing is kept\. Begin anew with overwrite=True"
    ):
        write(stream, tmp_path / "grown", resume=True)


def test_what_a_killed_process_has_left_is_removed(tmp_path):
    def left(name, seconds_ago):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train-00000").write_bytes(b"x")
        for path in (folder / "train-00000", folder):
            os.utime(path, (time.time() - seconds_ago,) * 2)
        return folder

    killed = left(f".out-{'a' * 32}", 100)
    others = [
        left(f".out-{'b' * 32}", 5),  # So young that it may be locked in a moment.
        left(f".other-{'c' * 32}", 100),
        left(".out-mine", 100),
    ]
    with staging_folder(tmp_path / "out") as running:
        os.utime(running, (time.time() - 100,) * 2)
        with staging_folder(tmp_path / "out"):
            assert running.exists()  # It is locked.
            assert not killed.exists()
    assert all((folder / "train-00000").exists() for folder in others)


def test_mistakes_leave_nothing_and_full_disks_what_is_done(tmp_path, table, monkeypatch):
    left = ended(table, tmp_path / "out", error=DataError("all must be well"))
    assert not left.exists()

    class Full(column_shards.ShardFile):
        def write(self, data):
            if "00002" in self.path.name:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(data)

    with monkeypatch.context() as patch:
        patch.setattr(column_shards, "ShardFile", Full)
        mend = "Choose a folder that you may write, on a disk with room, and go on with"
        with pytest.raises(DataError, match=rf"No space left on device\. {mend}"):
            write(table, tmp_path / "out", **OPTIONS)
    ended(table, tmp_path / "out", error=DataError("all must be well"), resume=True)
    write(table, tmp_path / "out", **OPTIONS, resume=True)
    write(table, tmp_path / "whole", **OPTIONS)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_only_one_process_goes_on(tmp_path, table):
    ended(table, tmp_path / "out")
    said = {"resume": True, "overwrite": False}
    with contextlib.suppress(OptionError):
        # Refused, so it holds nothing.
        Unfinished(tmp_path / "out", [str(table)], listing_of([table]), {"seed": 9}, **said)
    open_here = os.open(tmp_path / "out.unfinished" / "lock", os.O_RDWR)
    fcntl.flock(open_here, fcntl.LOCK_EX)
    with pytest.raises(InUseError, match="one process at a time"):
        write(table, tmp_path / "out", **OPTIONS, resume=True)
    os.close(open_here)
    write(table, tmp_path / "out", **OPTIONS, resume=True)


def test_only_one_of_two_that_begin_at_once_does(tmp_path, table):
    said = {"resume": False, "overwrite": False}
    out, listing = tmp_path / "out", listing_of([table])
    first, second = (Unfinished(out, [str(table)], listing, {}, **said) for _ in range(2))
    with first.kept_if_ended():
        first.begin()
        with pytest.raises(InUseError, match="one process at a time"), second.kept_if_ended():
            second.begin()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.unfinished"]
        assert sorted(files_of(first.folder)) == ["lock", "unfinished.json"]


def test_images_are_looked_at_once(tmp_path, monkeypatch):
    from PIL import Image

    photos = tmp_path / "photos"
    for number in range(20):
        path = photos / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4 + number % 3, 5), number).save(path)
    (photos / "a" / "4.png").write_bytes((photos / "a" / "4.png").read_bytes()[:60])
    monkeypatch.setattr(image_files, "_AT_ONCE", 4)
    options = {"num_shards": 2, "skip_bad": True}
    whole = write(photos, tmp_path / "whole", **options)
    assert whole.left_out == {"unreadable image": 1}
    looked, undecodable = [], image_files.undecodable

    def counted(data):
        looked.append(1)
        if len(looked) == 10:
            raise KeyboardInterrupt
        return undecodable(data)

    monkeypatch.setattr(image_files, "undecodable", counted)
    with pytest.raises(KeyboardInterrupt):
        write(photos, tmp_path / "out", **options)
    noted = Journal(tmp_path / "out.unfinished" / "images.jsonl").entries
    assert 0 < len(noted) < 5
    before = len(looked)
    write(photos, tmp_path / "out", **options, resume=True)
    assert len(looked) - before == 20 - 4 * len(noted)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_journal_is_read_up_to_the_line_that_was_cut(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path)
    for number in range(3):
        journal.add({"number": number})
    path.write_bytes(path.read_bytes()[:-4])
    again = Journal(path)
    assert again.entries == [{"number": 0}, {"number": 1}]
    again.add("ä")
    assert Journal(path).entries == [{"number": 0}, {"number": 1}, "ä"]
