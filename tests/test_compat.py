"""TensorFlow is imported in a process of its own: this one may have it already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import ModuleType

import pytest

from tfdist.compat import keras, versions
from tfdist.errors import EngineMissingError

_PROGRAM = """
import gc
import sys
from tfdist.compat import import_tensorflow
tf = import_tensorflow()
assert tf.reduce_sum(tf.ones(3)).numpy() == 3
assert gc.isenabled()
assert "jax" not in sys.modules
import jax
print(gc.get_freeze_count())
"""


def test_tensorflow_comes_quickly_and_quietly():
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert int(done.stdout) > 100_000
    assert done.stderr == ""


_START = """
import os
from tfdist.compat.tensorflow import without_start_lines
with without_start_lines():
    os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written\\n")
    os.write(2, b"I0000 00:00:1795342698.623798    8309 port.cc:153] oneDNN is on.\\n")
    os.write(2, b"E0000 00:00:1795342698.623799    8309 cuda.cc:9] A driver is too old.\\n")
    os.write(2, b"I think that this is not theirs.\\n")
    {last}
os.write(2, b"I0000 00:00:1795342699.623798    8309 port.cc:153] Later.\\n")
"""


def after_start(last: str) -> subprocess.CompletedProcess:
    program = _START.format(last=last)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )


def test_what_libraries_tell_of_themselves_is_kept_from_stderr():
    done = after_start("pass")
    of_libraries, of_others, later = done.stderr.splitlines()
    assert of_libraries.startswith("E0000")
    assert of_libraries.endswith("A driver is too old.")
    assert of_others == "I think that this is not theirs."
    assert later.endswith("Later.")
    assert done.returncode == 0


def test_an_import_that_fails_keeps_its_words():
    done = after_start("raise ImportError('no such library')")
    assert "not theirs" in done.stderr
    assert "oneDNN" not in done.stderr
    assert done.stderr.endswith("ImportError: no such library\n")


def test_a_library_that_ends_the_process_is_heard_of():
    done = after_start("os.abort()")
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.startswith("Fatal Python error: Aborted")


def versions_of(
    monkeypatch,
    tensorflow: str | None,
    keras_2: str | None,
    variable: str | None,
    keras_3: str | None = "3.15.1",
) -> None:
    found = {"tensorflow": tensorflow, "tf-keras": keras_2, "keras": keras_3}
    monkeypatch.setattr(versions, "_version", found.get)
    monkeypatch.setattr(versions, "sys", type("NothingImported", (), {"modules": {}}))
    monkeypatch.setattr(versions.os, "environ", {versions.VARIABLE: variable} if variable else {})


@pytest.mark.parametrize(
    ("found", "is_keras_3"),
    [
        (("2.16.2", "2.16.0", "1"), False),
        (("2.16.2", None, "0", "3.14.0"), True),
        (("2.21.0", "2.21.0", "1"), False),
        (("2.21.0", None, "0"), True),
        (("2.21.0", "2.21.0", "False"), True),
    ],
)
def test_what_tfdist_runs_on_is_taken(monkeypatch, found, is_keras_3):
    versions_of(monkeypatch, *found)
    versions.check_versions()
    assert versions.uses_keras_3() == is_keras_3
    assert versions.keras_version().startswith("3." if is_keras_3 else "2.")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ((None, None, None), ["TensorFlow 2.16 to 2.21 must be installed", "pip install"]),
        (("2.15.1", None, None), ["found 2.15.1", "'tensorflow>=2.16,<2.22'"]),
        (("2.22.0rc0", "2.22.0", "1"), ["found 2.22.0rc0"]),
        (("2.21.0", None, None), ["tf_keras 2.21", "found none", "'tf_keras~=2.21.0'"]),
        (("2.21.0", "2.20.1", "1"), ["tf_keras 2.21", "found 2.20.1"]),
        (("2.21.0", "2.21.0", "2"), ["TF_USE_LEGACY_KERAS must be 1", "found '2'"]),
        (("2.21.0", "2.21.0", "0", None), ["must have Keras 3.14 or later", "found none"]),
        (("2.21.0", "2.21.0", "0", "2.15.0"), ["must have Keras 3.14 or later", "keras 2.15.0"]),
        (("2.16.2", None, "0", "3.13.2"), ["keras 3.13.2", "'keras>=3.14'"]),
    ],
)
def test_what_it_does_not_run_on_is_one_line(monkeypatch, found, words):
    versions_of(monkeypatch, *found)
    with pytest.raises(EngineMissingError) as raised:
        versions.check_versions()
    assert all(word in str(raised.value) for word in words), raised.value
    assert "\n" not in str(raised.value)


def test_keras_3_that_is_in_use_is_one_line():
    program = (
        "import tensorflow as tf; tf.keras.Model\n"
        "from tfdist.compat import check_versions; from tfdist.errors import TfdistError\n"
        "try: check_versions()\n"
        "except TfdistError as error: print(error)\n"
    )
    environ = {key: value for key, value in os.environ.items() if key != versions.VARIABLE}
    done = run_program(program, environ)
    assert done.stdout.startswith("tf.keras must be Keras 2 (tf_keras), but found Keras 3"), done


def test_keras_2_that_is_in_use_is_one_line():
    program = (
        "import os; import tensorflow as tf; tf.keras.Model\n"
        f"os.environ['{versions.VARIABLE}'] = '0'\n"
        "from tfdist.compat import check_versions; from tfdist.errors import TfdistError\n"
        "try: check_versions()\n"
        "except TfdistError as error: print(error)\n"
    )
    done = run_program(program, os.environ | {versions.VARIABLE: "1"})
    assert done.stdout.startswith("tf.keras must be Keras 3, but found Keras 2 (tf_keras)"), done


def run_program(program: str, environ: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        ({"main.py": "import keras"}, "0"),
        ({"main.py": "def f():\n    from keras.layers import Dense"}, "0"),
        ({"main.py": "import tf_keras as keras"}, "1"),
        ({"main.py": "from tensorflow import keras\nimport keras_hub"}, None),
        ({"main.py": "import keras\nimport tf_keras"}, None),
        (
            {"main.py": "from a.b import c", "a/b.py": "import d", "d.py": "import keras"},
            "0",
        ),
        ({"main.py": "from . import a", "a/__init__.py": "import main, keras.ops"}, "0"),
        ({"main.py": "from .keras import a", "keras.py": ""}, None),
        ({"main.py": "from . import keras", "keras.py": "import tf_keras"}, "1"),
        ({"main.py": "not Python"}, None),
        ({"main.py": "from ............ import a\nimport keras"}, "0"),
    ],
)
@pytest.mark.parametrize("variable", ["0", "1"])
def test_a_program_is_of_the_keras_that_it_imports(tmp_path, monkeypatch, files, chosen, variable):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(keras, "_is_settled", lambda: False)
    monkeypatch.setattr(keras, "_asked", {keras.VARIABLE: variable})
    monkeypatch.setattr(keras.sys, "path", ["/where/tfdist/is"])
    monkeypatch.chdir(tmp_path)
    for place in ("main.py", "main"):
        # Whatever the program said that was followed before.
        environ = {keras.VARIABLE: "1" if variable == "0" else "0"}
        keras.follow_program(environ, place)
        assert environ == {keras.VARIABLE: chosen or variable}


@pytest.mark.parametrize(
    ("line", "chosen"),
    [("import keras", "0"), ("from keras import ops", "0"), ("from tf_keras import Input", "1")],
)
def test_cells_are_of_the_keras_that_they_import(monkeypatch, line, chosen):
    cells = ModuleType("__main__")
    exec(line, vars(cells))
    monkeypatch.setitem(sys.modules, "__main__", cells)
    monkeypatch.setattr(keras, "_is_settled", lambda: False)
    environ = {}
    keras.follow_program(environ)
    assert environ == {keras.VARIABLE: chosen}


@pytest.mark.parametrize(("variable", "is_named"), [("0", True), ("1", False), (None, False)])
def test_what_needs_keras_2_names_the_variable_that_a_user_has_set(monkeypatch, variable, is_named):
    monkeypatch.setattr(keras, "_asked", {} if variable is None else {keras.VARIABLE: variable})
    monkeypatch.setenv(keras.VARIABLE, "0")  # As of a program that imports keras.
    with pytest.raises(EngineMissingError, match=r"in place of keras") as caught:
        versions.refuse_keras_3("this")
    assert (f"leave {keras.VARIABLE}=0 out" in str(caught.value)) == is_named


def test_a_keras_that_is_in_use_stays(tmp_path):
    import tensorflow as tf

    (tmp_path / "main.py").write_text("import keras")
    assert tf.keras.Model
    environ = {keras.VARIABLE: "1"}
    keras.follow_program(environ, str(tmp_path / "main.py"))
    assert environ == {keras.VARIABLE: "1"}


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_a_file_tells_which_keras_wrote_it(tmp_path, monkeypatch, suffix):
    import tensorflow as tf

    model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
    path = tmp_path / f"model{suffix}"
    model.save(path)
    here = tf.keras.Model.__module__.partition(".")[0]
    assert keras.package_of(path) == here
    monkeypatch.setattr(keras, "_is_settled", lambda: False)
    environ = {}
    keras.follow_file(environ, path)
    assert environ == {keras.VARIABLE: "0" if here == "keras" else "1"}
    path.write_bytes(path.read_bytes()[:100])
    assert keras.package_of(path) is None
    assert keras.package_of(tmp_path / f"nowhere{suffix}") is None
