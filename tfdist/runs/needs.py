"""What a step of a model needs on each of several strategies: memory, operations, messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tfdist.errors import LaunchError, OptionError, TfdistError
from tfdist.launch.jobs import Where
from tfdist.planning.needs import Needs
from tfdist.runs import ranks
from tfdist.training.engine import model_path
from tfdist.training.engine.options import check_count

RANK = "tfdist.runs.needs_rank"
#: Each is a TensorFlow of its own, which takes a core to trace and some 600 MB.
_AT_ONCE = 2
# A large model over many devices takes minutes to trace, and says nothing meanwhile.
_TIMEOUT_S = 900.0


def find_needs(
    model: str,
    asked: Sequence[tuple[str, Mapping[str, Any], int]],
    *,
    rows: int,
    on_event: Callable[[int, dict[str, Any]], None] = lambda row, event: None,
) -> list[Needs | TfdistError]:
    """Returns for each row of a plan what a step needs, or why there can be none.

    Args:
        model: "FILE.py:NAME", as ``tfdist train`` takes it.
        asked: (strategy, options, devices) of each row. Where the options of a strategy tell its
            devices (mesh, pipeline), those hold.
        rows: of the global batch that is planned for.
        on_event: called with (number of a row, event) of the process that traces it.

    Raises:
        ModelError: there is no such file.
        OptionError: ``rows`` is no such number.
        LaunchError: a process that traces a step died, or fell silent.
    """
    model_path.check(model)
    check_count("global_batch_size", rows)
    stop = threading.Event()

    def found(number: int) -> Needs | TfdistError:
        strategy, options, devices = asked[number]
        if strategy == "federated":
            return OptionError(
                "a strategy that is planned must train by steps of global batches",
                received="strategy 'federated', whose rounds are trainings of clients",
                mend="Plan another one: a client takes what single takes",
            )
        config = {"model": model, "asked": (strategy, dict(options), devices), "rows": rows}
        told: list[Needs] = []

        def take(_: int, event: dict[str, Any]) -> None:
            if event["event"] == "needs":
                told.append(Needs(**event["needs"]))
            on_event(number, event)

        try:
            # One process, wherever the strategy itself has several.
            where = Where(strategy="single", options={}, workers=1, stall_timeout_s=_TIMEOUT_S)
            ranks.run(RANK, config, where, take, stop=stop)
        except LaunchError:
            raise
        except TfdistError as error:
            return error
        assert told, strategy  # It tells, or fails.
        return told[0]

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="tfdist-needs") as pool:
        try:
            return list(pool.map(found, range(len(asked))))
        except BaseException:  # Ctrl-C and SIGTERM too, which come to this thread alone.
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
