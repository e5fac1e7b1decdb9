"""What `pip install elastable` leaves out, and the extra that brings it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from elastable.embedding_store.errors import NotInstalled

EXTRAS = {
    "tensorflow": ("TensorFlow (unless KERAS_BACKEND is jax or torch)", "keras"),
    "jax": ("JAX", "jax"),
    "torch": ("PyTorch", "torch"),
    "keras": ("Keras", "model"),
    "dns": ("dnspython", "dns"),
    "pyarrow": ("pyarrow", "model"),
    "tensorboard": ("TensorBoard", "model"),
    "matplotlib": ("matplotlib", "model"),
    "ml_dtypes": ("ml_dtypes", "model"),
    "mpi4py": ("mpi4py", "replicas"),
    "opentelemetry": ("OpenTelemetry", "traces"),
    "prometheus_client": ("prometheus-client", "monitoring"),
    "pythonjsonlogger": ("python-json-logger", "monitoring"),
    "ray": ("Ray", "ray"),
    "starlette": ("Starlette", "monitoring"),
    "uvicorn": ("Uvicorn", "monitoring"),
}
"""Package that is imported -> its name, and the extra of `elastable` that installs it; "model": that of a backend."""


_NAMESPACES = ("opentelemetry",)  # packages that several libraries share: one of them may be there, and others not


def not_installed(error: BaseException, what: str, extra: str | None = None) -> NotInstalled | None:
    """The error that says which extra to install, where an import failed for want of it; None of any other error.

    Args:
        error: What was raised.
        what: That needs the library, as the subject of a sentence.
        extra: Brings all that it needs; None: the extra that brings the library.
    """
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    top, _, _ = error.name.partition(".")
    name = top if top in _NAMESPACES else error.name
    if name not in EXTRAS:
        return None
    library, brings_it = EXTRAS[name]
    if brings_it == "model":
        brings_it = {"jax": "jax", "torch": "torch"}.get(os.environ.get("KERAS_BACKEND", ""), "keras")
    return NotInstalled(
        f'{what} needs {library}, which is not installed: pip install "elastable[{extra or brings_it}]"'
    )


@contextmanager
def needs(what: str, extra: str | None = None) -> Iterator[None]:
    """Around imports of what an extra brings: one that is not installed becomes `NotInstalled`.

    Args:
        what, extra: As of `not_installed`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = not_installed(error, what, extra)
        if missing is None:
            raise
        raise missing from error
