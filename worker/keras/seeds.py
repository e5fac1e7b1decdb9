"""Seeds: of a fit, and random numbers that depend on the micro-batch, not on the process."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from keras.src.utils import rng_utils

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import BadInput
from elastable.master.backend.contract import BackendTensor, backend
from elastable.master.backend.lazy import tf

_GENERATOR = seed_generator.GLOBAL_SEED_GENERATOR


def global_seed() -> int:
    """The seed of the last `keras.utils.set_random_seed` in this process; 0 if it was never called."""
    seed = rng_utils.get_random_seed()
    return 0 if seed is None else int(seed)


def is_seeded() -> bool:
    """Whether `keras.utils.set_random_seed` was called in this process."""
    return rng_utils.get_random_seed() is not None


def global_generator() -> object:
    """Keras' global seed generator of this thread; None: nothing has drawn from it since it was seeded."""
    return global_state.get_global_attribute(_GENERATOR)


def in_stateless_scope() -> bool:
    """Whether this thread is within a `keras.StatelessScope`."""
    return global_state.get_global_attribute("stateless_scope") is not None


def stateless_values() -> list[BackendTensor]:
    """The values that variables were given in the `keras.StatelessScope` of this thread, if it is within one."""
    scope = global_state.get_global_attribute("stateless_scope")
    return [] if scope is None else list(scope.state_mapping.values())


def writes_legacy_file() -> bool:
    """Whether Keras writes an HDF5 file of the old format at this moment."""
    return bool(global_state.get_global_attribute("use_legacy_config", None))


@contextmanager
def draws_kept() -> Iterator[None]:
    """Restores all random states but those of Keras' generators after the block, which traces code of the user."""
    ours, numpy = random.getstate(), np.random.get_state()
    try:
        with backend().draws_kept():
            yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpy)


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """Every layer of a model, including nested ones, each once, in a fixed order."""
    return list(dict.fromkeys(model._flatten_layers(include_self=True, recursive=True)))


def seed_states(model: keras.Model, job_seed: int | None = None) -> list[keras.Variable]:
    """State variables (uint32 `[2]`) of the seed generators that `set_seeds` sets, in model order.

    The last one is that of Keras' global generator, which belongs to the calling thread. Without a job seed it is not
    created: Keras creates it on first use.
    """
    states = [variable for variable in model.variables if variable.name == "seed_generator_state"]
    return states if job_seed is None else [*states, seed_generator.global_seed_generator().state]


def set_seeds(states: list[keras.Variable], job_seed: int | None, micro_batch: tf.Tensor) -> None:
    """Sets generator g to a function of (job seed, g, micro-batch), so that every worker draws the same numbers for it.

    Args:
        states: From `seed_states`.
        job_seed: Seed of the job; None: the generators continue from their current state.
        micro_batch: int64 scalar tensor: number of the micro-batch within the job.
    """
    if job_seed is None:
        return
    # As of `seed_values`. A generator's second half counts its draws: leave room for 1,024 of them.
    first_draw = micro_batch * 1024
    low = tf.cast(tf.bitwise.bitwise_and(first_draw, 0xFFFFFFFF), tf.uint32)
    high = tf.cast(tf.bitwise.right_shift(first_draw, tf.constant(32, tf.int64)), tf.uint32)
    for number, state in enumerate(states):
        key = _key(job_seed, number)
        state.assign(tf.stack([tf.bitwise.bitwise_xor(tf.constant(key, tf.uint32), high), low]))


def seed_values(
    states: list[keras.Variable], job_seed: int | None, micro_batch: int
) -> list[tuple[keras.Variable, Array]]:
    """What `set_seeds` sets the generators to."""
    found: list[tuple[keras.Variable, Array]] = []
    if job_seed is None:
        return found
    first_draw = micro_batch * 1024
    for number, state in enumerate(states):
        words = [_key(job_seed, number) ^ (first_draw >> 32 & 0xFFFFFFFF), first_draw & 0xFFFFFFFF]
        found.append((state, np.array(words, np.uint32).view(keras.backend.standardize_dtype(state.dtype))))
    return found


def draw_seed(job_seed: int, micro_batch: int) -> int:
    """What the framework's own random state is seeded with, as of `seed_values`."""
    low, high = np.random.SeedSequence([job_seed & (2**64 - 1), micro_batch, 1]).generate_state(2)
    return int(high) << 32 | int(low)


def _key(job_seed: int, number: int) -> int:
    return int(np.random.SeedSequence([job_seed & (2**64 - 1), number]).generate_state(1)[0])


# The seeds of `et.fit`: what the caller says, else Keras' own


_log = logging.getLogger(__name__)

_runs: WeakKeyDictionary[keras.Model, int] = WeakKeyDictionary()
"""Model -> how many times it has been trained from epoch 0 on without a seed."""


@dataclass(frozen=True, slots=True)
class FitSeeds:
    """What is random in a fit.

    Attributes:
        order: Seed of the record order.
        rows: Seed of initial rows, where a layer has no own seed.
        keras: Whether random layers and tables draw as in plain Keras, by their own seeds and Keras' global one; False:
            by `order` and `rows`, as a job with that seed does in any number of processes.
    """

    order: int
    rows: int
    keras: bool


def fit_seeds(seed: int | None, model: keras.Model, initial_epoch: int) -> FitSeeds:
    """The seeds of a call of `et.fit`.

    Args:
        seed: What the caller gave. None: everything is drawn as in plain Keras, so that `keras.utils.set_random_seed`
            decides all of it; the order of the records differs from call to call, as in Keras, but a call with an
            `initial_epoch` goes on with the orders of the one before.

    Raises:
        BadInput: the seed is no integer.
    """
    if seed is None:
        first, before = global_seed(), _runs.get(model, -1)
        run = _runs[model] = before + 1 if initial_epoch == 0 else max(before, 0)
        words = np.random.SeedSequence((first & (2**64 - 1), run)).generate_state(1, np.uint64)
        return FitSeeds(int(words[0] >> np.uint64(1)) if run else first, first, keras=True)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise BadInput(f"seed={seed!r}: need an integer, or None")
    _warn_of_dense_draws(model, int(seed))
    return FitSeeds(int(seed), int(seed), keras=False)


def _warn_of_dense_draws(model: keras.Model, seed: int) -> None:
    """Says so where a model that is not trained yet has dense variables that are others in every process."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or int(optimizer.iterations) or is_seeded():
        return
    for layer in layers_of(model):
        unseeded = any(getattr(value, "_init_seed", 0) is None for value in vars(layer).values())  # an initializer
        if not unseeded or not variables_of(layer.weights):
            continue
        _log.warning(
            "et.fit(seed=%d) seeds initial rows, the order of the records and dropout. The weights of layer %r were "
            "drawn when the model was made: for a run that can be repeated call keras.utils.set_random_seed(%d) before "
            "that",
            seed,
            layer.name,
            seed,
        )
        return
