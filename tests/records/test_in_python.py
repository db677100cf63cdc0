"""Messages that name options of the shell: a program reads its own names, too."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tfdist.errors import DataError, OptionError
from tfdist.records import adopt, in_python, write
from tfdist.records.adopting.adopt import adopt as adopt_of_shell
from tfdist.records.writing.writer import write as write_of_shell

RECORDS = Path(in_python.__file__).parent
CALLS = [(write_of_shell, in_python.OF_WRITE), (adopt_of_shell, in_python.OF_ADOPT)]
# Of other commands, or said in whole commands.
ELSEWHERE = {"--check"}


@pytest.mark.parametrize(("call", "names"), CALLS)
def test_the_names_are_those_of_the_function(call, names):
    parameters = inspect.signature(call).parameters
    assert {name.partition("=")[0] for name in names.values()} <= set(parameters)
    for option, name in names.items():
        is_flag = name.partition("=")[2] == "True"
        assert is_flag == (parameters[name.partition("=")[0]].default is False), option


def test_every_option_that_a_message_names_has_one():
    folders = {"writing": in_python.OF_WRITE, "adopting": in_python.OF_ADOPT}
    for folder, names in folders.items():
        for path in (RECORDS / folder).rglob("*.py"):
            found = set(in_python._OPTION.findall(path.read_text()))
            assert found <= set(names) | ELSEWHERE, path


def test_a_program_reads_both_and_the_shell_its_own(tmp_path):
    (tmp_path / "t.csv").write_text("a,b,label\n1,2,0\n,4,1\n5,6,0\n7,8,1\n")
    with pytest.raises(DataError) as told:
        write_of_shell(tmp_path / "t.csv", tmp_path / "out")
    assert "--missing mask" in str(told.value)
    assert "In Python" not in str(told.value)
    with pytest.raises(DataError) as also:
        write(tmp_path / "t.csv", tmp_path / "out")
    assert str(also.value) == f"{told.value} In Python, --missing is missing=."
    with pytest.raises(
        OptionError, match=r"write_resized \(--write-resized\).*leave the other out\.$"
    ):
        write(tmp_path / "t.csv", tmp_path / "out", write_resized=True)
    with pytest.raises(DataError, match=r"In Python, --resume is resume=True"):
        write(tmp_path / "t.csv", tmp_path / "out", resume=True)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError) as bare:
        adopt(tmp_path / "none")
    assert "In Python" not in str(bare.value)


def test_a_command_in_whole_stays_as_it_is():
    text = "Say `tfdist adopt DIR --resize HxW`"
    assert in_python.names_added(text, in_python.OF_ADOPT) == text
    told = in_python.names_added("leave them out with --skip-bad; or --crop", in_python.OF_WRITE)
    assert told.endswith(
        "; or --crop. In Python, --skip-bad is skip_bad=True, --crop is fit='crop'"
    )
