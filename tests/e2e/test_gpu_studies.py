"""Studies that need a GPU run to their records with a tiny model on a CPU, so that no GPU time is lost on a bad job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from studies_for_tests import jobs_of, run_small

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "asynchronous-long",
            "asynchronous-smollm2",
            "qwen-asynchronous",
            "qwen-babyai",
            "qwen-debate",
            "qwen-interaction",
            "qwen-searchqa",
        ),
        "qwen-trees",
    ],
)
def test_a_study_runs_to_its_records(
    name: str, tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("AGENTGYM_SEARCHQA_DATA", "AGENTGYM_SEARCHQA_INDEX"):
        monkeypatch.delenv(variable, raising=False)
    records = run_small(name, jobs_of(name), tiny_qwen, tmp_path)
    for record in records.values():
        if "curves" in record:
            assert record["steps"] == 2 or record["method"] == "sft"
        else:
            assert record["results"][0]["total"]["episodes"] > 0
    assert str(tmp_path) not in json.dumps(records)
    assert str(tiny_qwen) not in json.dumps(records)
