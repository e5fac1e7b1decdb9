"""The job of `deploy/slurm`, with `mpiexec` in the place of `srun`: there is no Slurm here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.elastable.conftest import JOB, Trained
from tests.elastable.processes import CLICK_JOB

FILE = Path(__file__).parents[4] / "deploy" / "slurm" / "train.sbatch"
#: Starts the tasks that --ntasks says on this host, whichever node they are for.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
  if [[ $1 == --ntasks=* ]]; then tasks=${1#--ntasks=}; fi
  shift
done
exec mpiexec -n "$tasks" "$@"
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(900)
def test_it_trains_to_the_bits_of_local_processes(tmp_path: Path, trained: Trained) -> None:
    stand_ins = {
        "srun": SRUN,
        "scontrol": '#!/bin/bash\n[ "$*" = "show hostnames node[1]" ] && echo 127.0.0.1\n',
        "elastable": f'#!/bin/bash\nexec {sys.executable} -m elastable "$@"\n',
    }
    for name, script in stand_ins.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(FILE.parents[2]),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1]",
        "SLURM_NTASKS": "2",
    }
    command = ["bash", str(FILE), str(CLICK_JOB), *JOB, "--no-export"]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    trained.require_same_numbers(tmp_path / "runs" / str(os.getpid()) / "ckpt-0000000040")
    assert len(FILE.read_text().splitlines()) <= 20
