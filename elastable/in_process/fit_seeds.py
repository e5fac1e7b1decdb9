"""The seeds of `et.fit`: what the caller says, else Keras' own."""

import logging
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import keras
import numpy as np

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import BadInput
from elastable.worker.keras.seeds import global_seed, is_seeded, layers_of

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
