"""What an option is, and those of the train step, shared by all strategies that divide batches.

Nothing here knows TensorFlow: options are checked before it is there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from tfdist.errors import OptionError, unknown_choice
from tfdist.topology import deadlines

SHARDS = ("none", "optimizer", "weights")
OFFLOADS = ("none", "optimizer", "activations")
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
#: TensorFlow counts rows, steps and devices in 32 bits.
_MOST = 2**31 - 1
_KINDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    Mapping: "a dict",
    Sequence: "a list",
    Callable: "a function",
}


def option(
    default: Any,
    text: str | None = None,
    *,
    metavar: str | None = None,
    least: int | None = None,
    choices: Sequence[str] = (),
    alone: str | None = None,
    same_on_resume: bool = False,
    in_job: str = "value",
) -> Any:
    """Returns the field of a dataclass that is a table of options: all that there is to say of one.

    The shell, ``tfdist.train``, configuration files and jobs on SageMaker take name, type and
    default from the field, and from its metadata what is here.

    Args:
        text: what ``--help`` says.
        metavar: what it calls the value.
        least: smallest whole number.
        choices: all values that there are.
        alone: the value where the shell gives the option without one.
        same_on_resume: whether a resumed training must have that of the one it goes on from.
        in_job: how a job on SageMaker has it: as this "value"; as a function in the "code" that is
            sent, a file of a "channel", or a folder for "logs"; or "never".
    """
    about = {key: value for key, value in locals().items() if key != "default"}
    return field(default=default, metadata=about)


def picked(table: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the arguments of a call that are options of ``table``, paths as text."""
    values = {each.name: given[each.name] for each in fields(table) if each.name in given}
    return {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in values.items()
    }


def check_values(table: Any) -> None:
    """Raises:
    OptionError: an option is of another type than its field, too small, or none of its choices.
    """
    hints = get_type_hints(type(table))
    for each in fields(table):
        value, least, hint = getattr(table, each.name), each.metadata.get("least"), hints[each.name]
        if value is None and each.default is None:
            continue
        if least is not None:
            check_count(each.name, value, least)
            continue
        of = [get_origin(one) or one for one in get_args(hint) if one is not type(None)]
        kinds = of if isinstance(hint, UnionType) else [get_origin(hint) or hint]
        # Python's True is a whole number, and its whole numbers are no floats.
        is_one = bool in kinds if isinstance(value, bool) else isinstance(value, tuple(kinds))
        if not is_one and not (float in kinds and type(value) is int):
            raise OptionError(
                f"{each.name} must be {' or '.join(_KINDS[kind] for kind in kinds)}",
                received=repr(value),
                mend=f"Give such a value, or leave {each.name} out",
            )
        choices = each.metadata.get("choices")
        if choices and value not in choices:
            raise unknown_choice(each.name, value, choices)


