"""Entities in files, most of them out of memory, are trained to the bits of entities in memory."""

from pathlib import Path

from benchmarks.graphs.kg_beyond_memory import trial


def test_entities_in_files_are_trained_to_the_same_bits(tmp_path: Path) -> None:
    # The trial compares losses, entities and relations itself; of 40,000 rows, a budget of 1.3 MiB holds a quarter.
    rows = trial(tmp_path, entities=40_000, relations=5, count=20_000, steps=15, dim=16)
    assert [row.unit for row in rows] == ["steps/s", "MiB"]
    assert sum(file.stat().st_size for file in (tmp_path / "rows").rglob("*") if file.is_file()) > 1 << 20
