"""What stands in a folder of ``tfdist train``: nothing of the user's is ever removed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist.errors import InUseError, OptionError, TfdistError, WriteError
from tfdist.runs import evaluating
from tfdist.runs.files import read_config, read_rows, write_json
from tfdist.runs.folder import MARK, RunFolder
from tfdist.runs.settings import Start
from tfdist.traces import places

pytestmark = pytest.mark.timeout(60)

CONFIG = {
    "model": "nowhere/model.py:model_fn",
    "data": "nowhere/data",
    "splits": {"train": "nowhere/data/train"},
    "strategy": "single",
    "output": "run",
    "global_batch_size": 8,
    "seed": 0,
}


class Ended(Exception):
    """A training that does not come to its end."""


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """Returns all that is in a folder but the mark: bytes of files, targets of links."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name != MARK:
            is_link = path.is_symlink()
            content = path.read_bytes() if path.is_file() else None
            found[name] = os.readlink(path) if is_link else content
    return found


def write_epoch(folder: RunFolder, text: str, number: int = 7) -> None:
    """Writes what a training has written when its first epoch has ended."""
    folder.checkpoints.mkdir(exist_ok=True)
    for suffix in ("index", "data-00000-of-00001"):
        (folder.checkpoints / f"ckpt-{number}.{suffix}").write_text(text)
    (folder.checkpoints / "checkpoint").write_text(text)
    folder.history.write_text(text)


def train(path: Path, text: str, **options) -> None:
    """Trains to the end."""
    folder = RunFolder(path)
    with folder.taken(CONFIG | {"text": text}, Start(**options)):
        trace = places.notes_of(places.run_of(folder.traces), 1 if text == "earlier" else 0)
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.write_text(text)
        write_epoch(folder, text)
        folder.replace_earlier()
        for file in (folder.model, folder.metrics, folder.curves):
            file.write_text(text)


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """The folder of a training that has ended."""
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "run", "earlier")
    return tmp_path / "run"


def test_a_training_replaces_an_earlier_one_and_nothing_else(run):
    (run / "notes.txt").write_text("mine")
    (run / "checkpoints" / "best.h5").write_text("mine")
    (run / ".config.json-original").write_text("mine")
    (run / "logs").mkdir()
    (run / "profile" / "mine").mkdir()
    train(run, "new", overwrite=True)
    found = contents(run)
    assert {name for name, content in found.items() if content == b"mine"} == {
        *("notes.txt", "checkpoints/best.h5", ".config.json-original")
    }
    assert found["logs"] is None
    assert found["profile/mine"] is None
    assert places.files_in(run) == ["profile/plugins/profile/tfdist/rank-0.json"]
    assert b"earlier" not in found.values()
    assert read_config(run / "config.json")["text"] == "new"
    assert found["checkpoints/ckpt-7.index"] == found["model.keras"] == b"new"


@pytest.mark.parametrize("ending", [Ended, KeyboardInterrupt, SystemExit])
def test_the_earlier_training_stands_until_an_epoch_of_the_new_one_has_ended(run, ending):
    before = contents(run)
    folder = RunFolder(run)

    def begin() -> None:
        with folder.taken(CONFIG, Start(overwrite=True)):
            folder.history.write_text("new")
            assert {n: c for n, c in contents(run).items() if n in before} == before
            raise ending

    with pytest.raises(ending):
        begin()
    assert contents(run) == before


def test_the_earlier_training_is_evaluated_until_then(run):
    (run.parent / "model.py").touch()
    with RunFolder(run).taken(CONFIG | {"text": "new"}, Start(overwrite=True)):
        (found,) = evaluating.find([str(run)], "model.py:model_fn")
        assert found.weights == run / "model.keras"


def test_a_new_training_that_has_checkpoints_is_not_lost_either(run):
    before = contents(run)
    told = []
    folder = RunFolder(run)

    def begin() -> None:
        with folder.taken(CONFIG, Start(overwrite=True), tell=told.append):
            write_epoch(folder, "new", 3)
            raise Ended

    with pytest.raises(Ended):
        begin()
    assert {n: c for n, c in contents(run).items() if n in before} == before
    assert "--resume goes on with the new one" in told.pop()
    with folder.taken(CONFIG, Start(resume=True), tell=told.append):
        assert (folder.checkpoints / "ckpt-3.index").read_text() == "new"
        folder.replace_earlier()
    assert "going on with the training that is to replace" in told.pop()
    assert (run / "history.csv").read_text() == "new"
    assert sorted(path.name for path in run.iterdir()) == [
        *(MARK, "checkpoints", "config.json", "history.csv")
    ]


