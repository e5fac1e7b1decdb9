"""mpi4py's MPI, imported so that it neither starts at import nor waits at exit for members that have gone."""

import sys

import mpi4py

IMPORTED_BEFORE = "mpi4py.MPI" in sys.modules
"""Whether the program imported it first: then mpi4py ends MPI at exit, as the program's `mpi4py.rc` says."""

if not IMPORTED_BEFORE:
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False

from mpi4py import MPI as MPI  # noqa: E402 - reads mpi4py.rc
