"""`elastable worker`: a worker for a master anywhere."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from elastable.commands.arguments import Deadline, MasterAddress, Transport
from elastable.options import require_transport
from elastable.quiet import import_tensorflow

__all__ = ["worker"]


def worker(
    master: MasterAddress,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="MODEL.py", help="The model file here \\[default: the path the master names]."),
    ] = None,
    deadline: Deadline = 60.0,
    transport: Transport = "auto",
) -> None:
    """Join a job and compute micro-batches until it ends."""
    require_transport(transport)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    import_tensorflow()
    from elastable.worker_process import run_worker

    counted = run_worker(master, model, deadline, transport)
    logging.getLogger("elastable").info("%d micro-batches counted; the job is over", counted)
