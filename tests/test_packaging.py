"""What `pip install` would give a user, and that nothing heavy is imported before it is needed."""

from __future__ import annotations

import ast
import configparser
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
# Clients of services, with some twenty packages that nothing else needs: not in `make setup`.
_TRACKERS = {"mlflow", "wandb"}
# SDK 3, with a hundred packages: in an environment of its own, see tests/aws/test_sdk3.py.
_SDK = {"sagemaker3"}
# Whose models tfdist trains, and does not need itself; in the modern lane for tests.
_MODELS = {"transformers"}
HEAVY = ("tensorflow", "keras", "horovod", "numpy", "mesh_tensorflow", "tensorflow_federated")


@pytest.fixture(scope="module")
def metadata() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def requirements(text: str) -> dict[str, Requirement]:
    return {Requirement(line).name: Requirement(line) for line in text.split("\n") if line}


def test_the_python_of_sagemaker_is_supported(metadata):
    supported = SpecifierSet(metadata["options"]["python_requires"])
    assert [f"3.{minor}" in supported for minor in range(10, 15)] == [False, *[True] * 3, False]


def test_a_bare_install_needs_tensorflow_and_no_other_engine(metadata):
    needed = requirements(metadata["options"]["install_requires"])
    assert "tensorflow" in needed
    assert not {"horovod", "mesh-tensorflow", "tensorflow-federated", "sagemaker"} & set(needed)
    assert not {"matplotlib", "pillow", "scikit-learn"} & set(needed)


def test_extras(metadata):
    extras = metadata["options.extras_require"]
    others = {"plots", "images", "tables", "export", "sagemaker", "buckets", "notebooks", "all"}
    # Others that pip can bring as they are.
    assert set(extras) == others | {"mesh", "tune", "ray", "serve"} | _TRACKERS | _MODELS | _SDK
    (everything,) = requirements(extras["all"]).values()
    assert everything.extras == set(extras) - {"all"} - _TRACKERS - _MODELS - _SDK


@pytest.mark.parametrize("lane", ["modern", "oldest"])
def test_the_environment_of_make_setup_satisfies_the_metadata(metadata, pinned, lane):
    pins = pinned(lane)
    extras = metadata["options.extras_require"]
    absent = _TRACKERS | _SDK if lane == "modern" else _TRACKERS | _MODELS | _SDK
    others = (text for name, text in extras.items() if name not in absent)
    for text in (metadata["options"]["install_requires"], *others):
        for name, requirement in requirements(text).items():
            if name == "tfdist":
                continue
            assert pins[name.replace("_", "-")] in requirement.specifier, requirement


def test_a_built_wheel_holds_every_room_and_all_data(wheel):
    expected = {
        f"{inner}/{path.relative_to(ROOT / outer)}"
        for inner, outer in (
            ("tfdist", "tfdist"),
            ("tfdist/examples", "examples"),
            ("tfdist/aws/scripts", "sagemaker"),
        )
        for path in (ROOT / outer).rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("tfdist/")}
        (information,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(information).decode()
        script = archive.read("tfdist/aws/scripts/train.py")
    assert packed == expected - {"tfdist/examples/demo.sh"}
    assert script == (ROOT / "sagemaker" / "train.py").read_bytes()
    assert "Requires-Python: <3.14,>=3.11" in text
    assert "Provides-Extra: mesh" in text


def test_the_installed_wheel_writes_a_project(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    done = subprocess.run(
        [sys.executable, "-m", "tfdist", "init", "mine", "--sagemaker"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "installed"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    model = (tmp_path / "mine" / "model.py").read_text()
    assert model == (ROOT / "examples" / "digits.py").read_text()
    assert (tmp_path / "mine" / "sagemaker" / "pipeline.py").is_file()


def strings(source: bytes) -> list[str]:
    nodes = ast.walk(ast.parse(source))
    values = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return [value for value in values if isinstance(value, str)]


def test_texts_name_nothing_that_only_the_checkout_has(wheel):
    absent = re.compile(
        r"\bmake (setup|test|demo|lint)|\b(examples|tools|tests|notebooks)/|CONTRIB"
    )
    found = []
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py") and name.startswith("tfdist/"):
                texts = strings(archive.read(name))
            elif name.startswith(("tfdist/cli/starter/", "tfdist/aws/scripts/")):
                texts = [archive.read(name).decode()]
            else:
                continue
            found += [line for text in texts for line in text.splitlines() if absent.search(line)]
    # `tfdist init --sagemaker` writes another model into it.
    assert found == ["model: examples/digits.py:model_fn"]


def test_the_console_script(metadata):
    program = Path(sys.executable).parent / "tfdist"
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith("tfdist, version ")
    assert "tfdist = tfdist.cli.main:main" in metadata["options.entry_points"]["console_scripts"]


@pytest.mark.parametrize(
    "code",
    [
        "import tfdist",
        "import sys; sys.argv = ['tfdist', '--help']; from tfdist.cli.main import tfdist; "
        "tfdist(standalone_mode=False)",
        "from tfdist.cli.launch import command; command(['--help'], standalone_mode=False)",
        "from tfdist.cli.doctor import command; command(['--help'], standalone_mode=False)",
        "from tfdist.cli.aws import command; command(['--help'], standalone_mode=False)",
        "from tfdist.cli.plan import command; command(['--help'], standalone_mode=False)",
    ],
    ids=["import tfdist", "--help", "launch --help", "doctor --help", "aws --help", "plan --help"],
)
def test_nothing_heavy_is_imported_early(code):
    report = f"import json; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; {report}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