def killed_at(number: int, work) -> bool:
    """Does ``work`` in a process that is killed at its n-th change of the file system, if any."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    changes = 0

    def counted(change):
        def run(*args, **options):
            nonlocal changes
            if changes == number:
                os.kill(os.getpid(), signal.SIGKILL)
            changes += 1
            return change(*args, **options)

        return run

    for name in ("rename", "replace", "unlink", "mkdir", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    try:
        work()
    finally:
        os._exit(0)


def test_whatever_moment_a_kill_strikes_at_one_training_is_whole(run):
    """Also when the next start, which ends what was begun, is killed."""
    (run / "notes.txt").write_text("mine")
    (run / "checkpoints" / "best.h5").write_text("mine")
    earlier = contents(run)
    sound = shutil.copytree(run, run.with_name("sound"))
    new_ones = set()
    number = 0
    while True:
        shutil.rmtree(run)
        shutil.copytree(sound, run)
        if not killed_at(number, lambda: train(run, "new", overwrite=True)):
            break
        killed_at(number % 5, lambda: train(run, "resumed", resume=True))
        with RunFolder(run).taken(CONFIG, Start(resume=True)):
            pass
        found = contents(run)
        assert found["notes.txt"] == found["checkpoints/best.h5"] == b"mine"
        kept = {found[f"{name}"] for name in ("history.csv", "checkpoints/ckpt-7.index")}
        assert kept in ({b"earlier"}, {b"new"}, {b"resumed"}), (number, kept)
        new_ones |= kept
        if kept == {b"earlier"}:
            assert all(found[n] == c for n, c in earlier.items() if n != "config.json")
        number += 1
    assert number > 15
    assert {b"earlier", b"new"} <= new_ones


@pytest.mark.parametrize(
    "what", ["working folder", "data", "init_weights", "model", "program", "module"]
)
def test_what_a_training_needs_is_not_replaced(run, what, monkeypatch):
    config = dict(CONFIG)
    inside = run / "inside"
    inside.mkdir()
    if what == "working folder":
        monkeypatch.chdir(inside)
    elif what in ("data", "init_weights"):
        config[what] = str(inside)
    elif what == "model":
        (inside / "model.py").touch()
        config["model"] = f"{inside / 'model.py'}:model_fn"
    elif what == "module":
        (run / "inside" / "__init__.py").touch()
        monkeypatch.chdir(run.parent)
        monkeypatch.syspath_prepend(run)
        config["model"] = "inside.model:model_fn"
    else:
        monkeypatch.setattr(sys, "argv", [str(inside / "train.py")])
    before = contents(run)
    with pytest.raises(OptionError, match="must not replace a folder that contains"):
        train_with(config, run, overwrite=True)
    assert contents(run) == before


def train_with(config: dict, path: Path, **options) -> None:
    with RunFolder(path).taken(config, Start(**options)):
        raise AssertionError("it must not have begun")


@pytest.mark.parametrize("name", ["", "checkpoints", "model.keras"])
def test_no_link_is_followed(run, name):
    place = run / name
    elsewhere = place.rename(run.with_name("elsewhere"))
    place.symlink_to(elsewhere)
    before = contents(run), contents(elsewhere)
    with pytest.raises(OptionError, match="a link"):
        train_with(CONFIG, run, overwrite=True)
    assert (contents(run), contents(elsewhere)) == before


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": '{"architectures": ["BertModel"]}', "model.keras": "theirs"},
        {"config.json": "[]"},
        {"notes.txt": ""},
        {".tfdist-run/": ""},
        {"config.json": "OURS", "model.py": "theirs"},
        {"config.json": "OURS", "checkpoints/best.h5": "theirs"},
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{"overwrite": True}, {}], ids=str)
def test_a_folder_of_someone_else_is_left_alone(tmp_path, files, options):
    for name, text in files.items():
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir()
        elif text == "OURS":
            write_json(path, CONFIG)
        else:
            path.write_text(text)
    before = contents(tmp_path)
    with pytest.raises(OptionError, match="new folder"):
        train_with(CONFIG, tmp_path / "run", **options)
    assert contents(tmp_path) == before


def test_a_training_of_an_earlier_version_is_known(run):
    (run / MARK).unlink()
    train(run, "new", overwrite=True)
    assert "earlier" not in (run / "history.csv").read_text()


@pytest.mark.parametrize("exists", [True, False])
def test_a_start_that_fails_leaves_what_was_there(tmp_path, exists):
    path = tmp_path / "deep" / "run"
    if exists:
        path.mkdir(parents=True)
    folder = RunFolder(path)

    def begin() -> None:
        with folder.taken(CONFIG):
            folder.checkpoints.mkdir()
            (folder.checkpoints / ".tfdist-lock").touch()
            raise Ended

    with pytest.raises(Ended):
        begin()
    assert [p.name for p in tmp_path.rglob("*")] == (["deep", "run"] if exists else [])


def test_a_second_training_names_the_first(run):
    """Which lets go when it is killed, whatever it has started."""
    hold = (
        "import subprocess, sys; from tfdist.runs.folder import RunFolder, Start\n"
        f"with RunFolder({str(run)!r}).taken({CONFIG!r}, Start(resume=True)):\n"
        "    forked, forks = os.pipe()\n"
        "    if os.fork() == 0: os.write(forks, b'.'); time.sleep(30); os._exit(0)\n"
        "    os.read(forked, 1)\n"
        "    left = subprocess.Popen(['sleep', '30'], stdout=subprocess.DEVNULL)\n"
        "    print(left.pid, flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", "import os, time; " + hold],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as first:
        try:
            assert first.stdout.readline()
            before = contents(run)
            for options in ({}, {"resume": True}, {"overwrite": True}):
                with pytest.raises(InUseError, match=rf"process {first.pid} on \S+ since 2"):
                    train_with(CONFIG, run, **options)
            assert contents(run) == before
            first.kill()
            first.wait()
            train(run, "new", overwrite=True)
        finally:
            os.killpg(first.pid, signal.SIGKILL)
    assert (run / "model.keras").read_text() == "new"


def test_what_a_rank_left_that_was_killed_while_it_traced_is_removed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "run")

    def half_trace() -> None:
        left = places.run_of(folder.traces) / f"{places.unfinished_of(1)}abcd_123"
        left.mkdir(parents=True)
        (left / "some.xplane.pb").write_text("half")

    def half_trace_and_die() -> None:
        half_trace()
        raise Ended

    with pytest.raises(Ended), folder.taken(CONFIG):
        half_trace_and_die()
    assert not folder.path.exists()
    with folder.taken(CONFIG):
        half_trace()
        write_epoch(folder, "first")
    assert not list(folder.path.rglob(".tracing-*"))
    with folder.taken(CONFIG, Start(overwrite=True)):
        half_trace()
        write_epoch(folder, "second")
        folder.replace_earlier()
    assert not list(folder.path.rglob(".tracing-*"))
    assert folder.history.read_text() == "second"


def test_a_new_folder_may_be_asked_to_rescale(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "run")
    with folder.taken(CONFIG, Start(resume=True, rescale=True)):
        assert read_config(folder.config) == CONFIG
    shutil.rmtree(folder.path)
    with pytest.raises(Ended), folder.taken(CONFIG, Start(resume=True, rescale=True)):
        raise Ended
    assert not folder.path.exists()


def test_resuming_compares_files_not_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("", "other"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "m.py").touch()
        (tmp_path / folder / "data").mkdir()
    config = CONFIG | {"model": "m.py:f", "data": "data", "working_folder": str(tmp_path)}
    run = RunFolder(tmp_path / "run")

    def resume(**changes):
        with run.taken(config | changes, Start(resume=True)):
            write_epoch(run, "epoch,seconds,samples_per_s\n")

    resume()
    resume(model="./m.py:f", data=str(tmp_path / "other" / ".." / "data"))
    other = str(tmp_path / "other")
    for changes in (
        {"working_folder": other},
        {"model": "other/m.py:f"},
        {"model": "m.py:g"},
        {"seed": 1},
    ):
        with pytest.raises(OptionError, match="--resume must have the"):
            resume(**changes)
    resume(working_folder=other, model="../m.py:f", data="../data")


def test_resuming_compares_the_records_and_how_they_are_read(tmp_path):
    run = RunFolder(tmp_path / "run")

    def resume(**changes):
        with run.taken(CONFIG | changes, Start(resume=True)):
            write_epoch(run, "epoch,seconds,samples_per_s\n")

    resume()  # An earlier tfdist, which wrote nothing of them down.
    resume(records="0000000a")
    for config in ({"records": "0000000b"}, {}):
        with pytest.raises(OptionError, match="must have the records of the training"):
            resume(**config)
    resume(records="0000000a")


def test_a_damaged_file_is_one_line(tmp_path):
    path = tmp_path / "config.json"
    for text in ("[" * 100_000, "{}", "[]", '{"model": 1}', "\xff", "1e999", ""):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(TfdistError, match="as tfdist train wrote it"):
            read_config(path)
    path = tmp_path / "history.csv"
    head = "epoch,seconds,samples_per_s\n"
    for text in (
        "",
        "a,b\n",
        f"{head}1e999,1,1\n",
        f"{head}x,1,1\n",
        f"{head}1,1,1,9\n",
        "\xff",
        f"{head}2,1,1\n1,1,1\n",
        f"{head}1.5,1,1\n",
        f"{head},1,1\n",
        "\0",
    ):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(TfdistError, match="as tfdist train wrote it"):
            read_rows(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(TfdistError, match="as tfdist train wrote it"):
        read_rows(path)


def test_a_path_that_is_no_pattern(tmp_path):
    with (
        pytest.raises(OptionError, match="must have none of the characters"),
        RunFolder(tmp_path / "run[1]").taken(CONFIG),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(run, monkeypatch):
    (run / MARK).unlink()
    (run / MARK).symlink_to(run.with_name("theirs"))
    with pytest.raises((WriteError, OptionError)):
        train_with(CONFIG, run, resume=True)
    assert not run.with_name("theirs").exists()
