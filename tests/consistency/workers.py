"""A worker of `tests.consistency.protocol`: it reads versions that are not logged yet, and pushes gradients."""

from collections.abc import Iterator

from tests.consistency.world import Worker, World, Writer

_LOGGING = ("connect", "send", "wait", "settle", "look")
_SERVING = (*_LOGGING, "idle")


def work(world: World, without: str) -> Iterator[World]:
    """The worlds after the next step of the worker: it joins a job, reads its version, or pushes a gradient."""
    worker = world.worker
    if worker is None:
        return
    for place, master in enumerate(world.writers):
        if master.at not in _SERVING:
            continue
        joined = worker.joined == (master.name, master.job)
        if not joined:
            yield world._replace(worker=Worker((master.name, master.job)))
        elif (newest := _newest(master)) != worker.read:
            yield world._replace(worker=worker._replace(read=newest))
        gradient = _accepted(worker, master)
        if gradient and (joined or without == "join first"):
            writers = (*world.writers[:place], master._replace(gradient=gradient), *world.writers[place + 1 :])
            yield world._replace(writers=writers)


def _newest(master: Writer) -> tuple[int, str]:
    """The version that a master's workers read: the one that it logs, or has logged last."""
    if master.at in _LOGGING and master.entry is not None:
        return master.entry.sequence, master.entry.commit
    return master.end, master.newest


def _accepted(worker: Worker, master: Writer) -> str:
    """The commit that the worker's gradient was computed on; "": the master takes none, or none of that version."""
    if worker.read is None or master.gradient or worker.read[0] != _newest(master)[0]:
        return ""
    return worker.read[1]  # a push names the version, and not its commit
