"""`elastable worker`: a worker for a master anywhere."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from elastable.commands.arguments import Deadline, MasterAddress, Transport
from elastable.jobs.options import require_transport
from elastable.process.quiet import import_tensorflow

__all__ = ["worker"]


def worker(
    master: MasterAddress,
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL.py", help="The file that the master runs, here.", show_default=False)
    ] = None,
    trust_master: Annotated[
        bool,
        typer.Option(
            "--trust-master", help="Run whatever file of this machine the master names: gives it this account."
        ),
    ] = False,
    deadline: Deadline = 60.0,
    transport: Transport = "auto",
) -> None:
    """Join a job and compute micro-batches until it ends."""
    require_transport(transport)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    import_tensorflow()
    from elastable.jobs.worker_process import run_worker

    counted = run_worker(master, model, deadline, transport, trust_master)
    logging.getLogger("elastable").info("%d micro-batches counted; the job is over", counted)
