"""Every order of steps keeps the protocol's promises, and without any one of its precautions some order breaks them."""

from __future__ import annotations

import pytest

from tests.consistency.protocol import WITHOUT, steps
from tests.consistency.world import Broken, Pinner, Reader, Store, World, Writer

_MOST_STATES = 400_000

SCENES: dict[str, tuple[Writer | Reader | Pinner, ...]] = {
    "a reader": (Writer("A", 2), Writer("B", 2, "take over 0"), Reader()),
    "a second successor": (Writer("A", 2), Writer("B", 1, "take over 0"), Writer("C", 2, "take over 0")),
    "a pin": (Writer("A", 1), Writer("B", 2, "take over 0"), Pinner()),
}

#: The scene in which leaving a precaution out does harm.
HARM = {
    "stamps read": "a reader",
    "images for pins": "a pin",
    "pin of the current": "a pin",
    "owner again": "a pin",
    "oldest image": "a pin",
    "end of recovery": "a pin",
    "missing image": "a pin",
}


def explore(scene: str, without: str = "") -> int:
    """Tries every order; how many states there are. Raises `Broken` with the first that breaks a promise."""
    start = World(Store(), SCENES[scene])
    seen, frontier = {start}, [start]
    while frontier:
        world = frontier.pop()
        ended = True
        for following in steps(world, without):
            ended = False
            if following not in seen:
                assert len(seen) < _MOST_STATES
                seen.add(following)
                frontier.append(following)
        if ended:
            _require_end(world)
    return len(seen)


def _require_end(world: World) -> None:
    """Nothing is left to do: the last owner of the store has made all its versions, each once."""
    owner = next(p for p in world.processes if isinstance(p, Writer) and p.name == world.store.owner[0])
    if owner.at != "done" or world.store.version < owner.last:
        raise Broken(f"the last owner ended as {owner.at!r} at version {world.store.version}")
    rows = (world.store.parts[0].rows, world.store.parts[1].rows)
    if rows != world.store.truth[world.store.version]:
        raise Broken(f"version {world.store.version} ended as {rows}")


@pytest.mark.parametrize("scene", SCENES)
def test_every_order_keeps_the_promises(scene: str) -> None:
    assert explore(scene) > 2_000


@pytest.mark.parametrize("without", WITHOUT)
def test_every_precaution_is_needed(without: str) -> None:
    with pytest.raises(Broken):
        explore(HARM.get(without, "a second successor"), without)
