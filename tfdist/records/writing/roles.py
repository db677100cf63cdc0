"""Which columns of a table, or arrays of an archive, are inputs, labels, or left out.

Nothing becomes an input by accident: what looks like a label and is not named is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tfdist.errors import DataError, spelt

WEIGHT = "sample_weight"
_LABEL = re.compile(r"(label|target)s?|class(es)?|y", re.IGNORECASE)
_LIKE_A_LABEL = re.compile(
    r"(label|target)s?(\d+|[ _.-].*)?|.*[ _.-](label|target)s?|class(es)?([ _.-]?\d+|[ _.-]\w)?"
    r"|y(\d+|[ _.-]\w+)?",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a user says of the columns.

    Attributes:
        label: the labels: one name, several, or several in one text, separated by commas.
        inputs: the inputs, likewise; every other column is then left out.
        drop: what is left out, likewise.
        weight: the sample weight; None: "sample_weight", where there is one.
        client: what names the client of each record.
        text: columns of a table that are text, whatever they look like.
        categories: columns of a table whose values are the names of categories, likewise.
        missing: what becomes of missing values of a table: see ``tables.packing``.
        skip_bad: whether rows of a table that cannot be read are left out.
    """

    label: str | Sequence[str] | None = None
    inputs: str | Sequence[str] | None = None
    drop: str | Sequence[str] | None = None
    weight: str | None = None
    client: str | None = None
    text: str | Sequence[str] | None = None
    categories: str | Sequence[str] | None = None
    missing: str | float | None = None
    skip_bad: bool = False

    @property
    def names_columns(self) -> bool:
        return not self.label is self.inputs is self.drop is self.weight is None

    @property
    def is_of_a_table(self) -> bool:
        """Whether it says something that holds of tables alone."""
        return not self.text is self.categories is self.missing is None


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What each column is, in the order of the source; the client may be a label too.

    Attributes:
        guess: how the label was found when nobody named it; None when somebody did.
    """

    inputs: tuple[str, ...]
    labels: tuple[str, ...]
    weight: str | None
    client: str | None
    dropped: tuple[str, ...]
    guess: str | None = None

    @property
    def used(self) -> tuple[str, ...]:
        """The inputs, the labels and the weight."""
        return (*self.inputs, *self.labels, *filter(None, [self.weight]))

    def listed(
        self, names: Sequence[str], details: Mapping[str, str] | None = None
    ) -> tuple[tuple[str, str], ...]:
        """Returns (name, what it has become) of each column.

        Args:
            details: by name, what else there is to say of a column.
        """
        more = {name: f" ({detail})" for name, detail in (details or {}).items()}
        return tuple((name, self._of(name) + more.get(name, "")) for name in names)

    def _of(self, name: str) -> str:
        if name in self.labels:
            guessed = "" if self.guess is None else f" ({self.guess})"
            return f"label{guessed}" + (" and client" if name == self.client else "")
        if name == self.client:
            return "client, no input"
        if name in self.inputs:
            return "input"
        return "weight" if name == self.weight else "dropped"


def looks_like_label(name: str) -> bool:
    return _LIKE_A_LABEL.fullmatch(name) is not None


def assign(
    place: str,
    what: str,
    names: Sequence[str],
    asked: Asked,
    *,
    last_is_label: bool = False,
    are_labels: bool = False,
    doubtful: Collection[str] = (),
) -> Roles:
    """Returns what each column is.

    Args:
        place: where the columns are, for messages.
        what: "column" or "array", for messages.
        names: all of them, each once.
        last_is_label: whether the last one is the label where none is called so.
        are_labels: whether none is an input, as beside images: without one that is named, all are
            labels.
        doubtful: what may be a label by its content, whatever its name.

    Raises:
        DataError: a name that does not exist or has two roles, or columns of which only the user
            can say what they are.
    """
    client = asked.client
    weight = None if asked.weight is None else str(asked.weight)  # pandas' may be a number.
    check_there(place, what, client, names)
    check_there(place, what, weight, names, spelt("weight"))
    labels = named(place, what, spelt("label"), asked.label, names)
    inputs = named(place, what, spelt("inputs"), asked.inputs, names)
    drop = named(place, what, spelt("drop"), asked.drop, names) or ()
    check_apart(place, what, labels, inputs, drop, filter(None, [weight]))
    # A label that names the clients stays a label; an input would be learnt by heart.
    check_apart(place, what, filter(None, [client]), (*(inputs or ()), *drop))
    weight = weight or (WEIGHT if WEIGHT in names else None)
    if weight in (*(labels or ()), *(inputs or ()), *drop, client):
        weight = None
    free = [name for name in names if name not in (*drop, client, weight, *(inputs or ()))]
    guess = None
    if are_labels:
        labels, inputs = tuple(free) if labels is None else labels, ()
    elif labels is None:
        labels, guess = _guess(place, what, free, last_is_label)
    left = [name for name in free if name not in labels]
    if inputs is None:
        _check_none_is_a_label(place, what, left, labels, doubtful)
        inputs = tuple(left)
    if not inputs and not are_labels:
        raise DataError(
            f"{place} must have an input {what} beside the label",
            received=f"{what}s {', '.join(names)}",
            mend=f"Add one, or name fewer with {spelt('label')} and {spelt('drop')}",
        )
    used = {*inputs, *labels, client, weight}
    return Roles(
        inputs=inputs,
        labels=labels,
        weight=weight,
        client=client,
        dropped=tuple(name for name in names if name not in used),
        guess=guess,
    )


def named(
    place: str, what: str, option: str, given: str | Sequence[str] | None, names: Sequence[str]
) -> tuple[str, ...] | None:
    """Returns the columns that an option names; None where it is not given.

    Raises:
        DataError: a name that is none of ``names``, or that comes twice.
    """
    if given is None:
        return None
    given = parted(given, names)
    for name in given:
        check_there(place, what, name, names, option)
    if len(set(given)) != len(given):
        raise DataError(
            f"{option} must name each {what} once",
            received=", ".join(given),
            mend="Write each once",
        )
    return tuple(given)


def parted(given: str | Iterable[str] | None, names: Collection[str] = ()) -> list[str]:
    """Returns the names of "a,b", of a list, or of a list of such texts.

    Args:
        names: those that there are: one may itself hold a comma.
    """
    # pandas numbers the columns that have no name, which are called by the number here.
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    texts = [] if given is None else map(str, [given] if is_one else given)
    parts = ([text] if text in names else text.split(",") for text in texts)
    return [name if name in names else name.strip() for part in parts for name in part]


def mentioned(place: str, what: str, names: Sequence[str], asked: Asked) -> set[str | None]:
    """Returns the columns of which a user says anything. Raises as ``named`` does."""
    said = {asked.client, asked.weight}
    for option in ("label", "inputs", "drop", "text", "categories"):
        said |= {*(named(place, what, spelt(option), getattr(asked, option), names) or ())}
    return said


def check_there(
    place: str, what: str, name: str | None, names: Sequence[str], option: str | None = None
) -> None:
    """Raises DataError for a name, by which option it ever is given, that is none of ``names``."""
    import difflib

    if name is None or name in names:
        return
    near = difflib.get_close_matches(name, names, n=1)
    mend = f"Name {what}s that are there{'' if option is None else f' with {option}'}"
    raise DataError(
        f"{place} must have the {what} '{name}'",
        received=f"{what}s {', '.join(names) or 'none'}",
        mend=f"Write '{near[0]}', if that is what you mean" if near else mend,
    )


def check_apart(place: str, what: str, *groups: Iterable[str] | None) -> None:
    """Raises DataError for a column that is in more than one of the groups."""
    taken = [name for group in groups for name in dict.fromkeys(group or ())]
    both = [name for name in dict.fromkeys(taken) if taken.count(name) > 1]
    if both:
        raise DataError(
            f"each {what} of {place} must have one role",
            received=f"two for {', '.join(both)}",
            mend="Name it with one option alone",
        )


def _guess(
    place: str, what: str, free: Sequence[str], last_is_label: bool
) -> tuple[tuple[str, ...], str]:
    """Returns the label among the columns of which nothing is said, and how it was found."""
    like = [name for name in free if looks_like_label(name)]
    if len(like) == 1 and (_LABEL.fullmatch(like[0]) or not last_is_label):
        return tuple(like), "by its name"
    if last_is_label and free and set(like) <= {free[-1]}:
        return (free[-1],), f"the last {what}"
    if not like:
        raise DataError(
            f"{place} must have a label {what} called label, target, class or y",
            received=f"{what}s {', '.join(free) or 'none'}",
            mend=f"Name it: {spelt('label', 'NAME')}, or {spelt('label', 'NAME,NAME')} for several",
        )
    candidates = like if len(like) > 1 else [*like, free[-1]]
    raise DataError(
        f"which {what}s of {place} are labels must be said where several may be",
        received=f"{', '.join(candidates)}",
        mend=f"Name each that is one, {spelt('label', candidates[0])} or "
        f"{spelt('label', ','.join(candidates))}, and the inputs ({spelt('inputs', 'NAME,...')}) "
        f"or what to leave out ({spelt('drop', 'NAME,...')})",
    )


def _check_none_is_a_label(
    place: str, what: str, left: Sequence[str], labels: Sequence[str], doubtful: Collection[str]
) -> None:
    # One array alone cannot be but the input, whatever it holds.
    doubtful = doubtful if len(left) > 1 else ()
    odd = [name for name in left if looks_like_label(name) or name in doubtful]
    if odd:
        raise DataError(
            f"what looks like a label must not become an input of {place} by accident",
            received=f"{what}{'s' if len(odd) > 1 else ''} {', '.join(odd)} beside the label "
            f"{', '.join(labels)}",
            mend=f"Say what {'they are' if len(odd) > 1 else 'it is'}: "
            f"{spelt('label', ','.join([*labels, *odd]))}, {spelt('drop', ','.join(odd))}, or name "
            f"the inputs, {spelt('inputs', ','.join(left))}",
        )
