"""Work in several processes that share what the parent holds in memory, or in several threads.

Processes are forked, so that columns of any size are given to none of them. Only for work that uses
Python and NumPy alone, and in a program that has not imported TensorFlow, whose threads a fork
would break.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from multiprocessing.connection import Connection, wait
from typing import Any

from tfdist.errors import DataError, spelt

# Work that is given a number for each part that is done.
Work = Callable[[Any, Callable[[int], None]], Any]


def may_fork() -> bool:
    return hasattr(os, "fork") and "tensorflow" not in sys.modules


def run_in_processes(
    jobs: Sequence[Any],
    work: Work,
    *,
    count: int,
    done: Callable[[Any], None],
    progress: Callable[[int], None],
) -> list[Any]:
    """Returns what ``work`` makes of each job, in their order.

    Args:
        work: called in a process with a job and a function that is to be called now and then, with
            how much was done since.
        count: of processes.
        done: called here with each result as it comes.
        progress: called here with what the processes say.

    Raises:
        DataError: a process was lost; or whatever ``work`` raised. No process is left.
    """
    context = multiprocessing.get_context("fork")
    left, results = list(enumerate(jobs))[::-1], [None] * len(jobs)
    workers: dict[Connection, Any] = {}
    try:
        for _ in range(min(count, len(jobs))):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, [*workers, here], work, os.getpid()), daemon=True
            )
            process.start()
            there.close()
            workers[here] = process
            here.send(left.pop())
        busy = set(workers)
        while busy:
            for connection in wait(list(busy)):
                kind, number, value = _received(connection, workers[connection])
                if kind == "progress":
                    progress(value)
                elif kind == "error":
                    raise value
                else:
                    results[number] = value
                    done(value)
                    if left:
                        connection.send(left.pop())
                    else:
                        busy.discard(connection)
        return results
    finally:
        for connection, process in workers.items():
            process.kill()
            process.join()
            connection.close()


class _StoppedError(Exception):
    """Ends a thread whose work nobody wants any more."""


def run_in_threads(
    jobs: Sequence[Any],
    work: Work,
    *,
    count: int,
    done: Callable[[Any], None] = lambda result: None,
    progress: Callable[[int], None],
) -> list[Any]:
    """As ``run_in_processes``; ``done`` and ``progress`` are called by the threads.

    Where one fails, or on Ctrl-C, the others end when they next tell what they have done.
    """
    stopping = threading.Event()

    def advance(number: int) -> None:
        progress(number)
        if stopping.is_set():
            raise _StoppedError

    def run(job: Any) -> Any:
        result = work(job, advance)
        done(result)
        return result

    pool = ThreadPoolExecutor(count, thread_name_prefix="tfdist-work")
    try:
        futures = [pool.submit(run, job) for job in jobs]
        ended = wait_for(futures, return_when=FIRST_EXCEPTION).done
        for future in futures:  # In their order: the first that failed is told.
            if future in ended:
                future.result()
        return [future.result() for future in futures]
    finally:
        # No thread may write into a folder that is being removed.
        stopping.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _received(connection: Connection, process: Any) -> tuple[str, int, Any]:
    try:
        return connection.recv()
    except (EOFError, OSError):
        process.join()
        lost = ChildProcessError(errno.ECHILD, os.strerror(errno.ECHILD))
        code = process.exitcode
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        raise DataError(
            "every process that writes shards must reach its end",
            received=f"one that was ended by {how}",
            mend=f"If memory was short, give fewer {spelt('workers')}",
        ) from lost


def _serve(connection: Connection, others: Sequence[Connection], work: Work, parent: int) -> None:
    """Works until the parent has no more, or is gone."""
    # Ctrl-C reaches all processes of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()

    def progress(number: int) -> None:
        if os.getppid() != parent:
            os._exit(1)
        connection.send(("progress", 0, number))

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            number, job = connection.recv()
            try:
                message = ("done", number, work(job, progress))
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:
                message = ("error", number, error)
            connection.send(message)
