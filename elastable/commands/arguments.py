"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["CheckpointPath", "Deadline", "Insecure", "MasterAddress", "ModelPath", "Split", "Transport"]

ModelPath = Annotated[Path, typer.Argument(metavar="MODEL.py", help="Model file: defines model() and data(split).")]
MasterAddress = Annotated[
    str,
    typer.Option(
        "--master", metavar="HOST:PORT[,...]", help="Address of the master; several if it may restart at another one."
    ),
]
Deadline = Annotated[
    float, typer.Option("--deadline", metavar="SECONDS", help="Give up on an unreachable server after this long.")
]
CheckpointPath = Annotated[
    str, typer.Option("--checkpoint", metavar="DIR|URL", help="A checkpoint, or a directory of them (the newest).")
]
Transport = Annotated[
    str,
    typer.Option(
        "--transport", help="How workers read rows: auto (the master's shared memory, or gRPC), grpc, or shared."
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Listen beyond this host without TLS or a token: whoever reaches the port may do what it serves.",
    ),
]
Split = Annotated[str, typer.Option("--split", help="Which split to use: train or validation.")]
