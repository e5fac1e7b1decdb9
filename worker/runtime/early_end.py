"""Whether a job that hands out no more tasks has ended, or only its master."""

from __future__ import annotations

from elastable.embedding_store.errors import ElastableError
from elastable.master.api import MasterApi

__all__ = ["early_end"]


def early_end(master: MasterApi) -> str | None:
    """Why a job has ended before its last version; None: it has not, or its master is gone.

    Args:
        master: Says that no task will come again; it waits for open sessions before it goes.
    """
    try:
        status = master.status()
    except ElastableError:
        return None
    if status.state != "stopping":
        return None
    return (
        f"the master was stopped at version {status.version:,} of {status.versions_total:,}; start this worker again "
        "for the master that resumes the job"
    )
