"""Messages that name options: a program reads its own words, the shell those of the shell."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from tfdist.cli import adopt as adopt_of_shell
from tfdist.cli import shard, voice
from tfdist.errors import DataError, OptionError, spelt
from tfdist.records import adopt, write

RECORDS = Path(inspect.getfile(write)).parents[1]
CALLS = {"writing": (write, shard), "adopting": (adopt, adopt_of_shell)}


@pytest.mark.parametrize("folder", CALLS)
def test_what_is_spelt_is_an_option_of_both(folder):
    call, verb = CALLS[folder]
    parameters = inspect.signature(call).parameters
    flags = {name for param in verb.command.params for name in (*param.opts, *param.secondary_opts)}
    found = 0
    for path in (RECORDS / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "spelt":
                continue
            given = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if not given:  # Of each of several names.
                continue
            assert given[0] in parameters, path
            if not node.keywords:
                with voice.speaking():
                    assert spelt(*given[:2]).split(" ")[0] in {*flags, "--out"}, path
            is_flag = type(parameters[given[0]].default) is bool
            assert is_flag == isinstance(given[-1], bool), path
            found += 1
    assert found > 5


def test_no_message_has_the_words_of_the_shell_alone():
    for path in (path for folder in CALLS for path in (RECORDS / folder).rglob("*.py")):
        no_message, texts = set(), {}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr) or (
                isinstance(node, ast.keyword) and node.arg == "flag"
            ):  # A docstring.
                no_message.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                no_message |= set(node.values)
                texts[node] = "".join(str(getattr(part, "value", "x")) for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts[node] = node.value
        for node in texts.keys() - no_message:
            is_bare = re.search(r"(?<![\w-])--[a-z]", texts[node]) and "tfdist " not in texts[node]
            assert not is_bare, (path, texts[node])


def test_each_reads_its_own(tmp_path):
    (tmp_path / "t.csv").write_text("a,b,label\n1,2,0\n,4,1\n5,6,0\n7,8,1\n")
    with pytest.raises(DataError, match=r"mean.*of them with missing='mask'") as told:
        write(tmp_path / "t.csv", tmp_path / "out")
    assert "--" not in str(told.value)
    with voice.speaking(), pytest.raises(DataError, match=r"of them with --missing mask\.$"):
        write(tmp_path / "t.csv", tmp_path / "out")
    with pytest.raises(OptionError, match="write_resized=True must go with resize="):
        write(tmp_path / "t.csv", tmp_path / "out", write_resized=True)
    with voice.speaking(), pytest.raises(OptionError, match="--crop must go with --resize, which"):
        write(tmp_path / "t.csv", tmp_path / "out", fit="crop")
