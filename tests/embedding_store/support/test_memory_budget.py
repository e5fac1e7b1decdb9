"""Where fixed tables are laid out whole."""

from pathlib import Path

import pytest

from elastable.embedding_store.support import memory_budget as memory_limit


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [("max\n", None), (f"{4 << 30}\n", 4 << 30), (f"{1 << 62}\n", None), ("nonsense", None), (None, None)],
)
def test_a_container_may_have_less_than_the_machine(
    allowed: str | None, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "memory.max"
    if allowed is not None:
        file.write_text(allowed)
    monkeypatch.setattr(memory_limit, "_CGROUP", file)
    kilobytes = next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    machine = int(kilobytes) * 1024
    memory_limit.memory_limit.cache_clear()
    try:
        found = memory_limit.memory_limit()
        assert found == pytest.approx(min(machine, expected or machine), rel=0.05)
        assert memory_limit.direct_bytes_here() == max(1 << 30, found // 8)
    finally:
        memory_limit.memory_limit.cache_clear()
