"""What is read from a disk is never run, and no argument is read by a shell."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import h5py
import pytest

from tfdist.errors import ModelError

ROOT = Path(__file__).parents[2]
FOLDERS = ("tfdist", "sagemaker", "benchmarks", "examples", "tools")
# What can run code that is in its input -> where it may stand, since the input is our own.
RUNS_ITS_INPUT = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
OWN_INPUT = {
    # A folder that this user alone can enter, made by the one process and read by the other.
    "tfdist/launch/notebook.py": {"cloudpickle"},
    "tfdist/launch/notebook_rank.py": {"cloudpickle"},
    # From rank to rank of one job, as Horovod does it.
    "tfdist/strategies/multi_worker/cluster.py": {"pickle"},
    # Of a user's file: the one reader below, which finds no name outside of its own file.
    "tfdist/records/writing/object_arrays.py": {"pickle"},
}
SHELLS = {"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell"}


@pytest.fixture(scope="module")
def imports_and_calls() -> list[tuple[str, ast.AST]]:
    """All of the sources, read once."""
    looked_at = (ast.Import, ast.ImportFrom, ast.Call)
    return [(file, node) for file, node in _sources() if isinstance(node, looked_at)]


@pytest.fixture(scope="module")
def calls(imports_and_calls) -> list[tuple[str, ast.Call]]:
    return [(file, node) for file, node in imports_and_calls if isinstance(node, ast.Call)]


def _sources() -> Iterator[tuple[str, ast.AST]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                yield path.relative_to(ROOT).as_posix(), node


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def keyword(call: ast.Call, name: str) -> object:
    """Returns the literal value of an argument, an empty string when there is none."""
    found = [k.value for k in call.keywords if k.arg == name]
    return getattr(found[0], "value", None) if found else ""


def test_nothing_from_a_disk_is_unpickled(imports_and_calls):
    found: dict[str, set[str]] = {}
    for file, node in imports_and_calls:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
            if used := {name.partition(".")[0] for name in names} & RUNS_ITS_INPUT:
                found.setdefault(file, set()).update(used)
    assert found == OWN_INPUT


def test_the_one_that_reads_pickles_of_others_finds_only_its_own():
    """Its Unpickler looks each name up in a table of that file, and nothing else uses pickle."""
    tree = ast.parse((ROOT / "tfdist/records/writing/object_arrays.py").read_text())
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = [node for node in used if getattr(node.value, "id", "") == "pickle"]
    readers = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.bases]
    readers = [node for node in readers if ast.unparse(node.bases[0]) == "pickle.Unpickler"]
    assert [node.attr for node in used] == ["Unpickler"] * len(readers)
    (reader,) = readers
    (find_class,) = [node for node in reader.body if not isinstance(node, ast.Expr)]
    called = {ast.unparse(call.func) for call in ast.walk(find_class) if isinstance(call, ast.Call)}
    assert find_class.name == "find_class"
    assert called == {"_KNOWN.get", "RefusedError", "_Function"}
    (table,) = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    assert {ast.literal_eval(key)[0] for key in table.value.keys} == {
        *("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "_codecs", "__builtin__"),
    }
    own = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert {value.id for value in table.value.values} <= own


def test_whoever_reads_files_refuses_code_in_them(calls):
    for file, call in calls:
        name, where = name_of(call), f"{file}:{call.lineno}"
        assert name not in {"eval", "exec"} or isinstance(call.func, ast.Attribute), where
        assert name != "enable_unsafe_deserialization", where
        if file != "tfdist/export/models.py":  # Which looks into the file first: see below.
            assert keyword(call, "safe_mode") in ("", True), where
        owner = getattr(getattr(call.func, "value", None), "id", "")
        if (owner, name) in {("np", "load"), ("numpy", "load")}:
            assert keyword(call, "allow_pickle") is False, where
        assert (owner, name) not in {("yaml", "load"), ("yaml", "unsafe_load")}, where
    assert any(name_of(call) == "load" for _, call in calls), "nothing was looked at"


def test_no_source_asks_for_a_shell(calls):
    for file, call in calls:
        where = f"{file}:{call.lineno}"
        assert keyword(call, "shell") in ("", False), where
        owner = getattr(getattr(call.func, "value", None), "id", "")
        is_shell = owner in {"os", "subprocess", "asyncio"} and name_of(call) in SHELLS
        assert not is_shell, where


# A layer whose Python code writes a file when the model is built, as when it is loaded.
MAKE_MODELS = """
import sys
from tfdist.compat import import_tensorflow
tf = import_tensorflow()
keras, folder = tf.keras, sys.argv[1]

