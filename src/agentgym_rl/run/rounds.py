"""What each round of an offline run trained on, kept in the run directory.

    <root>/rounds/round_001.jsonl    a first line about the round, then one line per sample or pair

Token ids are written as they are trained on; `trained` lists the stretches `[start, length]` that the loss is taken on,
`left_out`, where there are any, replies that are not imitated.
The file is complete when it can be seen, so a run that was killed goes on with it instead of playing the round again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from agentgym_rl.run.disk import write_atomically
from agentgym_rl.training.dpo import Preference
from agentgym_rl.types import Sample


@dataclass(slots=True)
class Round:
    number: int
    """From 1."""
    first_step: int
    """The step its first update is."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What was played for it; logged with its first step."""
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    """To imitate, by where they come from: `expert` or `explored`."""
    pairs: list[Preference] = field(default_factory=list)


def round_path(root: Path, number: int) -> Path:
    return root / "rounds" / f"round_{number:03d}.jsonl"


def write_round(root: Path, made: Round) -> None:
    lines: list[dict[str, Any]] = [{"round": made.number, "first_step": made.first_step, "metrics": made.metrics}]
    lines += [{"source": source, **_written(s)} for source, samples in made.samples.items() for s in samples]
    lines += [
        {
            "chosen": _written(pair.chosen) | {"reference": pair.chosen_reference},
            "rejected": _written(pair.rejected) | {"reference": pair.rejected_reference},
        }
        for pair in made.pairs
    ]
    path = round_path(root, made.number)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, b"".join(orjson.dumps(line) + b"\n" for line in lines))


def read_round(root: Path, number: int) -> Round:
    head, *rows = [orjson.loads(line) for line in round_path(root, number).read_bytes().splitlines()]
    made = Round(head["round"], head["first_step"], head["metrics"])
    for row in rows:
        if "source" in row:
            made.samples.setdefault(row["source"], []).append(_read(row))
        else:
            chosen, rejected = row["chosen"], row["rejected"]
            made.pairs.append(Preference(_read(chosen), _read(rejected), chosen["reference"], rejected["reference"]))
    return made


def _written(sample: Sample) -> dict[str, Any]:
    stretches, place = [], 0
    for trained, some in groupby(sample.loss_mask):
        length = len(list(some))
        if trained:
            stretches.append([place, length])
        place += length
    written = {"id": sample.trajectory_id, "token_ids": sample.token_ids, "trained": stretches}
    return written | ({"left_out": sample.left_out} if sample.left_out else {})


def _read(row: dict[str, Any]) -> Sample:
    mask = [False] * len(row["token_ids"])
    for start, length in row["trained"]:
        mask[start : start + length] = [True] * length
    left_out = [(start, length) for start, length in row.get("left_out", ())]
    return Sample(row["token_ids"], mask, trajectory_id=row["id"], left_out=left_out)
