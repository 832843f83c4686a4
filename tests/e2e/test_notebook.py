"""The notebook `examples/quickstart.ipynb` runs from top to bottom: it trains, plots and replays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
SHORT = 'STEPS = 2\nDEMONSTRATIONS = 16\nRUN = "run"'


def test_the_notebook_trains_plots_and_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra dev)")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (extra dev)")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (extra dev)")
    source = Path(__file__).parents[2] / "src"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert {line.split(" = ")[0] for line in parameters.source.splitlines()} == {"STEPS", "DEMONSTRATIONS", "RUN"}
    parameters.source = SHORT
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    shown = [kind for output in outputs for kind in output.get("data", {})]
    assert "held-out success: " in printed
    assert "image/png" in shown
    assert sum(kind == "text/html" for kind in shown) >= 2
    assert (tmp_path / "run" / "summary.json").is_file()
    assert all(cell.get("outputs") == [] for cell in nbformat.read(NOTEBOOK, as_version=4).cells if "outputs" in cell)
