"""Every message says what must hold, what was found, and the mend: read in the source itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tfdist.errors import OptionError, TfdistError, cannot_write, unknown_choice

ROOT = Path(__file__).parent.parent

#: Where a call has a part of the message: (position, keyword).
Places = dict[str, tuple[int | None, str]]
_ERROR: Places = {"rule": (0, "rule"), "received": (None, "received"), "mend": (None, "mend")}
_CLICK = {"UsageError", "BadParameter", "ClickException"}
#: Calls that are no errors, but say what must hold as errors do.
_ALSO: dict[tuple[str, str], Places] = {
    ("tfdist.records.reading.graph_checks", "check"): {"rule": (1, "rule")},
    ("tfdist.aws.validate", "Problem"): {"rule": (1, "rule")},
}
#: Errors made of a message that was read elsewhere: what a graph or another process has said.
_OF_WHOLE_MESSAGES = {
    ("tfdist.records.reading.graph_checks", "failed_check"),
    ("tfdist.runs.ranks", "told_mistake"),
    ("tfdist.serving.serving", "_expect"),
    ("tfdist.tuning.searching", "_all_would_fail"),
}
#: Modules, and functions of them, whose errors need no mend: ``load_manifest`` says that of what a
#: manifest has wrong, and another line has told why a rank failed or leaves. Click says the usage.
_WITHOUT_MEND = {
    ("tfdist.records.format.manifest", None),
    ("tfdist.records.format.schema", None),
    ("tfdist.errors", "__init__"),
    ("tfdist.training.checkpoints.survival", "_agree"),
}
#: Calls whose ``mend`` or ``received`` is no error's.
_NO_ERRORS = {"Engine", "Finding", "replace"}
_PARAMETER = "\0"
_UNKNOWN = "…"
#: Texts that one expression can have, of which are looked at.
_MOST = 64
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """A file, and where its names come from.

    Attributes:
        imported: name -> (module, name in it), or (module, None) for a module itself.
        above: node -> the functions and classes around it, the innermost first.
        assigned: (function or module, name) -> what is assigned to the name within.
    """

    name: str
    path: Path
    tree: ast.Module
    imported: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    above: dict[ast.AST, tuple[ast.AST, ...]] = field(default_factory=dict)
    assigned: dict[tuple[ast.AST, str], list[ast.expr]] = field(default_factory=dict)
    calls: list[ast.Call] = field(default_factory=list)
    defined: list[_Function | ast.ClassDef] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._place(self.tree, ())
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                self.calls.append(node)
            elif isinstance(node, (*_Function.__args__, ast.ClassDef)):
                self.defined.append(node)
            elif isinstance(node, ast.ImportFrom):
                for item in node.names:
                    self.imported[item.asname or item.name] = (node.module or "", item.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (t.id for t in targets if isinstance(t, ast.Name)):
                    for scope in (*self.functions(node), self.tree):
                        self.assigned.setdefault((scope, name), []).append(node.value)

    def _place(self, node: ast.AST, above: tuple[ast.AST, ...]) -> None:
        self.above[node] = above
        inside = (node, *above) if isinstance(node, (*_Function.__args__, ast.ClassDef)) else above
        for child in ast.iter_child_nodes(node):
            self._place(child, inside)

    def functions(self, node: ast.AST) -> list[_Function]:
        return [one for one in self.above[node] if isinstance(one, _Function)]


class Messages:
    """All messages of the files below some folders, and what is wrong with them."""

    def __init__(self, files: dict[str, Path]):
        self.modules = {
            name: Module(name, path, ast.parse(path.read_text())) for name, path in files.items()
        }
        self.classes = self._error_classes()
        self.builders: dict[tuple[str, str], Places] = dict(_ALSO)
        self.known: dict[ast.AST, list[str]] = {}
        self.count = 0
        while self._learn():
            pass

    # What makes errors ------------------------------------------------------------------------

    def _error_classes(self) -> dict[str, ast.ClassDef | None]:
        """Returns all subclasses of TfdistError; None for one that takes what it takes."""
        found: dict[str, ast.ClassDef | None] = dict.fromkeys({"TfdistError", *_CLICK})
        every = [
            node
            for module in self.modules.values()
            for node in module.defined
            if isinstance(node, ast.ClassDef)
        ]
        while True:
            more = {
                node.name: node if _own_init(node) else None
                for node in every
                if node.name not in found and any(_last(base) in found for base in node.bases)
            }
            if not more:
                return found
            found |= more

    def _learn(self) -> bool:
        """A function that passes a parameter on as a rule or a mend makes errors itself."""
        before = {key: dict(places) for key, places in self.builders.items()}
        for module, call, places in self._calls():
            for role in ("rule", "mend"):
                for text in self._texts(module, _argument(call, places, role)):
                    name = _passed_on(text, role)
                    if name is not None:
                        self._add_builder(module, call, name, role)
        return before != self.builders

    def _add_builder(self, module: Module, call: ast.Call, name: str, role: str) -> None:
        for function in module.functions(call):
            names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
            keywords = [a.arg for a in function.args.kwonlyargs]
            if name not in (*names, *keywords):
                continue
            owner = next(iter(module.above[function]), None)
            in_class = isinstance(owner, ast.ClassDef)
            key = owner.name if in_class and function.name == "__init__" else function.name
            position = names.index(name) - in_class if name in names else None
            self.builders.setdefault((module.name, key), {})[role] = (position, name)
            return

    def _calls(self) -> Iterator[tuple[Module, ast.Call, Places]]:
        for module in self.modules.values():
            for node in module.calls:
                if places := self._places(module, node):
                    yield module, node, places

    def _places(self, module: Module, call: ast.Call) -> Places | None:
        """Returns where a call has the parts of a message; None for a call that has none."""
        called = call.func
        if isinstance(called, ast.Call):
            is_type = isinstance(called.func, ast.Name) and called.func.id == "type"
            return _ERROR if is_type and {k.arg for k in call.keywords} & {"received"} else None
        name = _last(called)
        if name == "__init__" and isinstance(called.value, ast.Call):
            owners = [one for one in module.above[call] if isinstance(one, ast.ClassDef)]
            is_ours = any(self.classes.get(owner.name) is owner for owner in owners)
            return _ERROR if is_ours else None
        if name in self.classes and self.classes[name] is None:
            return _ERROR
        home = module.name
        if isinstance(called, ast.Name) and name in module.imported:
            home = module.imported[name][0]
        elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            package, part = module.imported.get(called.value.id, ("", None))
            home = f"{package}.{part}" if part else home
        known = self.builders.get((home, name))
        if known is None and isinstance(called, ast.Name):
            chosen = [
                _last(node) for node in self._assigned(module, called) for node in _ends(node)
            ]
            known = _ERROR if set(chosen) & set(self.classes) else None
        return known

    # What they say ----------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Returns "file:line: what is wrong: the text" of each message that is not in the form."""
        found, seen = [], set()
        unused = {key: places for key, places in self.builders.items() if key not in _ALSO}
        for module, call, places in self._calls():
            seen.add(call)
            unused = {key: value for key, value in unused.items() if value is not places}
            inside = [function.name for function in module.functions(call)]
            if any((module.name, name) in _OF_WHOLE_MESSAGES for name in inside):
                continue
            self.count += 1
            if places is _ERROR and len(call.args) > 1:
                found.append(f"{module.path}:{call.lineno}: received and mend are keywords")
            needs_none = any((module.name, name) in _WITHOUT_MEND for name in (None, *inside))
            needs_none |= places is not _ERROR or _last(call.func) in _CLICK
            if not needs_none and _argument(call, places, "mend") is None:
                found.append(f"{module.path}:{call.lineno}: it says no mend")
            for role in places:
                argument = _argument(call, places, role)
                for text in self._texts(module, argument):
                    wrong = _wrong(role, text)
                    if wrong:
                        found.append(f"{module.path}:{call.lineno}: {wrong}: {text}")
        for module in self.modules.values():
            for node in module.calls:
                if node not in seen and _looks_like_one(node):
                    found.append(f"{module.path}:{node.lineno}: nobody knows what this call makes")
        for home, name in unused:
            found.append(f"{self.modules[home].path}: nobody knows what {name} is called with")
        return found

    def _texts(self, module: Module, node: ast.AST | None) -> list[str]:
        """Returns the texts that an expression can have; what only a run can tell is "…"."""
        if node is None or (isinstance(node, ast.Constant) and node.value is None):
            return []
        if node not in self.known:
            self.known[node] = [_UNKNOWN]  # For what is made of itself, as text += more.
            self.known[node] = list(dict.fromkeys(self._read(module, node)))[:_MOST]
        return self.known[node]

    def _read(self, module: Module, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            return self._joined(module, node.values)
        if isinstance(node, ast.FormattedValue):
            return self._texts(module, node.value) or [_UNKNOWN]
        if isinstance(node, ast.BinOp):
            return self._joined(module, [node.left, node.right])
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            return [t for end in _ends(node) for t in self._texts(module, end)]
        if isinstance(node, ast.Attribute):
            return [{"rule": "must", "mend": "Mend"}.get(node.attr, _UNKNOWN)]
        if isinstance(node, ast.Subscript):
            owners = self._assigned(module, node.value)
            values = [v for o in owners if isinstance(o, ast.Dict) for v in o.values]
            return [t for v in values for t in self._texts(module, v)] or [_UNKNOWN]
        if isinstance(node, ast.Name):
            for function in module.functions(node):
                every = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
                if node.id in {argument.arg for argument in every}:
                    return [f"{_PARAMETER}{node.id}{_PARAMETER}"]
            values = self._assigned(module, node)
            return [t for v in values for t in self._texts(module, v)] or [_UNKNOWN]
        if isinstance(node, ast.Call) and _last(node.func) == "strip":
            return self._texts(module, node.func.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            returned = [
                inner.value
                for outer in module.defined
                if isinstance(outer, _Function) and outer.name == node.func.id
                for inner in ast.walk(outer)
                if isinstance(inner, ast.Return)
            ]
            texts = [t for value in returned for t in self._texts(module, value)]
            return [re.sub(f"{_PARAMETER}.*?{_PARAMETER}", _UNKNOWN, t) for t in texts] or [
                _UNKNOWN
            ]
        return [_UNKNOWN]

    def _joined(self, module: Module, parts: list[ast.expr]) -> list[str]:
        texts = [""]
        for part in parts:
            ends = self._texts(module, part) or [_UNKNOWN]
            texts = list(dict.fromkeys(text + end for text in texts for end in ends))[:_MOST]
        return texts

    def _assigned(self, module: Module, name: ast.AST) -> list[ast.expr]:
        """Returns what is assigned to a name: in the function around it, or else in its module."""
        if not isinstance(name, ast.Name):
            return []
        for scope in (*module.functions(name), module.tree):
            if found := module.assigned.get((scope, name.id)):
                return found
        package, part = module.imported.get(name.id, ("", None))
        home = self.modules.get(package)
        if home is None or part is None:
            return []
        return [
            node.value
            for node in home.tree.body
            if isinstance(node, ast.Assign) and _last(node.targets[0]) == part
        ]


def _last(node: ast.AST) -> str:
    """Returns the name, or the last part of a dotted one."""
    return getattr(node, "id", None) or getattr(node, "attr", None) or ""


def _own_init(node: ast.ClassDef) -> bool:
    return any(isinstance(part, _Function) and part.name == "__init__" for part in node.body)


def _ends(node: ast.AST) -> list[ast.expr]:
    """Returns what ``a if c else b`` and ``a or b`` can be."""
    if isinstance(node, ast.IfExp):
        return [*_ends(node.body), *_ends(node.orelse)]
    if isinstance(node, ast.BoolOp):
        return [end for value in node.values for end in _ends(value)]
    return [node]


def _argument(call: ast.Call, places: Places, role: str) -> ast.expr | None:
    position, keyword = places.get(role, (None, ""))
    for given in call.keywords:
        if given.arg == keyword:
            return given.value
    return call.args[position] if position is not None and position < len(call.args) else None


def _looks_like_one(call: ast.Call) -> bool:
    return (
        bool({given.arg for given in call.keywords} & {"received", "mend"})
        and _last(call.func) not in _NO_ERRORS
    )


def _passed_on(text: str, role: str) -> str | None:
    """Returns the parameter that is the rule, or that the mend begins with."""
    pattern = f"{_PARAMETER}(.*?){_PARAMETER}"
    if role == "mend":
        found = re.match(pattern, text)
    else:
        has_words = re.search("[A-Za-z]", re.sub(pattern, "", text))
        found = None if has_words else re.search(pattern, text)
    return None if found is None else found[1]


def _wrong(role: str, text: str) -> str | None:
    if "Received" in text:
        return "the form says what was found, the words do not"
    if text.endswith(".") and not text.endswith("..."):
        return f"a {role} ends without a full stop"
    if "\n" in text:
        return f"a {role} is one line"
    if role == "rule" and _passed_on(text, role) is None:
        if not re.search(r"\bmust\b", text):
            return 'a rule says what "must" hold'
        if re.search(r"\bmust\b.*[:;] ", text):
            return "a rule is one sentence that goes on with what was found"
    if role == "mend" and _passed_on(text, role) is None and not re.match(r"[A-Z]", text):
        return "a mend is a sentence: it begins with a capital letter"
    return None


def _of_folder(folder: Path, package: str) -> dict[str, Path]:
    found = {}
    for path in sorted(folder.rglob("*.py")):
        name = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = path
    return found


# The tests ------------------------------------------------------------------------------------


def test_every_message_has_the_form():
    messages = Messages(
        _of_folder(ROOT / "tfdist", "tfdist") | _of_folder(ROOT / "sagemaker", "sagemaker")
    )
    assert messages.problems() == []
    assert messages.count > 500


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("DataError('d has a column', received='a')", 'what "must" hold'),
        ("DataError('d must have a. Received: b')", "the words do not"),
        ("DataError('d must have a.')", "without a full stop"),
        ("DataError('d must have a: b', received='c')", "goes on with what was found"),
        ("DataError('d must have a', received='c', mend='give it')", "capital letter"),
        ("DataError('d must have a', mend='Give it.')", "without a full stop"),
        ("DataError('d must have a', received='c.')", "without a full stop"),
        ("DataError('d must\\nhave a')", "one line"),
        ("DataError('d must have a', 'c')", "are keywords"),
        ("DataError('d must' if x else f'{x} has a')", 'what "must" hold'),
        ("DataError(TEXT)", 'what "must" hold'),
        ("DataError(str(x))", 'what "must" hold'),
        ("helper('d has a', x)", 'what "must" hold'),
        ("Thing().helper('d has a')", 'what "must" hold'),
        ("Mine(x, 'has a')", 'what "must" hold'),
        ("type(x)('d has a', received=x)", 'what "must" hold'),
        ("kind('d has a', received=x)", 'what "must" hold'),
        ("click.UsageError('d has a')", 'what "must" hold'),
        ("x.make('d has a', received=x)", "nobody knows what this call makes"),
        ("DataError(x)", "nobody knows what run is called with"),
        ("DataError('d must have a', mend=f'{MEND}, or not')", None),
        ("DataError(f'{x}: {x.rule}', received=x.received, mend=x.mend or 'Go')", None),
        ("helper('d must have a', x)", None),
        ("Thing().helper(f'{x} must have a')", None),
        ("Mine(x, f'{x} must have a')", None),
        ("DataError('d must have a', received=x)", "it says no mend"),
        ("kind('d must have a', received=x, mend='Go')", None),
        ("unknown_choice('colour', x, [])", None),
    ],
)
def test_a_message_that_has_not_the_form_is_found(code, wrong, tmp_path):
    (tmp_path / "sample.py").write_text(
        f"""
from tfdist.errors import DataError, unknown_choice
TEXT = "d has a"
MEND = "Give it"
class Mine(DataError):
    def __init__(self, place, rule):
        super().__init__(rule, received="none", mend="Go")
class Thing:
    def helper(self, rule):
        return DataError(rule, mend="Go")
def helper(rule, x):
    return DataError(rule, received=x, mend="Go")
def used(x):
    return helper("a must be b", x), Thing().helper("a must be b"), Mine(x, "a must be b")
def run(x):
    kind = DataError if x else Mine
    raise {code}
"""
    )
    files = {"tfdist.errors": ROOT / "tfdist" / "errors.py", "sample": tmp_path / "sample.py"}
    found = [line for line in Messages(files).problems() if str(tmp_path) in line]
    if wrong is None:
        assert found == []
    else:
        assert any(wrong in line for line in found), found