def strike(x):
    import subprocess
    subprocess.run(["touch", f"{folder}/struck"])
    return x

class Shell(keras.layers.Layer):
    def call(self, x):
        with tf.control_dependencies([tf.io.write_file(f"{folder}/struck", "x")]):
            return tf.identity(x)

def model(layer):
    return keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])

source = f"lambda x: __import__('subprocess').run(['touch', {folder + '/struck'!r}]) and x"
struck = keras.layers.Lambda(eval(source))
for name in ("lambda.keras", "lambda.h5", "lambda"):
    model(struck).save(f"{folder}/{name}")
model(Shell()).save(f"{folder}/shell")
inputs = keras.Input((2, 2))
functional = keras.Model(inputs, tf.reshape(inputs * 2 + 1, (-1, 4))[:, 1:] )
for name in ("plain.keras", "plain.h5"):
    functional.save(f"{folder}/{name}")
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder of models in three formats; "struck" stands in it when the code in one has run."""
    folder = tmp_path_factory.mktemp("models")
    subprocess.run(
        [sys.executable, "-c", MAKE_MODELS, str(folder)],
        check=True,
        timeout=100,
        capture_output=True,
    )
    (folder / "struck").unlink()
    return folder


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["lambda.keras", "lambda.h5", "lambda", "shell"])
def test_no_code_in_a_model_is_run(models, name, tmp_path):
    from tfdist.export import tflite

    with pytest.raises(ModelError, match=r"must not run code of its own .*trust=True"):
        tflite(models / name, tmp_path / "out.tflite")
    assert not (models / "struck").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
def test_code_in_a_trusted_model_is_run(models, tmp_path, run_cli):
    refused = run_cli("export", models / "lambda.h5", tmp_path / "out.tflite")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1, refused.stderr
    assert not (models / "struck").exists()
    trusted = run_cli("export", models / "lambda.h5", tmp_path / "out.tflite", "--trust")
    assert (models / "struck").exists(), trusted.stderr
    (models / "struck").unlink()
    assert trusted.returncode == 0, trusted.stderr


def test_plain_models_need_no_trust(models):
    from tfdist.export import trust

    for name in ("plain.keras", "plain.h5"):
        trust.check(models / name)


def function(module: str, name: str) -> dict:
    return {"class_name": "function", "module": module, "config": name, "registered_name": name}


@pytest.mark.parametrize(
    "item",
    [
        function("os", "system"),
        function("keras.src.utils.data_utils", "get_file"),
        {"class_name": "Popen", "module": "subprocess", "config": {}},
        {"class_name": "Any", "module": "antigravity", "config": {}},
        {"class_name": "TFOpLambda", "config": {"function": "io.write_file"}},
        {"class_name": "TFOpLambda", "config": {"function": "raw_ops.WriteFile"}},
        {"class_name": "TFOpLambda", "config": {"function": "compat.v1.py_func"}},
        {"class_name": "TFOpLambda", "config": {"function": "compat.v1.write_file"}},
        {"class_name": "TFOpLambda", "config": {"function": "compat.v1.load_file_system_library"}},
        {"class_name": "TFOpLambda", "config": {"function": "load_op_library"}},
        {"class_name": "TFOpLambda", "config": {"function": "what_comes_one_day"}},
        {"class_name": "ClassMethod", "config": {"cls_symbol": "io.TFRecordWriter"}},
        {"class_name": "keras>Lambda", "config": {"name": "x"}},
    ],
    ids=lambda item: f"{item.get('module')}.{item['config']}",
)
@pytest.mark.parametrize("is_both", [False, True], ids=["archive", "HDF5 that is an archive, too"])
def test_objects_that_are_not_keras_own_are_found(tmp_path, item, is_both):
    from tfdist.export import trust

    path = tmp_path / "model.keras"
    inside = json.dumps({"class_name": "Sequential", "config": {"layers": [item]}})
    if is_both:
        with h5py.File(path, "w") as file:
            file.attrs["model_config"] = inside
        inside = "{}"
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("config.json", inside)
    with pytest.raises(ModelError, match="must not run code of its own"):
        trust.check(path)


def _stored_outside(file, secret):
    file.create_dataset("a/kernel", (4,), "u1", external=[(str(secret), 0, 4)])


def _linked_outside(file, secret):
    file["a"] = h5py.ExternalLink(str(secret), "/")


def _virtual(file, secret):
    layout = h5py.VirtualLayout((4,), "u1")
    layout[:] = h5py.VirtualSource(str(secret), "kernel", (4,))
    file.create_virtual_dataset("a/kernel", layout)


@pytest.mark.parametrize("is_archive", [False, True], ids=["HDF5", "archive"])
@pytest.mark.parametrize("put", [_stored_outside, _linked_outside, _virtual])
def test_weights_that_lie_in_other_files_are_not_read(tmp_path, put, is_archive):
    from tfdist.export import trust

    inside = tmp_path / "model.weights.h5"
    with h5py.File(inside, "w") as file:
        file["itself"] = file["/"]  # A group in a circle.
        put(file, tmp_path / "secret")
    path = inside
    if is_archive:
        path = tmp_path / "model.keras"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("config.json", "{}")
            archive.write(inside, "model.weights.h5")
    for check in (trust.check_reads_no_others, trust.check):
        with pytest.raises(ModelError, match="a file of weights must hold them itself"):
            check(path)


@pytest.mark.parametrize("text", [b"", b"\x89HDF\r\n\x1a\n", b"PK\x05\x06" + b"\0" * 18, b"x" * 99])
def test_a_file_that_is_no_model_is_one_line(tmp_path, text):
    from tfdist.export import trust

    path = tmp_path / "model.keras"
    path.write_bytes(text)
    with pytest.raises(ModelError, match="must be a model that Keras can load"):
        trust.check(path)


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_an_archive_that_cannot_be_unpacked_is_one_line(tmp_path, is_encrypted):
    from tfdist.compat import package_of
    from tfdist.export import trust

    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("metadata.json", "config.json"):
            archive.writestr(name, '{"keras_version": "3.0"}' * 99)
    content = bytearray(path.read_bytes())
    for name in (b"metadata.json", b"config.json"):
        own, listed = content.index(name), content.rindex(name)
        if is_encrypted:  # A bit of its flags, which stand twice.
            content[own - 24] |= 1
            content[listed - 38] |= 1
        else:
            begun = own + len(name)
            content[begun : begun + 12] = b"\xff" * 12
    path.write_bytes(content)
    assert package_of(path) is None
    with pytest.raises(ModelError, match="must be a model that Keras can load"):
        trust.check(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "how",
    [
        ("single",),
        ("horovod", "--controller", "mpi"),
        ("horovod", "--controller", "gloo"),
        ("multi_worker",),
    ],
)
def test_arguments_come_as_they_were_given(run_cli, how, tmp_path):
    given = ["$(touch made)", "; touch made", "| touch made", "`touch made`", "a b", "*", '"', "'"]
    code = "import sys; print(sys.argv[1:])"
    done = run_cli("launch", "--strategy", *how, "--", "python", "-c", code, *given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    assert lines == [str(given)] * (1 if how[0] == "single" else 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "how",
    [("horovod", "--controller", "mpi"), ("horovod", "--controller", "gloo"), ("multi_worker",)],
)
def test_nothing_listens_on_the_network(traces, how):
    """Not even what is told to. With TensorFlow, test_mishaps.py and test_stalls.py look."""
    up = (
        "import socket, time; own = [socket.create_server(('', 0)), "
        "socket.create_server(('::', 0), family=socket.AF_INET6)]; "
        "[socket.create_connection(each.getsockname()[:2]) for each in own]; "
        "print('up', flush=True); time.sleep(600)"
    )
    launch = ("-m", "tfdist", "launch", "--strategy", *how)
    with subprocess.Popen(
        [sys.executable, *launch, "--", "python", "-c", up, traces.token],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as job:
        assert "up" in job.stdout.readline()
        assert "up" in job.stdout.readline()
        found = traces.listening_on_all()
        job.terminate()
        assert job.wait(timeout=30) == 143
    assert found == set()
    assert traces.alive() == []
