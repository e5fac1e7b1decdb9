"""Whether a disturbed job ended as an undisturbed one."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.open_store import open_store
from elastable.master.checkpoints.checkpoint import open_checkpoint
from tests.chaos.records import RECORDS, trainings, trainings_followed
from tests.chaos.schedules import Schedule, Shape
from tests.chaos.stores import SERVICE, forgets
from tests.equality.jobs import table_numbers, trained_numbers


@dataclass(frozen=True)
class Ending:
    """All that a job leaves.

    Attributes:
        evaluations: What was measured of a version beside training, by version, as JSON; for each time it was.
    """

    numbers: dict[str, np.ndarray]  # every row, slot and dense tensor by name
    progress: str  # its place and its metrics, as JSON
    evaluations: list[tuple[int, str]]


def ending_of(home: Path) -> Ending:
    """What the newest checkpoint and the run directories below `home` hold."""
    saved = open_checkpoint(home / "checkpoints")
    evaluations = [found for file in sorted((home / "runs").glob("2*/metrics.jsonl")) for found in _evaluations(file)]
    return Ending(trained_numbers(home / "checkpoints"), replace(saved.progress(), sequences={}).to_json(), evaluations)


def _evaluations(file: Path) -> list[tuple[int, str]]:
    found = []
    for text in file.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # torn by a kill or a full disk
        if line["kind"] == "evaluation":
            values = {name: value for name, value in line.items() if name not in ("kind", "seconds")}
            found.append((int(line["version"]), json.dumps(values, sort_keys=True)))
    return found


def divergences(ours: Ending, expected: Ending, schedule: Schedule) -> list[str]:
    """What differs to the bit, and which records were not trained once an epoch."""
    if schedule.shape.mode == "async":
        return _asynchronous(ours, expected, schedule.shape)
    others = sorted(ours.numbers.keys() ^ expected.numbers.keys())
    problems = [f"other tensors: {others}"] if others else []
    for name in sorted(ours.numbers.keys() & expected.numbers.keys()):
        mine, theirs = ours.numbers[name], expected.numbers[name]
        if mine.tobytes() != theirs.tobytes():
            apart = np.abs(mine - theirs).max() if mine.shape == theirs.shape else f"{mine.shape} and {theirs.shape}"
            problems.append(f"{name} differs (by {apart})")
    if ours.progress != expected.progress:
        problems.append(f"progress differs: {_differences(ours.progress, expected.progress)}")
    return problems + _miscounted(ours, schedule.shape) + _mismeasured(ours, expected, schedule)


def _asynchronous(ours: Ending, expected: Ending, shape: Shape) -> list[str]:
    """What may not differ where every order of pushes gives other numbers: what there is, how far, and what counted."""
    others = sorted(ours.numbers.keys() ^ expected.numbers.keys())
    problems = [f"other tensors: {others}"] if others else []
    problems += [f"{name} is not finite" for name, values in ours.numbers.items() if not np.isfinite(values).all()]
    for name in ("version", "records", "epoch", "done", "evaluated"):
        mine, theirs = json.loads(ours.progress)[name], json.loads(expected.progress)[name]
        if mine != theirs:
            problems.append(f"progress differs: {name} {mine} is not {theirs}")
    return problems + _miscounted(ours, shape)


def _mismeasured(ours: Ending, expected: Ending, schedule: Schedule) -> list[str]:
    """Evaluations that are not those of their version; and, where no master fell, not one of each that was due."""
    right = dict(expected.evaluations)
    problems = [
        f"the evaluation of version {version} is {found}, not {right.get(version)}"
        for version, found in ours.evaluations
        if right.get(version) != found
    ]
    # A store server that is killed loses its pins, too.
    fatal = ("master", SERVICE, "shard0", "shard1")
    undisturbed = not any(fault.target in fatal or fault.action == "fill" for fault in schedule.faults)
    if undisturbed and not forgets(schedule.store):
        versions = sorted(version for version, _ in ours.evaluations)
        due = [version for version in sorted(right) if version % schedule.evaluate_every == 0]
        if versions != due:
            problems.append(f"versions {versions} were evaluated, not {due}")
    return problems


def _differences(ours: str, theirs: str) -> str:
    one, other = json.loads(ours), json.loads(theirs)
    return ", ".join(f"{key} {one.get(key)} is not {other.get(key)}" for key in one if one.get(key) != other.get(key))


def _miscounted(ours: Ending, shape: Shape) -> list[str]:
    ids = ours.numbers.get("counted/ids", np.empty(0, np.int64))
    if not np.array_equal(ids, np.arange(RECORDS)):
        return [f"{len(ids)} records have a row, not {RECORDS}"]
    weights, slots = ours.numbers["counted/weights"], ours.numbers["counted/slots"]
    if shape.lazy:
        counts = trainings(shape.optimizer, weights, slots, shape.grads_to_wait)
    else:
        counts = trainings_followed(shape.optimizer, weights, slots, shape.grads_to_wait, shape.epochs)
    wrong = np.flatnonzero(~(np.abs(counts - shape.epochs) <= 0.01))
    if not len(wrong):
        return []
    description = ", ".join(f"record {record} {counts[record]:.2f} times" for record in wrong[:4])
    return [f"{len(wrong)} records were not trained {shape.epochs} times: {description}"]


def store_differs(url: str, ending: Ending, loses: bool = False) -> list[str]:
    """What a store that outlives the job holds otherwise than its last checkpoint.

    `loses`: whether its servers may have lost the newest versions, so that it says itself that it is older, and a job
    that is resumed takes the checkpoint.
    """
    problems: list[str] = []
    try:
        store = open_store(url)
    except StoreBroken as error:
        return [] if loses else [f"the store is broken: {error}"]
    try:
        if loses and store.version() < json.loads(ending.progress)["version"]:
            return []
        for table in store.specs():
            problems += [
                f"{name} in the store is not that of the checkpoint"
                for name, values in table_numbers(table, store.scan(table)).items()
                if values.tobytes() != ending.numbers[name].tobytes()
            ]
    finally:
        store.close()
    return problems
