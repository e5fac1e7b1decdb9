"""What the processes of a schedule are started with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from elastable.embedding_store.support.store_url import SERVERS
from tests.chaos.links import Link
from tests.chaos.records import MICRO_BATCH, SEED
from tests.chaos.schedules import LEASE_S, Schedule
from tests.chaos.stores import PRIMARY_AND_REPLICA, filled_in, forgets, redis_of, shard_store

__all__ = ["arguments_of"]

_DEADLINE_S = 20.0  # of the product's calls: longer than any fault lasts
_MODELS = {"keras": Path(__file__).with_name("job.py"), "light": Path(__file__).with_name("light_job.py")}


def arguments_of(
    schedule: Schedule,
    role: str,
    number: int,
    home: Path,
    links: Mapping[str, Sequence[Link]],
    addresses: Mapping[str, str],
    saved: int,
) -> list[str]:
    """The words behind `elastable`.

    Args:
        schedule: What is run.
        role: "master", "worker", "store" or "shard".
        number: Which one of its role.
        home: The schedule's folder.
        links: By name.
        addresses: Of servers, by name, through the master's links.
        saved: The newest version in a checkpoint.
    """
    transport = ["--transport", schedule.transport]
    if role == "worker":
        address = f"127.0.0.1:{links['worker-master'][number].port}"
        model = str(_MODELS[schedule.shape.model])
        return ["worker", model, "--master", address, "--deadline", f"{_DEADLINE_S:g}", *transport]
    if role == "store":
        return ["serve", "--listen", f"127.0.0.1:{links['master-store'][0].target or 0}", *transport]
    if role == "shard":
        listen = f"127.0.0.1:{links[f'master-shard{number}'][0].target or 0}"
        return ["store", "--listen", listen, "--store", shard_store(schedule.store, number, str(home)), *transport]
    words = ["master", str(_MODELS[schedule.shape.model]), "--listen", "127.0.0.1:0", *transport]
    store = filled_in(schedule.store, addresses, str(home))
    words += ["--stores", store.removeprefix(SERVERS)] if store.startswith(SERVERS) else ["--store", store]
    words += ["--deadline", f"{_DEADLINE_S:g}", "--lease", f"{LEASE_S:g}", "--mode", schedule.shape.mode]
    words += ["--epochs", str(schedule.shape.epochs), "--micro-batch-size", str(MICRO_BATCH)]
    words += ["--seed", str(SEED)]
    words += ["--grads-to-wait", str(schedule.shape.grads_to_wait), "--evaluate-every", str(schedule.evaluate_every)]
    words += ["--run-dir", str(home / "runs"), "--no-export", "--checkpoint-dir", str(home / "checkpoints")]
    words += ["--checkpoint-every", str(schedule.checkpoint_every), "--keep", str(schedule.keep), "--resume"]
    words += ["--take-over"]  # a cut link hides from Redis that the master before is dead
    if not schedule.shape.lazy:
        words += ["--no-lazy"]
    fails_over = redis_of(schedule.store) == PRIMARY_AND_REPLICA
    if (forgets(schedule.store) or fails_over) and not saved:
        words += ["--overwrite"]  # what a master left in the store that died before its first checkpoint
    return words
