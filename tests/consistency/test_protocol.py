"""Every order of steps keeps the protocol's promises, and without any one of its precautions some order breaks them."""

import pytest

from tests.consistency.protocol import WITHOUT, steps
from tests.consistency.world import Broken, Store, Worker, World, Writer

_MOST_STATES = 400_000

SCENES: dict[str, World] = {
    "a process": World(Store(), (Writer("A", 3),)),
    "a broken connection": World(Store(), (Writer("A", 2, breaks=1),)),
    "a successor": World(Store(), (Writer("A", 2), Writer("B", 2, "take over"))),
    "a broken connection and a successor": World(Store(), (Writer("A", 1, breaks=1), Writer("B", 1, "take over"))),
    "an older log": World(Store(), (Writer("A", 3),), loses=(0,)),
    "older rows": World(Store(), (Writer("A", 3),), loses=(1,)),
    "an older server": World(Store(), (Writer("A", 2),), loses=(0, 1)),
    "a job": World(Store(), (Writer("A", 3, breaks=1, workers=True),), worker=Worker()),
    "a job and its successor": World(
        Store(), (Writer("A", 2, breaks=1, workers=True), Writer("B", 2, "take over", workers=True)), worker=Worker()
    ),
}

#: The scene in which leaving a precaution out does harm.
HARM = {
    "settle": "a broken connection",
    "look": "a broken connection",
    "log before rows": "a process",
    "rows before state": "a process",
    "state before trim": "a process",
    "end of the log": "an older log",
    "server of the state": "an older server",
    "stamps of rows": "an older log",
    "stamps of the state": "older rows",
    "stamps at writing": "older rows",
    "stamps that grow": "older rows",
    "join first": "a job and its successor",
    "a job's only attempt": "a job",
}


def explore(scene: str, without: str = "") -> int:
    """Tries every order; how many states there are. Raises `Broken` with the first that breaks a promise."""
    start = SCENES[scene]
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
    """Nothing is left to do: the last owner has made all its versions and flushed them, unless something was lost."""
    owner = next(writer for writer in world.writers if writer.name == world.store.head.owner[0])
    flushed = world.store.head.flushed == owner.last or owner.workers
    if not world.store.lost and (owner.at != "done" or not flushed):
        raise Broken(f"the last owner ended as {owner}")


@pytest.mark.parametrize("scene", SCENES)
def test_every_order_keeps_the_promises(scene: str) -> None:
    assert explore(scene) > 200


@pytest.mark.parametrize("without", WITHOUT)
def test_every_precaution_is_needed(without: str) -> None:
    with pytest.raises(Broken):
        explore(HARM.get(without, "a successor"), without)
