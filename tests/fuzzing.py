"""Damages files at random, and sees what reads them: it must return, or refuse in one line.

A file of targets defines ``targets(folder) -> list[Target]``, which writes what is to be damaged
into an empty folder. ``python tests/fuzzing.py FILE --mutations 10000`` prints a table; a test
calls ``fuzz``. Readers run in a process of their own, so that one that crashes or hangs is seen.
The same seed damages in the same way: ``--kind KIND --case N`` runs one again, with its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

sys.path.append(str(Path(__file__).parent))

import mutations

OUTCOMES = ("read", "refused in one line", "silently wrong", "traceback", "crash", "hang")
GOOD = OUTCOMES[:2]
_LONGEST_LINE = 4000
_STARTS_IN_S = 240.0


class Wrong(Exception):
    """Raise it from ``Target.use`` when something is read, and is not what was written."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A kind of file, and what reads it.

    Attributes:
        kind: name of the row in the table, as "manifest.json, fit".
        file: what is damaged; the whole folder is put back after each case.
        mutations: see ``mutations``; each case does one of them.
        use: reads; it must return, or raise a TfdistError, see ``cli``.
        limit_s: seconds that may pass without an answer, those of a first import included.
    """

    kind: str
    file: Path
    mutations: Sequence[mutations.Mutation]
    use: Callable[[], object]
    limit_s: float = 60


@dataclass
class Report:
    """Outcomes by kind, and each bad case.

    Attributes:
        counts: kind -> outcome -> number of cases.
        bad: one line for each case that was neither read nor refused in one line.
    """

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)

    def add(self, kind: str, case: int, outcome: str, detail: str) -> None:
        self.counts.setdefault(kind, Counter())[outcome] += 1
        if outcome not in GOOD:
            self.bad.append(f"{kind}, case {case}: {outcome}: {detail}")

    def __str__(self) -> str:
        width = max(map(len, self.counts), default=4)
        rows = [" | ".join(["file and reader".ljust(width), *OUTCOMES])]
        for kind, counts in self.counts.items():
            cells = [str(counts[outcome]).rjust(len(outcome)) for outcome in OUTCOMES]
            rows.append(" | ".join([kind.ljust(width), *cells]))
        return "\n".join(rows)


def fuzz(file: Path, cases: int, *, seed: int = 0, kinds: Sequence[str] = ()) -> Report:
    """Runs ``cases`` cases of each target of ``file``, or of those in ``kinds``."""
    report = Report()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        folder = Path(folder)
        if not kinds:
            kinds = [target.kind for target in _load(file).targets(_made(folder / "known"))]
        number = 0
        while number < cases * len(kinds):
            made = _made(folder / str(number))
            for outcome, detail in _run_worker(file, made, kinds, seed, number, cases):
                report.add(kinds[number // cases], number % cases, outcome, detail)
                number += 1
            shutil.rmtree(made, ignore_errors=True)
    return report


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _load(file: Path) -> ModuleType:
    sys.modules["fuzzing"] = sys.modules[__name__]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run_worker(
    file: Path, folder: Path, kinds: Sequence[str], seed: int, first: int, cases: int
) -> Iterator[tuple[str, str]]:
    """Yields (outcome, detail) of each case from ``first`` on, until one ends the worker."""
    ours, theirs = os.pipe()
    plan = {"folder": str(folder), "kinds": kinds, "first": first, "cases": cases}
    plan |= {"descriptor": theirs, "seed": seed}
    # Of a warm start: a fork of another process has no pipe of this one.
    cold = {name: text for name, text in os.environ.items() if name != "TFDIST_TESTS_ZYGOTE"}
    worker = subprocess.Popen(
        [sys.executable, __file__, str(file), "--worker", json.dumps(plan)],
        pass_fds=(theirs,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=cold | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    os.close(theirs)
    errors = _tail(worker)
    limit_s, rest, left = _STARTS_IN_S, b"", cases * len(kinds) - first
    try:
        with open(ours, "rb", buffering=0):
            while left:
                deadline = time.monotonic() + limit_s
                while b"\n" not in rest:
                    wait_s = max(0, deadline - time.monotonic())
                    if not select.select([ours], [], [], wait_s)[0]:
                        yield "hang", f"no answer in {limit_s:g} s"
                        return
                    if not (data := os.read(ours, 1 << 16)):
                        worker.wait()
                        yield "crash", f"exit code {worker.returncode}: {errors()}"
                        return
                    rest += data
                line, _, rest = rest.partition(b"\n")
                answer = json.loads(line)
                if "outcome" in answer:
                    yield answer["outcome"], answer["detail"]
                    left -= 1
                limit_s = answer.get("limit_s", _STARTS_IN_S)
    finally:
        worker.kill()
        worker.wait()


def _tail(worker: subprocess.Popen) -> Callable[[], str]:
    """Reads what a worker complains of beside it; returns a function that gives its last line."""
    lines: list[bytes] = []

    def read() -> None:
        for line in worker.stderr:
            lines.append(line.strip())
            del lines[:-5]

    thread = threading.Thread(target=read, daemon=True)
    thread.start()

    def last() -> str:
        thread.join(5)
        return b" / ".join(lines).decode("utf-8", "replace")[-400:]

    return last


def _work(
    file: Path,
    *,
    folder: str,
    kinds: Sequence[str],
    first: int,
    cases: int,
    descriptor: int,
    seed: int,
) -> None:
    """The worker: damages, reads, tells, puts back."""
    folder = Path(folder)
    targets = {target.kind: target for target in _load(file).targets(folder)}
    kept = folder.with_name(f"{folder.name}-kept")
    shutil.copytree(folder, kept, symlinks=True)
    with open(descriptor, "w", buffering=1) as answers:
        for number in range(first, cases * len(kinds)):
            target = targets[kinds[number // cases]]
            print(json.dumps({"limit_s": target.limit_s}), file=answers)
            outcome, detail = run_case(target, seed, number % cases)
            print(json.dumps({"outcome": outcome, "detail": detail}), file=answers)
            _put_back(folder, kept)


def _put_back(folder: Path, kept: Path) -> None:
    """New inodes and times: what a reader remembers of a file does not hold for the next one."""
    for path in folder.iterdir():
        mutations.remove(path)
    shutil.copytree(kept, folder, symlinks=True, dirs_exist_ok=True, copy_function=shutil.copyfile)


def run_case(target: Target, seed: int, case: int, *, show: bool = False) -> tuple[str, str]:
    """Returns the outcome of one case, and what there is to say of it."""
    rng = random.Random(f"{seed}, {target.kind}, {case}")
    mutation = rng.choice(list(target.mutations))
    mutation(target.file, rng)
    return judge(target.use, mutation.__name__, show=show)


def judge(use: Callable[[], object], name: str, *, show: bool = False) -> tuple[str, str]:
    """Returns how ``use`` ended: one of ``OUTCOMES``, and what there is to say of it."""
    from tfdist.errors import TfdistError

    try:
        use()
    except Wrong as error:
        return "silently wrong", f"{name}: {error}"
    except (TfdistError, Refused) as error:
        text = str(error)
        is_line = "\n" not in text and 0 < len(text) <= _LONGEST_LINE
        with contextlib.suppress(UnicodeEncodeError):
            text.encode()
            if is_line:
                return "refused in one line", text
        return "traceback", f"{name}: not one line that can be printed: {text[:300]!a}"
    except BaseException as error:
        if show:
            traceback.print_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}"[:300]
        return "traceback", f"{name}: {text!a} in {Path(frame.filename).name}:{frame.lineno}"
    return "read", ""


class Refused(Exception):
    """The command line ended with exit code 2 and one line."""


def cli(*arguments: object, good: Sequence[int] = (0, 1)) -> str:
    """Runs ``tfdist`` in this process, and returns its output.

    Raises:
        Refused: exit code 2 and one line on stderr; RuntimeError: it ended in another way.
    """
    from tfdist.cli.main import main

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    before = sys.argv
    sys.argv = ["tfdist", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        sys.argv = before
    shown, complaint = (stream.buffer.getvalue().decode() for stream in (out, err))
    if code == 2 and complaint.startswith("tfdist: ") and complaint.count("\n") == 1:
        raise Refused(complaint.strip())
    if code not in good or "Traceback" in complaint:
        raise RuntimeError(f"exit code {code}: {complaint[-300:]}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--mutations", type=int, default=10_000, help="over all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", default=[])
    parser.add_argument("--case", type=int, help="run this one again, here")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options.file, **options.worker)
        return
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        found = _load(options.file).targets(Path(folder))
        chosen = [target for target in found if target.kind in (options.kind or [target.kind])]
        if options.case is not None:
            print(*run_case(chosen[0], options.seed, options.case, show=True), sep=": ")
            return
    each = -(-options.mutations // len(chosen))
    report = fuzz(options.file, each, seed=options.seed, kinds=[t.kind for t in chosen])
    print(report, *report.bad, sep="\n")
    sys.exit(1 if report.bad else 0)


if __name__ == "__main__":
    main()
