"""Which tensor of a table lives where, and why."""

from collections.abc import Callable
from pathlib import Path

import pytest

from elastable.embedding_store import OptimizerSpec, TableSpec
from elastable.embedding_store.composite.locations import (
    LocationSettings,
    TensorLocation,
    TensorLocationSettings,
    plan_tables,
    read_locations,
    storage_of_tables,
    storage_of_url,
)
from elastable.embedding_store.errors import BadInput, BadSpec


def tables(*specs: TableSpec) -> dict[str, TableSpec]:
    return {spec.name: spec for spec in specs}


def settings(storage: str, least: int = 2) -> TensorLocationSettings:
    return TensorLocationSettings(TensorLocation(storage), least)


def both(storage: str, least: int = 2, **overrides: str) -> LocationSettings:
    places = {name: TensorLocation(place) for name, place in overrides.items()}
    return LocationSettings(settings(storage, least), settings(storage, least), overrides=places)


ADAM = OptimizerSpec.of("adam")
SMALL = TableSpec("small", 4, 10, optimizer=ADAM)
LARGE = TableSpec("large", 64, 1_000_000, optimizer=ADAM)
ANY = TableSpec("any", 8, None, optimizer=OptimizerSpec.of("adagrad"))


def test_sizes_are_those_of_the_tensors() -> None:
    lines = {(line.table, line.kind): line for line in plan_tables(tables(LARGE, ANY), both("memory"))}
    weight, state = lines["large", "weight"], lines["large", "optimizer_state"]
    assert (weight.elements, weight.bytes) == (64_000_000, 256_000_000)
    assert (state.elements, state.bytes) == (128_000_000, 512_000_000)
    halves, slots, _ = plan_tables(tables(HALF), both("memory"))
    assert (halves.bytes, slots.bytes) == (40 * 2, 80 * 4)
    any_id = lines["any", "weight"]
    assert (any_id.elements, any_id.bytes, any_id.row_bytes) == (None, None, 32)
    assert lines["large", "accumulator"].location.storage == "memory"


HALF = TableSpec("half", 4, 10, "float16", optimizer=ADAM)
SCALAR, PAIR, PLAIN = (TableSpec(f"of-{n}", 1, n, optimizer=OptimizerSpec.of("sgd")) for n in (1, 2, 10))
APART = LocationSettings(settings("redis"), settings("memory"))
TOGETHER = LocationSettings(settings("redis"), settings("memory"), overrides={"small": TensorLocation("file")})


@pytest.mark.parametrize(
    ("specs", "places", "expected"),
    [
        # The largest of the linked tensors counts: 80 elements of Adam's state and 40 of the rows.
        ([SMALL], both("redis", 81), {"small": "worker"}),
        ([SMALL], both("redis", 80), {"small": "redis"}),
        ([SCALAR, PAIR], LocationSettings(), {"of-1": "worker", "of-2": "memory"}),  # the default: two elements
        # A table of any id, and one of halves, never stays for its size.
        ([ANY, HALF], both("file", 1 << 60), {"any": "file", "half": "file"}),
        # As small as it is, and as large as the other: no threshold is looked at where a name is said.
        ([SMALL, LARGE], both("file", 100, small="redis", large="worker"), {"small": "redis", "large": "worker"}),
        # Without slots there is nothing to disagree with; an override is for both.
        ([PLAIN], APART, {"of-10": "redis"}),
        ([SMALL], TOGETHER, {"small": "file"}),
    ],
)
def test_where_tables_go(specs: list[TableSpec], places: LocationSettings, expected: dict[str, str]) -> None:
    assert storage_of_tables(plan_tables(tables(*specs), places)) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorLocation("tape"), "'tape'.*worker, memory, file, redis"),
        (lambda: settings("memory", -1), "must not be negative, got -1"),
        (lambda: LocationSettings(accumulator=settings("redis")), "accumulator on 'redis'"),
        (lambda: plan_tables(tables(SMALL), both("memory", smal="redis")), "'smal': there is .* did you mean 'small'"),
        (lambda: plan_tables(tables(ANY), both("memory", any="worker")), "'any' holds any id"),
        (
            lambda: plan_tables(tables(HALF), both("file", half="worker")),
            "'half' keeps its rows in float16, which the wo",
        ),
        (
            lambda: plan_tables(tables(SMALL), APART),
            "'small': its rows go to redis .* optimizer state to memory .*lin",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(BadSpec, match=message):
        make()


WHOLE = """
[stores]
redis = "redis://localhost:7000"

[weight]
storage = "redis"
min_elements_for_off_worker = 4096

[overrides]
users = "memory"
"cities/large" = "file"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "locations.toml"
    path.write_text(text)
    return path


def test_a_whole_file(tmp_path: Path) -> None:
    locations = read_locations(written(tmp_path, WHOLE), "file:///rows")
    found = locations.settings
    assert found.weight == found.optimizer_state
    assert (found.weight.location.storage, found.weight.min_elements_for_off_worker) == ("redis", 4096)
    assert {name: place.storage for name, place in found.overrides.items()} == {
        "users": "memory",
        "cities/large": "file",
    }
    assert locations.stores == {"memory": "memory", "file": "file:///rows", "redis": "redis://localhost:7000"}


def test_an_empty_file_leaves_everything_in_the_store(tmp_path: Path) -> None:
    locations = read_locations(written(tmp_path, ""), "redis://h:1")
    assert locations.settings.weight.location.storage == "redis"
    assert locations.settings.optimizer_state == locations.settings.weight
    assert locations.stores == {"memory": "memory", "redis": "redis://h:1"}


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[weight", BadInput, r"locations\.toml"),
        ("wieght = 1", BadInput, "'wieght' is unknown; known are stores, weight"),
        ("[weight]\nplace = 'x'", BadInput, r"\[weight\] 'place' is unknown"),
        ("[weight]\nstorage = 'tape'", BadSpec, "'tape'"),
        ("[weight]\nmin_elements_for_off_worker = 'many'", BadInput, "must be an integer, got 'many'"),
        ("weight = 3", BadInput, r"weight must be a table"),
        ("overrides = 3", BadInput, r"overrides must be a table"),
        (f"[weight]\nmin_elements_for_off_worker = {'9' * 5_000}", BadInput, "location file"),
        ("[stores]\nworker = 'x'", BadInput, r"\[stores\] worker = 'x'; give URLs of memory, file, redis"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_locations(written(tmp_path, text), "memory")
    with pytest.raises(BadInput, match=r"none\.toml"):
        read_locations(tmp_path / "none.toml", "memory")


@pytest.mark.parametrize(
    ("url", "storage"), [("memory", "memory"), ("file:///x", "file"), ("redis://h", "redis"), ("rediss://h", "redis")]
)
def test_what_a_url_stands_for(url: str, storage: str) -> None:
    assert storage_of_url(url) == storage


def test_sharding_over_replicas(tmp_path: Path) -> None:
    content = "[weight]\nreplicated_tensor_sharding = true\nmin_elements_for_replicated_tensor_sharding = 64\n"
    found = read_locations(written(tmp_path, content), "memory").settings
    assert found.weight == found.optimizer_state
    assert found.weight.location.replicated_tensor_sharding
    assert found.weight.min_elements_for_replicated_tensor_sharding == 64
    with pytest.raises(BadInput, match=r"\[weight\] replicated_tensor_sharding must be true or false, got 1"):
        read_locations(written(tmp_path, "[weight]\nreplicated_tensor_sharding = 1\n"), "memory")
