"""What the processes of a schedule are started with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.chaos.links import Link
from tests.chaos.records import MICRO_BATCH, SEED
from tests.chaos.schedules import LEASE_S, Schedule
from tests.chaos.stores import filled_in, forgets, servers_of

__all__ = ["arguments_of", "store_url"]

_DEADLINE_S = 20.0  # of the product's calls: longer than any fault lasts
_MODELS = {"keras": Path(__file__).with_name("job.py"), "light": Path(__file__).with_name("light_job.py")}


def arguments_of(
    schedule: Schedule, role: str, number: int, home: Path, links: Mapping[str, Sequence[Link]], saved: int
) -> list[str]:
    """The words behind `elastable`.

    Args:
        schedule: What is run.
        role: "master", "worker" or "store".
        number: Which one of its role.
        home: The schedule's folder.
        links: By name.
        saved: The newest version in a checkpoint.
    """
    transport = ["--transport", schedule.transport]
    if role == "worker":
        address = f"127.0.0.1:{links['worker-master'][number].port}"
        model = str(_MODELS[schedule.shape.model])
        return ["worker", model, "--master", address, "--deadline", f"{_DEADLINE_S:g}", *transport]
    if role == "store":
        return ["serve", "--listen", f"127.0.0.1:{links['master-store'][0].target or 0}", *transport]
    words = ["master", str(_MODELS[schedule.shape.model]), "--listen", "127.0.0.1:0", *transport]
    words += ["--store", store_url(schedule, home, links), "--deadline", f"{_DEADLINE_S:g}", "--lease", f"{LEASE_S:g}"]
    words += ["--epochs", str(schedule.shape.epochs), "--micro-batch-size", str(MICRO_BATCH)]
    words += ["--seed", str(SEED)]
    words += ["--grads-to-wait", str(schedule.shape.grads_to_wait), "--evaluate-every", str(schedule.evaluate_every)]
    words += ["--run-dir", str(home / "runs"), "--no-export", "--checkpoint-dir", str(home / "checkpoints")]
    words += ["--checkpoint-every", str(schedule.checkpoint_every), "--keep", str(schedule.keep), "--resume"]
    words += ["--take-over"]  # a cut link hides from Redis that the master before is dead
    if not schedule.shape.lazy:
        words += ["--no-lazy"]
    if forgets(schedule.store) and not saved:
        words += ["--overwrite"]  # what a master left in the store that died before its first checkpoint
    return words


def store_url(schedule: Schedule, home: Path, links: Mapping[str, Sequence[Link]]) -> str:
    """Where the master's rows are, through its own links."""
    servers = {name: f"127.0.0.1:{links[f'master-{name}'][0].port}" for name in servers_of(schedule.store)}
    return filled_in(schedule.store, servers, str(home))
