"""Each notebook runs from its first cell to its last, and is kept with outputs that tell nothing of
the machine it ran on."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient
from tiers import long

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
_TIMEOUT_S = 600


class ThisPython(AsyncKernelManager):
    """Starts kernels with this very Python, whatever kernels the user has installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.timeout(_TIMEOUT_S)
@pytest.mark.parametrize(
    "path",
    [NOTEBOOKS[0], *long(*NOTEBOOKS[1:])],
    ids=lambda path: path.stem,
)
def test_every_cell_runs(path, tmp_path):
    notebook = nbformat.read(str(path), as_version=4)
    kernel = ThisPython()
    client = NotebookClient(notebook, km=kernel, timeout=_TIMEOUT_S - 20)
    # A cell that fails raises CellExecutionError here, with its traceback. A client leaves a kernel
    # that was given to it running, unless told otherwise.
    client.execute(cwd=str(tmp_path), cleanup_kc=True)
    assert not kernel.has_kernel
    ran = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert ran == list(range(1, len(ran) + 1))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_kept_with_its_outputs_and_without_traces_of_a_machine(path):
    notebook = nbformat.read(str(path), as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output
            text = output.get("text", "") + output.get("data", {}).get("text/plain", "")
            assert "INFO:tensorflow" not in text, text
            assert not re.search(r"(^|[\s'\"(])/\w+/|0x[0-9a-f]{6}", text), text
