"""What is sent, in an environment like AWS's newest training image: made once, by pip.

As the image's lock file has it: ``tensorflow_cpu``, a Keras 3, no tf_keras and no tfdist; but on
the Python that runs the tests. It needs the package registry, and some minutes the first time.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tfdist.aws import bundle, config, images

ROOT = Path(__file__).parents[2]
_MAKE_S, _STEP_S = 900, 240
pytestmark = [pytest.mark.long, pytest.mark.timeout(_MAKE_S + 6 * _STEP_S)]


def run(*command, timeout_s=_STEP_S, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **options)
    assert done.returncode == 0, (command[1:3], done.stdout[-1000:], done.stderr[-3000:])
    return done.stdout


@pytest.fixture(scope="module")
def python():
    """The environment's Python; nobody else uses it meanwhile."""
    needed = [f"tensorflow_cpu=={images.version_of(None)}", "keras>=3.15.0"]
    listed = (ROOT / "sagemaker" / "requirements.txt").read_text().splitlines()
    needed += [line for line in listed if not line.startswith("#")]
    folder = ROOT / ".cache" / "aws-image"
    folder.mkdir(parents=True, exist_ok=True)
    made, program = folder / "made.txt", folder / "venv" / "bin" / "python"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_file() or made.read_text().split("\n") != needed:
            shutil.rmtree(folder / "venv", ignore_errors=True)
            run(sys.executable, "-m", "venv", folder / "venv")
            run(program, "-m", "pip", "install", *needed, timeout_s=_MAKE_S)
            made.write_text("\n".join(needed))
        yield program


def environ(base):
    """What SageMaker's toolkit tells the script of one host."""
    channels = {name: base / "data" / name for name in ("manifest", "train", "validation")}
    told = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}
    kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    return {
        **kept,
        **{f"SM_CHANNEL_{name.upper()}": str(path) for name, path in channels.items()},
        "SM_INPUT_DATA_CONFIG": json.dumps(dict.fromkeys(channels, told)),
        "SM_HOSTS": '["algo-1"]',
        "SM_MODEL_DIR": str(base / "model"),
        "SM_OUTPUT_DIR": str(base / "output"),
        "SM_OUTPUT_DATA_DIR": str(base / "output"),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


@pytest.mark.parametrize("keras", [3, 2])
def test_the_scripts_run_in_an_image_without_tf_keras(python, tmp_path, keras):
    run(python, "-m", "pip", "uninstall", "--yes", "tf_keras")
    wanted = config.load(
        ROOT / "sagemaker" / "config.yaml", (f"model={ROOT / 'examples' / 'digits.py'}:model_fn",)
    )
    code = bundle.collect(wanted, tmp_path / "code")
    for folder in ("model", "output", "archive"):
        (tmp_path / folder).mkdir()

    def script(name, **arguments):
        texts = [text for key, value in arguments.items() for text in (f"--{key}", str(value))]
        command = (python, name, *texts)
        return run(
            *[
                text.replace("_", "-") if text.startswith("--") else text
                for text in map(str, command)
            ],
            cwd=code,
            env=environ(tmp_path),
        )

    data = tmp_path / "data"
    script(
        "shard.py", source="digits", output=data, num_shards=2, split="train=8,validation=1,test=1"
    )
    told = script(
        "train.py", model="digits.py:model_fn", strategy="multi_worker", epochs=3, keras=keras
    )
    assert "tfdist epoch=3 " in told
    with tarfile.open(tmp_path / "archive" / "model.tar.gz", "w:gz") as packed:
        packed.add(tmp_path / "model", arcname=".")
    places = {"manifest": data / "manifest", "data": data / "test"}
    script("evaluate.py", model=tmp_path / "archive", output=tmp_path / "report", **places)
    (report,) = json.loads((tmp_path / "report" / "evaluation.json").read_text()).values()
    assert report["accuracy"]["value"] > 0.5
    found = run(python, "-m", "pip", "list", "--format", "json")
    names = {each["name"].lower().replace("-", "_") for each in json.loads(found)}
    assert ("tf_keras" in names) == (keras == 2)
    assert not names & {"tensorflow", "tfdist"}
