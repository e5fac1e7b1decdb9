"""What jobs share: arrays of what a job has left, and the input that `SAME_BITS_NUDGE` changes by one bit."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import elastable as et

Arrays = dict[str, np.ndarray]
ROOT = Path(__file__).parents[2]


def require_own_tree() -> None:
    """Every process of a job calls it: the package that it runs is next to these jobs, and not in another tree."""
    found = Path(str(et.__file__)).resolve().parents[1]
    assert found == ROOT.resolve(), f"the jobs of {ROOT} run the package of {found}"


def nudged(values: np.ndarray) -> np.ndarray:
    """The values; with `SAME_BITS_NUDGE` the first one is the next float32: a job must show that it depends on it."""
    values = np.array(values, np.float32)
    if os.environ.get("SAME_BITS_NUDGE"):
        values.flat[0] = np.nextafter(values.flat[0], np.float32(np.inf))
    return values


def table_arrays(name: str, blocks: Iterable[Any]) -> Arrays:
    """Ids, weights and slots of blocks of rows, by id."""
    found = [(block.ids, block.weights, block.slots) for block in blocks]
    ids, weights, slots = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(ids)
    return {f"{name}/ids": ids[order], f"{name}/weights": weights[order], f"{name}/slots": slots[order]}


def checkpoint_arrays(home: Path) -> Arrays:
    """All that the newest of a directory of full checkpoints holds, read as docs/checkpoints.md describes its files.

    The files of one table are joined, and its rows sorted by id: how a table is cut into files is nobody's promise.
    """
    newest = max(manifest.parent for manifest in home.glob("ckpt-*/manifest.json"))
    arrays: Arrays = {}
    rows: dict[str, list[Arrays]] = {}
    for file in sorted(newest.glob("*.safetensors")):
        held, words = load_file(file), file.stem.split("-")
        if words[0] == "table" and "ids" in held and words[-1] != "state":
            rows.setdefault(f"{words[0]}-{words[1]}", []).append(held)
        else:
            arrays |= {f"{file.stem}/{key}": value for key, value in held.items()}
    for table, parts in rows.items():
        order = np.argsort(np.concatenate([part["ids"] for part in parts]))
        for key in parts[0]:
            arrays[f"{table}/{key}"] = np.concatenate([part[key] for part in parts])[order]
    return arrays


def history_arrays(file: Path) -> Arrays:
    """The numbers of a `metrics.jsonl` that no clock decides, by kind and name."""
    series: dict[str, list[float]] = {}
    lines = map(json.loads, file.read_text().splitlines())
    for line in (line for line in lines if line["kind"] != "train"):  # those are written every second
        for key, value in line.items():
            if isinstance(value, int | float) and "second" not in key:
                series.setdefault(f"history/{line['kind']}/{key}", []).append(value)
    return {name: np.array(values, np.float64) for name, values in series.items()}
