"""Location settings as people write them."""

from pathlib import Path

import pytest

from elastable.embedding_store.composite.locations import read_locations, storage_of_url
from elastable.embedding_store.errors import BadInput, BadSpec

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


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
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
