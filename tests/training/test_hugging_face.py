"""HuggingFace's models on several replicas; the scenarios stand in hugging_face_scenarios.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from scenarios import Job

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")
# The first scenario of a job waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(580)
_FILE = Path(__file__).with_name("hugging_face_scenarios.py")
_NAMES = tuple(re.findall(r"^@scenario\ndef (\w+)", _FILE.read_text(), re.MULTILINE))
# Its steps are those of the others; only its losses and exchanges are its own.
_OF_MULTI_WORKER = ("gpt2_whose_padding_has_no_label",)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    def job(strategy: str, options: dict, ranks: int = 1, only: tuple[str, ...] = _NAMES) -> Job:
        folder = tmp_path_factory.mktemp(strategy)
        return Job(_FILE, folder, strategy, options, ranks=ranks, only=only)

    return {
        "single": job("single", {}),
        "mirrored": job("mirrored", {"devices": 2}),
        "horovod": job("horovod", {"stall_timeout_s": 60}, ranks=2),
        "multi_worker": job("multi_worker", {}, ranks=2, only=_OF_MULTI_WORKER),
    }


@pytest.mark.parametrize("strategy", ["single", "mirrored", "horovod"])
@pytest.mark.parametrize("name", _NAMES)
def test_hugging_face(strategy, name, jobs):
    jobs[strategy].check(name)


@pytest.mark.parametrize("name", _OF_MULTI_WORKER)
def test_hugging_face_on_several_workers(name, jobs):
    jobs["multi_worker"].check(name)
