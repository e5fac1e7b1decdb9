"""Chance in tests comes from one seed: `--seed 7`, or `--seed random`, which is printed.

Before each test, and before each fixture that several tests share, Python's, NumPy's and TensorFlow's generators are
set to a function of the seed and of its name. So a test draws the same whatever ran before it. Hypothesis follows:
its examples are a function of the test, unless the seed is random.
"""

import random
import sys
import zlib
from typing import Any

import hypothesis
import numpy as np
import pytest

_KEY = "elastable-seed"

# Kernels compile at their first call: a time limit on each example would fail on a fresh machine.
hypothesis.settings.register_profile("elastable", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("elastable-quick", deadline=None, derandomize=True, max_examples=20)
hypothesis.settings.register_profile("elastable-random", deadline=None)


def examples(count: int) -> int:
    """Of an expensive Hypothesis test: a quarter in `make test`, a tenth with `--quick`, all with a random seed."""
    profile = hypothesis.settings.default
    return max(1, count * profile.max_examples // 200) if profile is not None and profile.derandomize else count


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", default="0", help="what tests draw: a number [0], or 'random'")


def pytest_configure(config: pytest.Config) -> None:
    """Draws a random seed once, for all processes of the run."""
    given = getattr(config, "workerinput", {}).get(_KEY)  # by the process that started this one
    if given is not None:
        config.option.seed = given
    elif config.option.seed == "random":
        config.option.seed = f"random {random.SystemRandom().randrange(2**31)}"
    drawn = str(config.option.seed).startswith("random ")
    same = "elastable-quick" if config.option.quick else "elastable"
    hypothesis.settings.load_profile("elastable-random" if drawn else same)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist's: a process of the run reads the options of the command again, and would draw a seed of its own."""
    node.workerinput[_KEY] = node.config.option.seed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The seed, to run the same again: at the end, as `-q` leaves out what is printed at the beginning."""
    if str(terminalreporter.config.option.seed).startswith("random "):
        terminalreporter.write_line(f"seed: {_seed_of(terminalreporter.config)}")


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    """Before a fixture that tests share: which of them comes first must not decide what it draws."""
    if fixturedef.scope != "function":
        _begin(request.config, f"{fixturedef.baseid}/{fixturedef.argname}/{getattr(request, 'param_index', 0)}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _begin(item.config, item.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    _begin(item.config, item.nodeid)


def _seed_of(config: pytest.Config) -> int:
    return int(str(config.option.seed).rpartition(" ")[2])


def _begin(config: pytest.Config, name: str) -> None:
    seed = zlib.crc32(f"{_seed_of(config)}/{name}".encode())
    random.seed(seed)
    np.random.seed(seed)
    if "keras" in sys.modules and "tensorflow" in sys.modules:
        _begin_keras(seed)


def _begin_keras(seed: int) -> None:
    """Undoes `keras.utils.set_random_seed` of an earlier test: in a new process Keras has no seed."""
    import tensorflow as tf
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
    from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

    tf.random.set_seed(seed)
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
    global_state.set_global_attribute(GLOBAL_RANDOM_SEED, None)