def test_the_form():
    error = TfdistError("a size must be positive", received=-1, mend="Choose 1 or more")
    assert str(error) == "a size must be positive, but found -1. Choose 1 or more."
    assert str(TfdistError("a size must be positive")) == "a size must be positive."
    assert str(TfdistError("a must be b", received="c\n  d\n")) == "a must be b, but found c d."


def test_what_a_damaged_file_says_can_be_shown():
    error = TfdistError("a must be b", received="\x1b[2J\ud800" + "x" * 5000, mend="é" * 5000)
    text = str(error)
    assert text.startswith("a must be b, but found ?[2J?xxx")
    assert "xxx…. éé" in text
    assert len(text) < 3000
    assert text.isprintable()


def test_a_name_outside_a_list_shows_the_nearest_and_all():
    assert str(unknown_choice("colour", "rad", ["red", "blue"])) == (
        "the colour must be a known one, but found 'rad'. Did you mean 'red'? "
        "Choose one of red, blue."
    )
    assert isinstance(unknown_choice("colour", 3, []), OptionError)
    assert "but found 3. Leave it out." in str(unknown_choice("colour", 3, []))


def test_what_could_not_be_written_gives_the_systems_reason():
    text = str(cannot_write("a/b", OSError(28, "No space left on device")))
    assert text.startswith("a/b must be written whole, but found No space left on device. ")
