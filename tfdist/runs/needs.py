"""What a step of a model needs on each of several strategies: memory, operations, messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.errors import ModelError, OptionError, TfdistError
from tfdist.launch.jobs import Where
from tfdist.planning.needs import Needs
from tfdist.runs import ranks
from tfdist.training.engine import model_path
from tfdist.training.engine.options import check_count

RANK = "tfdist.runs.needs_rank"
#: One process, wherever the strategies themselves have several. A step of a large model takes
#: minutes to trace, or to run on a CPU, and says nothing meanwhile.
ONE_PROCESS = Where(strategy="single", options={}, workers=1, stall_timeout_s=900.0)


def find_needs(
    model: str,
    asked: Sequence[tuple[str, Mapping[str, Any], int]],
    *,
    rows: int,
    on_gpus: bool = False,
    on_event: Callable[[int, dict[str, Any]], None] = lambda row, event: None,
) -> list[Needs | TfdistError]:
    """Returns for each row of a plan what a step needs, or why there can be none.

    Each is traced in a process of its own, whose end is its row's alone.

    Args:
        model: "FILE.py:NAME", as ``tfdist train`` takes it.
        asked: (strategy, options, devices) of each row. Where the options of a strategy tell its
            devices (mesh, pipeline), those hold.
        rows: of the global batch that is planned for.
        on_gpus: whether it is planned for GPUs, which order operations in another way than CPUs.
        on_event: called with (number of a row, event) of the process that traces it.

    Raises:
        ModelError: there is no such file.
        OptionError: ``rows`` is no such number.
        LaunchError: nothing could be traced, or what traces fell silent.
    """
    model_path.check(model)
    check_count("global_batch_size", rows)
    found: dict[int, Needs | TfdistError] = {
        number: OptionError(
            "a strategy that is planned must train by steps of global batches",
            received="strategy 'federated', whose rounds are trainings of clients",
            mend="Plan another one: a client takes what single takes",
        )
        for number, each in enumerate(asked)
        if each[0] == "federated"
    }
    traced = [number for number in range(len(asked)) if number not in found]

    def take(_: int, event: dict[str, Any]) -> None:
        if "row" not in event:
            on_event(0, event)
            return
        number = traced[event["row"]]
        if event["event"] == "needs":
            found[number] = Needs(**event["needs"])
        elif event["event"] == "died":
            found[number] = ModelError(
                "a step that is planned must be traced to its end",
                received=f"a process that ended with {event['how']}",
                mend="Read what it has printed; a large model may need more memory than this "
                "machine has",
            )
        else:
            found[number] = ranks.told_mistake(event)
        on_event(number, event)

    if traced:
        own = [(asked[each][0], dict(asked[each][1]), asked[each][2]) for each in traced]
        config = {"model": model, "asked": own, "rows": rows, "on_gpus": on_gpus}
        ranks.run(RANK, config, ONE_PROCESS, take)
    return [found[number] for number in range(len(asked))]
