"""`elastable worker`: a worker for a master anywhere."""

from __future__ import annotations

import logging

from elastable.commands.command_line import takes
from elastable.jobs.options import WorkerOptions
from elastable.process.quiet import import_tensorflow

__all__ = ["worker"]


@takes(WorkerOptions)
def worker(options: WorkerOptions) -> None:
    """Join a job and compute micro-batches until it ends."""
    import_tensorflow()
    from elastable.jobs.worker_process import run_worker

    counted = run_worker(options)
    logging.getLogger("elastable").info("%d micro-batches counted; the job is over", counted)
