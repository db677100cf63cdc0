"""The strategies that there are, by name: tfdist's own, and those of other packages."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tfdist.compat import refuse_keras_3
from tfdist.errors import OptionError, unknown_choice
from tfdist.strategies.federated import SPEC as FEDERATED
from tfdist.strategies.horovod.strategy import SPEC as HOROVOD
from tfdist.strategies.mesh import SPEC as MESH
from tfdist.strategies.mirrored import SPEC as MIRRORED
from tfdist.strategies.multi_worker.strategy import SPEC as MULTI_WORKER
from tfdist.strategies.parameter_server import SPEC as PARAMETER_SERVER
from tfdist.strategies.pipeline import SPEC as PIPELINE
from tfdist.strategies.single import SPEC as SINGLE
from tfdist.strategies.spec import Spec, check_replicas

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy

#: Where other packages name theirs: an entry point whose object is a ``Spec``.
GROUP = "tfdist.strategies"

REGISTRY: dict[str, Spec] = {}


def register(spec: Spec) -> None:
    """Makes a strategy known by its name, in this process.

    A package that is installed names its own by an entry point of the group "tfdist.strategies",
    which every process of a job sees.

    Raises:
        OptionError: there is another one of that name.
    """
    known = REGISTRY.setdefault(spec.name, spec)
    if known != spec:
        raise OptionError(
            "each strategy must have a name of its own",
            received=f"'{spec.name}' for {spec.path} and for {known.path}",
            mend=f"Give {spec.path} another name",
        )


def _register_all() -> None:
    own = (SINGLE, MIRRORED, HOROVOD, MULTI_WORKER, PARAMETER_SERVER, MESH, PIPELINE, FEDERATED)
    for spec in own:
        register(spec)
    for point in importlib.metadata.entry_points(group=GROUP):
        register(_loaded(point))


def _loaded(point: importlib.metadata.EntryPoint) -> Spec:
    try:
        found = point.load()
    except Exception as error:  # Whatever another package's module does.
        found, why = None, f"{type(error).__name__}: {error}"
    else:
        why = f"an object of type {type(found).__name__}"
    if not isinstance(found, Spec):
        raise OptionError(
            f"the entry point {point.name} = {point.value} of {GROUP} must give a Spec",
            received=why,
            mend="Repair or uninstall the package that brings it",
        )
    return found


def strategy_class(name: str) -> type[Strategy]:
    """Returns the class registered as ``name``.

    Raises:
        OptionError: no such strategy.
    """
    return spec_of(name).load()


def spec_of(name: str, options: Mapping[str, Any] | None = None) -> Spec:
    """Returns what is known of the strategy called ``name``.

    Args:
        options: of the strategy: ``replicas`` names the one whose ranks each hold a model, and
            which is started as that one is.

    Raises:
        OptionError: no such strategy, or none whose ranks can hold a model that is divided.
    """
    if name not in REGISTRY:
        raise unknown_choice("strategy", name, [*REGISTRY, "auto"])
    spec, replicas = REGISTRY[name], (options or {}).get("replicas")
    if replicas is None or not spec.divides_model:
        return spec
    check_replicas(replicas)
    ranks = REGISTRY[replicas]
    return replace(spec, launchers=ranks.launchers, sagemaker=ranks.sagemaker)


def check_takes_keras(name: str) -> None:
    """Raises:
    OptionError: no such strategy.
    EngineMissingError: it trains models of Keras 2 alone, and Keras 3 was chosen.
    """
    if not spec_of(name).takes_keras_3:
        others = ", ".join(names_of(lambda spec: spec.takes_keras_3))
        refuse_keras_3(f"strategy '{name}'", otherwise=f", or use one of {others}")


def names_of(having: Callable[[Spec], object]) -> list[str]:
    """Returns the names of the strategies of a kind."""
    return [name for name, spec in REGISTRY.items() if having(spec)]


@dataclass(frozen=True)
class Option:
    """One option of a strategy.

    Attributes:
        name: as it is given.
        default: what holds where it is not.
        kind: what it takes, for people: "int", "text, or a list of them".
        meaning: what the class's docstring says of it.
    """

    name: str
    default: Any
    kind: str
    meaning: str


def known_options(name: str) -> dict[str, Option]:
    """Returns the options of a strategy by name."""
    return _options_of(*strategy_class(name).__mro__)


def _options_of(cls: type, *bases: type) -> dict[str, Option]:
    """Returns the options of ``cls``; what it passes on by ``**`` are those of its base."""
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    meanings = _arguments_told(inspect.getdoc(cls) or "")
    own = {
        p.name: Option(p.name, p.default, _kind(p.annotation), meanings.get(p.name, ""))
        for p in parameters
        if p.kind is not p.VAR_KEYWORD
    }
    return own if len(own) == len(parameters) else own | _options_of(*bases)


# Annotations, as they are written, in words; the others are of Python alone.
_KINDS = {
    "int": "int",
    "float": "float",
    "bool": "true or false",
    "str": "text",
    "os.PathLike": "text",
    "list[str]": "list of texts",
    "Sequence[str]": "list of texts",
}


def _kind(annotation: Any) -> str:
    if not isinstance(annotation, str):  # Of a package that does not postpone them.
        annotation = getattr(annotation, "__name__", str(annotation))
    parts = [part for part in re.split(r"\s*\|\s*(?![^\[]*\])", annotation) if part != "None"]
    return " or ".join(dict.fromkeys(_KINDS.get(part, "a Python object") for part in parts))


def _arguments_told(docstring: str) -> dict[str, str]:
    """Returns name -> text of the section "Args:"."""
    _, _, section = docstring.partition("\nArgs:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    pairs = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in pairs}


_register_all()
