"""What is imported before the first test is left out of Python's garbage collections.

TensorFlow, Keras and twelve thousand collected tests are a million objects. A full collection visits each of them,
which takes half a second, and `keras.backend.clear_session` asks for one. What tests make is collected as ever.
"""

import gc
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects no garbage while modules are imported, and afterwards nothing of what they left."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
