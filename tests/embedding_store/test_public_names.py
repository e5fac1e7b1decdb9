import subprocess
import sys

import pytest


@pytest.mark.process
def test_importing_is_cheap_and_never_loads_tensorflow() -> None:
    program = (
        "import sys; from elastable import embedding_store; late = {'numba', 'redis', 'grpc'} & set(sys.modules);"
        "[getattr(embedding_store, name) for name in embedding_store.__all__];"
        "print(late, {'tensorflow', 'keras'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout == "set() set()\n", ran.stderr