class OfBatchNorm(str):
    """What makes a strategy differ from one device where a model has BatchNormalization."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a train step computes: options of ``DataParallel``, under the same names.

    Raises:
        OptionError: a value that cannot hold.
    """

    precision: str | None = None
    accumulate_steps: int = 1
    recompute: str | Sequence[str] | None = "none"
    sync_batch_norm: bool = True
    shard: str = "none"
    offload: str | Sequence[str] = "none"
    offload_dir: str | os.PathLike | None = None

    def __post_init__(self) -> None:
        check_precision(self.precision)
        check_count("accumulate_steps", self.accumulate_steps)
        if not isinstance(self.sync_batch_norm, bool):
            raise OptionError(
                "sync_batch_norm must be True or False",
                received=repr(self.sync_batch_norm),
                mend="Write sync_batch_norm=False, or leave it out",
            )
        if self.shard not in SHARDS:
            raise unknown_choice("shard", self.shard, SHARDS)
        self._check_offload()
        given = self.recompute
        names = () if given is None else (given,) if isinstance(given, str) else given
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise OptionError(
                "recompute must be 'none', 'blocks', or names of layers",
                received=repr(given),
                mend="Write recompute='blocks', or leave it out",
            )

    def _check_offload(self) -> None:
        for what in self._offloaded:
            if what not in OFFLOADS:
                raise unknown_choice("offload", what, OFFLOADS)
        if self.shards_weights and self.offloads_slots:
            raise OptionError(
                "slots must lie with the parts of the weights that they are for",
                received="shard='weights' with offload='optimizer'",
                mend="Take shard='optimizer', or leave offload='optimizer' out",
            )
        if self.offload_dir is None:
            return
        if not self.offloads_activations:
            raise OptionError(
                "offload_dir must go with offload='activations', which are written there",
                received=f"offload={self.offload!r}",
                mend="Leave offload_dir out, or write offload='activations'",
            )
        if not os.path.isdir(self.offload_dir):
            raise OptionError(
                "offload_dir must be a folder that exists",
                received=f"no folder {os.fspath(self.offload_dir)}",
                mend="Make it first, on a disk with room for a step's activations",
            )

    @property
    def _offloaded(self) -> tuple[str, ...]:
        # On the command line: -o offload=optimizer,activations
        return tuple(self.offload.split(",") if isinstance(self.offload, str) else self.offload)

    @property
    def offloads_slots(self) -> bool:
        return "optimizer" in self._offloaded

    @property
    def offloads_activations(self) -> bool:
        return "activations" in self._offloaded

    @property
    def offloads(self) -> bool:
        return self.offloads_slots or self.offloads_activations

    @property
    def divides_slots(self) -> bool:
        """Whether each replica has slots of its part of the weights alone."""
        return self.shards or self.offloads_slots

    @property
    def dividing_option(self) -> str:
        """Which option has slots divided, as people wrote it."""
        return f"shard={self.shard!r}" if self.shards else "offload='optimizer'"

    @property
    def recomputes(self) -> bool:
        return self.recompute not in (None, "none")

    @property
    def shards(self) -> bool:
        return self.shard != "none"

    @property
    def shards_weights(self) -> bool:
        return self.shard == "weights"

    @property
    def recomputed_layers(self) -> tuple[str, ...] | None:
        """Names of layers; None leaves the choice of blocks to tfdist."""
        if self.recompute == "blocks" or not self.recomputes:
            return None
        # On the command line: -o recompute=encoder1,encoder2
        is_text = isinstance(self.recompute, str)
        return tuple(self.recompute.split(",") if is_text else self.recompute or ())

    @property
    def changes_the_step(self) -> bool:
        """Whether one replica too needs a train step of tfdist's."""
        return self.accumulate_steps > 1 or self.recomputes or self.offloads

    @property
    def approximations(self) -> tuple[str, ...]:
        found, takes = [], "takes the statistics of BatchNormalization"
        if self.accumulate_steps > 1:
            found.append(f"accumulate_steps={self.accumulate_steps} {takes} from each microbatch")
        if not self.sync_batch_norm:
            found.append(f"sync_batch_norm=False {takes} on each replica")
        return tuple(map(OfBatchNorm, found))


def check_count(option: str, value: object, least: int = 1) -> None:
    """Checks a count. Raises OptionError: not a whole number of at least so many, or too large."""
    if type(value) is not int or value < least:
        raise OptionError(
            f"{option} must be a whole number of at least {least}",
            received=repr(value),
            mend=f"Choose {least} or more",
        )
    if value > _MOST:
        raise OptionError(
            f"{option} must be at most {_MOST}",
            received=f"{min(value, 10**300):.3g}",
            mend="Choose a smaller one",
        )


def check_seed(seed: object) -> None:
    """Checks a seed. Raises OptionError: it is none for Keras, NumPy and Python alike."""
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise OptionError(
            f"seed must be a whole number from 0 to {2**32 - 1}",
            received=repr(seed),
            mend="Choose for example 0",
        )


def check_deadline(option: str, value: object) -> None:
    """Checks seconds to wait. Raises OptionError: less than 1, infinite, or no number."""
    if not isinstance(value, (int, float)) or not 1 <= value < math.inf:
        raise OptionError(
            f"{option} must be a number of seconds, at least 1",
            received=repr(value),
            mend="Choose for example 600, ten minutes",
        )


def deadline(option: str, value: float | None) -> float:
    """Returns seconds that a rank waits: those given, else those of the command that started it.

    Raises:
        OptionError: see ``check_deadline``.
    """
    if value is None:
        return deadlines.heard(os.environ, option)
    check_deadline(option, value)
    return value


def check_precision(precision: str | None) -> None:
    """Checks a precision. Raises OptionError: there is no such one."""
    if precision is not None and precision not in PRECISIONS:
        raise unknown_choice("precision", precision, PRECISIONS)
