"""The comparisons, their contenders, and the names of their rows."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.harness import Rounds, Row, compare, interleaved
from benchmarks.peers.contender import Contender, ContenderFailed
from benchmarks.peers.environments import FBGEMM, OURS, RECOMMENDERS_ADDONS, Environment
from elastable.embedding_store.contract.malformed import DocumentFields

PEER_ABSENT = "peer absent"
_ROUNDS = 7
_SECONDS = 0.3  # of a turn
_SIDES = "benchmarks.peers.sides"


@dataclass(frozen=True, slots=True)
class Runner:
    """A side, and what it does in a race.

    Attributes:
        name: For the rows.
        environment: Where its library is.
        side: Its module.
        race: What it prepares.
    """

    name: str
    environment: Environment
    side: str
    race: str


@dataclass(frozen=True, slots=True)
class Pairing:
    """A row: one runner against another.

    Attributes:
        name: What was measured.
        ours: Name of our runner.
        theirs: Name of theirs.
        floor: What the ratio must reach; None: it is shown and no more.
    """

    name: str
    ours: str
    theirs: str
    floor: float | None


@dataclass(frozen=True, slots=True)
class Race:
    """Runners who take turns.

    Attributes:
        unit: Of their figures.
        runners: Who runs.
        pairings: The rows.
        settings: What every side receives.
    """

    unit: str
    runners: tuple[Runner, ...]
    pairings: tuple[Pairing, ...]
    settings: DocumentFields = field(default_factory=dict)


def run(race: Race, home: Path, rounds: int = _ROUNDS, seconds: float = _SECONDS) -> list[Row]:
    """Holds the race; a side that is missing or fails has rows that say so.

    Args:
        race: The race.
        home: A folder for logs.
        rounds: Turns of each.
        seconds: Of a turn.
    """
    notes: dict[str, str] = {}
    with ExitStack() as held:
        turns: dict[str, Callable[[], float]] = {}
        for runner in race.runners:
            if not runner.environment.present:
                notes[runner.name] = PEER_ABSENT
                continue
            log = home / f"{runner.name.replace(' ', '-')}.log"
            variables = dict(runner.environment.variables)
            contender = held.enter_context(Contender(runner.environment.python, runner.side, log, variables))
            try:
                contender.prepare(runner.race, race.settings)
            except ContenderFailed as failure:
                print(failure)
                notes[runner.name] = "failed"
                contender.close()
                continue
            turns[runner.name] = partial(contender.round, seconds)
        figures: Rounds = interleaved(turns, rounds) if turns else {}
    return [_row(race.unit, pairing, figures, notes) for pairing in race.pairings]


def _row(unit: str, pairing: Pairing, figures: Rounds, notes: Mapping[str, str]) -> Row:
    ours, theirs = figures.get(pairing.ours), figures.get(pairing.theirs)
    note = notes.get(pairing.ours if ours is None else pairing.theirs)
    return row_of(pairing.name, unit, ours, theirs, pairing.floor, note)


def row_of(
    name: str,
    unit: str,
    ours: Sequence[float] | None,
    theirs: Sequence[float] | None,
    floor: float | None,
    note: str | None = PEER_ABSENT,
) -> Row:
    """As `compare`; where one of the two has no figures, `note` says why."""
    if ours is not None and theirs is not None:
        return compare(name, unit, ours, theirs, floor)
    value, reference = (None if of is None else statistics.median(of) for of in (ours, theirs))
    return Row(name, value, unit, reference, None, floor, note)


def table_races() -> list[Race]:
    """Tables in memory."""
    ours = partial(Runner, environment=OURS, side=f"{_SIDES}.elastable_tables")
    torch = partial(Runner, environment=FBGEMM, side=f"{_SIDES}.torch_bags")
    fbgemm = partial(Runner, environment=FBGEMM, side=f"{_SIDES}.fbgemm_tables")
    tensorflow = partial(Runner, environment=OURS, side=f"{_SIDES}.tensorflow_updates")
    cuckoo = Runner("cuckoo", RECOMMENDERS_ADDONS, f"{_SIDES}.recommenders", "dynamic")
    pace = Runner("pace", OURS, f"{_SIDES}.memory_pace", "bags")
    lookup, bags = "lookup, fixed table", "bag lookup, 20 ids a bag, sum"
    races = [
        Race(
            "rows/s",
            (ours("elastable", race="lookup"), torch("torch", race="lookup"), fbgemm("fbgemm", race="lookup")),
            (
                Pairing(f"{lookup}, against torch EmbeddingBag", "elastable", "torch", 1.3),
                Pairing(f"{lookup}, against FBGEMM TBE", "elastable", "fbgemm", 2.0),
            ),
        ),
        Race(
            "ids/s",
            (ours("elastable", race="bags"), torch("torch", race="bags"), fbgemm("fbgemm", race="bags"), pace),
            (
                Pairing(f"{bags}, against torch EmbeddingBag", "elastable", "torch", 1.2),
                Pairing(f"{bags}, against FBGEMM TBE", "elastable", "fbgemm", 2.0),
                Pairing(f"{bags}, against reading as many bytes in order", "elastable", "pace", None),
                Pairing("torch's bag lookup against the same", "torch", "pace", None),
                Pairing("FBGEMM's bag lookup against the same", "fbgemm", "pace", None),
            ),
        ),
    ]
    dynamic = "lookup, dynamic table, against recommenders-addons' cuckoo table"
    races.append(
        Race("rows/s", (ours("elastable", race="dynamic"), cuckoo), (Pairing(dynamic, "elastable", "cuckoo", 6.0),))
    )
    rowwise = "row-wise Adagrad, Zipf(1.05) ids"
    races.append(
        Race(
            "ids/s",
            (
                ours("update", race="update"),
                ours("lookup and update", race="lookup and update"),
                fbgemm("fbgemm", race="update"),
            ),
            (
                Pairing(f"grouping and {rowwise}, against FBGEMM TBE forward and backward", "update", "fbgemm", 2.0),
                Pairing(f"lookup, grouping and {rowwise}, against the same", "lookup and update", "fbgemm", None),
            ),
        )
    )
    for race, name in (("adagrad", "Adagrad"), ("adam", "Adam")):
        row = f"{name}, unique ids, against TensorFlow's sparse {name}"
        runners = (ours("elastable", race=race), tensorflow("tensorflow", race=race))
        races.append(Race("rows/s", runners, (Pairing(row, "elastable", "tensorflow", 10.0),)))
    return races


def redis_races(address: str) -> list[Race]:
    """Rows in one Redis node, which both sides use in turn: a table that it holds in its cache, and one it does not."""
    ours = partial(Runner, environment=OURS, side=f"{_SIDES}.elastable_redis")
    pace = partial(Runner, environment=OURS, side=f"{_SIDES}.redis_pace")
    theirs = partial(Runner, environment=RECOMMENDERS_ADDONS, side=f"{_SIDES}.recommenders")
    races = []
    for rows in (16_384, 262_144):
        of = f"of {rows:,}"
        runners = (
            ours("lookup", race="redis lookup"),
            ours("write", race="redis write"),
            ours("flush", race="redis flush"),
            pace("pace of lookups", race="redis lookup"),
            pace("pace of writes", race="redis write"),
            pace("pace of flushes", race="redis flush"),
            theirs("their lookup", race="redis lookup"),
            theirs("their upsert", race="redis upsert"),
        )
        pairings = (
            Pairing(f"Redis lookup {of}, against recommenders-addons", "lookup", "their lookup", 2.0),
            Pairing(f"Redis write {of}, against recommenders-addons' upsert", "write", "their upsert", 2.0),
            Pairing(f"Redis flush with Adagrad's slots {of}, against their upsert", "flush", "their upsert", 0.8),
            Pairing(f"the server ceiling of lookups {of}, against theirs", "pace of lookups", "their lookup", None),
            Pairing(f"the server ceiling of writes {of}, against their upsert", "pace of writes", "their upsert", None),
            Pairing(f"the server ceiling of flushes {of}, against it", "pace of flushes", "their upsert", None),
            Pairing(f"Redis lookup {of}, against the server ceiling", "lookup", "pace of lookups", None),
            Pairing(f"Redis write {of}, against the server ceiling", "write", "pace of writes", None),
            Pairing(f"Redis flush with slots {of}, against the server ceiling", "flush", "pace of flushes", 0.9),
        )
        settings = {"address": address, "rows": rows, "batch": 16_384, "partitions": 64}
        races.append(Race("rows/s", runners, pairings, settings))
    return races
