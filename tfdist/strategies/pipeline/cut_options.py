"""What a user may ask of the cuts of a pipeline. Nothing here knows TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.errors import ModelError, OptionError

GOALS = ("speed", "memory")
SOURCES = ("estimated", "measured")


def cuts_after(named: Sequence[tuple[str, Sequence[int]]], count: int) -> tuple[int, ...]:
    """Returns the cuts after named items; see ``balance``.

    Args:
        named: name and items of the last layer of each part but the last.
        count: number of all items.

    Raises:
        OptionError: names out of order.
    """
    names = [name for name, _ in named]
    cuts = [max(items) + 1 for _, items in named]
    if cuts != sorted(set(cuts)):
        raise OptionError(
            "cut_after must name layers in the order of the model", received=", ".join(names)
        )
    if cuts and cuts[-1] == count:
        raise OptionError(
            "the last stage must have a layer too",
            received=f"a cut after the last layer, {names[-1]}",
        )
    return tuple(cuts)


def check_enough(
    num_calls: int, parts: int, stages: int, name: str, whole: Sequence[str] = ()
) -> None:
    """Raises:
    ModelError: fewer layers than parts.

    Args:
        whole: submodels of a class of their own, which no stage can have a part of.
    """
    if parts > num_calls:
        of_chunks = "" if parts == stages else f" of {parts // stages} chunks each"
        raise ModelError(
            f"a model for {stages} stages{of_chunks} must have at least {parts} layers",
            received=f"model '{name}' with {num_calls}"
            + (f", where {whole[0]}, of a class of its own, counts as one" if whole else ""),
            mend="Use strategy 'mirrored', 'horovod' or 'multi_worker', which hold it whole"
            + (f", or write {whole[0]} as a Functional model" if whole else "")
            + (f", or choose at most {num_calls} stages" if num_calls > 1 else ""),
        )
