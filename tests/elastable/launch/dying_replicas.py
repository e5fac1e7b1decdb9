"""Replicas of which one after another is killed; `test_replicas` starts them: `... DIR`."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np

from elastable.embedding_store.errors import Unavailable
from elastable.replicas.groups.group import CommGroup
from elastable.replicas.groups.mpi_group import MpiGroup
from elastable.replicas.groups.world import world_communicator

DEADLINE_S = 100.0


def survive(alive: list[int], victim: int) -> str:
    """The error that this member gets as `victim` is killed."""
    comm = world_communicator(DEADLINE_S)
    group = MpiGroup.of(comm, alive, DEADLINE_S)
    part = group.subgroup(CommGroup("consecutive", 2)) if len(alive) == 4 else group
    if comm.rank == victim:
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        for _ in range(1_000_000 if alive.index(victim) in part.ranks else 10):
            part.all_to_all(np.zeros((part.size, 200_000)))
        group.barrier()
    except Unavailable as error:
        group.leave(str(error))
        return str(error)
    return "nothing"


def main(home: Path) -> None:
    """Rank 3 dies while all exchange in pairs, then ranks 0 and 2; rank 1 stays."""
    alive, messages = [0, 1, 2, 3], list[str]()
    rank = world_communicator(DEADLINE_S).rank
    for victim in (3, 0, 2):
        (home / f"{rank}.json").write_text(json.dumps(messages))
        messages.append(survive(alive, victim))
        alive.remove(victim)
    (home / f"{rank}.json").write_text(json.dumps(messages))
    print("alone")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
