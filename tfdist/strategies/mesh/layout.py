"""Where each weight is split: by the user's rules, else by the rule of its layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist import keras
from tfdist.errors import OptionError, unknown_choice

#: Fewer columns than this on a device cost more to bring together than they save.
MIN_SPLIT = 8

Axes = tuple[str | None, ...]


class Layout:
    """Decides for each weight which mesh axis each of its dimensions is split on.

    Args:
        rules: regular expression of a weight's path ("dense_1/kernel") -> the mesh axis of each
            dimension, None where it is whole; the first rule that is found in the path holds.
        model: devices on the model axis.

    Raises:
        OptionError: a rule that is not one.
    """

    def __init__(self, rules: Mapping[str, Sequence[str | None]] | None, model: int):
        self.model = model
        self._rules: dict[str, Axes] = {}
        self._used: set[str] = set()
        #: weight id -> its axes, as the conversion has settled them.
        self.settled: dict[int, Axes] = {}
        if rules is not None and not isinstance(rules, Mapping):
            raise OptionError(
                "layout must map regular expressions of weight paths to mesh axes",
                received=repr(rules),
                mend='Write for example {"dense_1/kernel": (None, "model")}',
            )
        for pattern, axes in (rules or {}).items():
            self._rules[pattern] = _checked(pattern, axes)

    def asked_for(self, variable: Any) -> Axes | None:
        """Returns the axes that the user's rules give a weight, None where they are silent.

        Raises:
            OptionError: the rule has another number of dimensions, or its axis does not divide one.
        """
        path = path_of(variable)
        for pattern, axes in self._rules.items():
            if re.search(pattern, path):
                self._used.add(pattern)
                self._check(pattern, axes, path, variable.shape)
                return axes
        return None

    def _check(self, pattern: str, axes: Axes, path: str, shape: Any) -> None:
        if len(axes) != len(shape):
            raise OptionError(
                f"a layout rule must name one mesh axis, or None, for each dimension of {path}, "
                f"which has {len(shape)}",
                received=f"{pattern!r}: {axes}",
                mend=f"Write {(None,) * len(shape)}, with 'model' for the dimension to split",
            )
        for dimension, axis in enumerate(axes):
            size = shape[dimension]
            if axis is not None and size % self.model:
                divisors = [d for d in range(1, size + 1) if size % d == 0]
                raise OptionError(
                    f"mesh axis 'model' must divide the dimension that it splits, {size} in "
                    f"dimension {dimension} of {path}",
                    received=f"model={self.model}",
                    mend=f"Choose model from {divisors[:12]}, or leave that dimension whole",
                )

    def can_split(self, size: int) -> bool:
        """Whether the automatic layout splits a dimension of ``size``."""
        return self.model > 1 and size % self.model == 0 and size // self.model >= MIN_SPLIT

    def settle(self, variable: Any, axes: Axes) -> Axes:
        """Records the axes of a weight; those of its first use hold.

        Raises:
            OptionError: the user asked for others, which its layer cannot have.
        """
        if id(variable) not in self.settled:
            asked = self.asked_for(variable)
            if asked is not None and self.model > 1 and asked != axes:
                raise OptionError(
                    f"a layout must split {path_of(variable)} as its layer can",
                    received=f"{asked} asked for",
                    mend=f"Ask for {axes}, or give the rule to the kernel that it goes with",
                )
            self.settled[id(variable)] = axes
        return self.settled[id(variable)]

    def check_complete(self, variables: Sequence[Any]) -> None:
        """Checks the layout of a whole model, when all its layers have been converted.

        Raises:
            OptionError: a rule that no weight matches, or a model axis that splits nothing.
        """
        for variable in variables:
            self.asked_for(variable)
        unused = [pattern for pattern in self._rules if pattern not in self._used]
        if unused:
            paths = ", ".join(path_of(variable) for variable in variables)
            raise OptionError(
                "every rule of a layout must be found in the path of a weight",
                received=f"{unused[0]!r}, which is in none",
                mend=f"Choose from the paths {paths}",
            )
        if self.model > 1 and variables and not any(any(axes) for axes in self.settled.values()):
            sizes = ", ".join(f"{path_of(v)} {tuple(v.shape)}" for v in variables)
            raise OptionError(
                "mesh axis 'model' must divide a dimension of some weight, and leave at least "
                f"{MIN_SPLIT} of it on each device",
                received=f"model={self.model} for {sizes}",
                mend="Choose a model axis that divides a wide layer, ask for a split with layout, "
                "or take model=1",
            )


def path_of(variable: Any) -> str:
    """Returns the path of a weight, such as "dense_1/kernel"."""
    return keras.tensors.path_of(variable).partition(":")[0]


def _checked(pattern: str, axes: Any) -> Axes:
    try:
        re.compile(pattern)
    except re.error as error:
        raise OptionError(
            "a layout rule must begin with a regular expression",
            received=f"{pattern!r}: {error}",
            mend="Write part of a weight's path, as dense_1/kernel, or escape what is named",
        ) from error
    if not isinstance(axes, (tuple, list)):
        raise OptionError(
            "a layout rule must end in one mesh axis, or None, for each dimension",
            received=f"{pattern!r}: {axes!r}",
            mend="Write for example {'kernel': (None, 'model')}",
        )
    for axis in axes:
        if axis == "batch":
            raise OptionError(
                "weights must be split on mesh axis 'model' only, since 'batch' splits the records",
                received=f"{pattern!r}: {tuple(axes)}",
                mend="Write 'model' or None in place of 'batch'",
            )
        if axis not in (None, "model"):
            raise unknown_choice("mesh axis", axis, ["model"])
    if list(axes).count("model") > 1:
        raise OptionError(
            "one mesh axis must split at most one dimension of a weight",
            received=f"{pattern!r}: {tuple(axes)}",
            mend="Write 'model' once, and None for the other dimensions",
        )
    return tuple(axes)
