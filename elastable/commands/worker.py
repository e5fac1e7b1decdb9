"""`elastable worker`: a worker for a master anywhere."""

from __future__ import annotations

import logging
import os

from elastable.commands.command_line import takes
from elastable.jobs.options import WorkerOptions
from elastable.process.child import when_parent_ends
from elastable.process.exit_codes import ExitCode
from elastable.process.quiet import import_tensorflow

__all__ = ["worker"]


@takes(WorkerOptions)
def worker(options: WorkerOptions) -> None:
    """Join a job and compute micro-batches until it ends."""
    when_parent_ends(_leave_at_once)
    import_tensorflow()
    from elastable.jobs.worker_process import run_worker

    counted = run_worker(options)
    logging.getLogger("elastable").info("%d micro-batches counted; the job is over", counted)


def _leave_at_once() -> None:
    """A local worker's master is gone, and the next one starts workers of its own: there is nobody to tell."""
    logging.getLogger("elastable").warning("the master that started this worker has ended")
    os._exit(ExitCode.JOB_FAILED)
