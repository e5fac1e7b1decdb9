"""The protocol of the write-ahead log in Redis (docs/versions.md) as a program of atomic steps.

It is small enough to try every order. One server has the log, the owner's key
and the tier's state; another one has a partition of two rows. A process commits
on one thread and writes rows behind on another; a request that it has sent may
be executed at any time, also after its connection broke. Every process may take
its next step at any time, or never again: so a process that dies, and one that
is stopped and wakes up later, are among the orders that are tried. A server may
come back with what it had some time ago. After every step a process that would
open the store then has to find the newest version exactly, or, where something
was lost, may say so. Different attempts and different processes make different
commits of the same version.

A process may be the master of a job. Its worker reads a version while it is being
logged, and pushes a gradient for the next one to whichever master is there. Every
version that is in the log has to be made of a gradient that was computed on the
commit before it in the log: one that was computed on a commit that nobody logged
counts nowhere.

`WITHOUT` names ways to do it wrong, each leaving one precaution out.
"""

from collections.abc import Iterator
from functools import lru_cache

from tests.consistency.servers import execute, lose
from tests.consistency.workers import work
from tests.consistency.world import Broken, Store, World, applied, recovered
from tests.consistency.writers import commit, flush

WITHOUT = {
    "watch": "Redis executes an append although the owner's key was written since",
    "owner check": "a new connection, or a change of the state, does not look who the owner is",
    "kill": "who takes over does not close the connections of others",
    "settle": "a process in doubt does not write the owner's key before it looks",
    "look": "a process in doubt appends again without looking",
    "end of the log": "a new connection does not look where the log ends",
    "log before rows": "rows of a commit are written behind before it is in the log",
    "rows before state": "the state is kept, and the log trimmed, before the rows are written",
    "state before trim": "the log is trimmed before the state is kept",
    "server of the state": "the log is trimmed on a server that came back older since the state was kept",
    "stamps of rows": "who opens the store does not compare the stamps of rows with the log's end",
    "stamps of the state": "who opens the store does not compare the stamps of rows with the state's",
    "stamps that grow": "two writes of a partition between the same two commits have the same stamp",
    "stamps at writing": "a write does not compare the partition's stamp with the one that was confirmed",
    "join first": "a master takes a gradient from a worker that has not joined it",
    "a job's only attempt": "a job whose version could not be logged makes another commit of it, and goes on",
}


def steps(world: World, without: str) -> Iterator[World]:
    """All worlds that are one step away.

    Raises:
        Broken: a process has seen what it must not, or would if it opened the store then.
    """
    stores = [*execute(world.store, without), *lose(world.store, world.loses)]
    found = [world._replace(store=store) for store in stores]
    for place, writer in enumerate(world.writers):
        for act in (commit, flush):
            for store, after in act(world.store, writer, without):
                writers = (*world.writers[:place], after, *world.writers[place + 1 :])
                found.append(world._replace(store=store, writers=writers))
    found += work(world, without)
    for following in found:
        _require_exact(following.store, without)
    return iter(found)


@lru_cache(maxsize=1 << 16)  # many worlds differ in their processes alone
def _require_exact(store: Store, without: str) -> None:
    """What a process would find that took over now: what others have sent is void then."""
    newest = recovered(store, without)
    if newest is None:
        if not store.lost:
            raise Broken(f"nothing was lost, and the store does not open: {store}")
        return
    version, cells = newest
    if version < store.acked:
        raise Broken(f"version {store.acked} was acknowledged, and {version} is found")
    if version != len(store.lineage) or cells != applied(((), ()), store.lineage):
        raise Broken(f"version {version} is found as {cells}, and {store.lineage} was committed")
    for number, entry in enumerate(store.lineage):
        before = store.lineage[number - 1].commit if number else "0"
        if entry.based_on not in ("", before):
            raise Broken(f"{entry.commit} follows {before}, and is made of a gradient that was computed on another one")
