"""Records of the chaos suite's job, and how often they were trained: what needs no TensorFlow."""

import numpy as np

from elastable.master.tasks.record_order import record_order

RECORDS = 256
VALIDATION = 48
MICRO_BATCH = 8
RATE = 0.125
BETA_1 = 0.9
MOMENTUM = 0.9
RHO = 0.9
SEED = 11
ACCUMULATOR = 0.5


def records_of(split: str) -> tuple[dict[str, object], object]:
    """Each record has an id of its own, a user, three words, and a number that depends on the last two."""
    count = RECORDS if split == "train" else VALIDATION
    random = np.random.default_rng(3 if split == "train" else 4)
    users = random.integers(0, 40, count)
    words = np.random.default_rng(5).integers(-(2**62), 2**62, 60)[random.integers(0, 60, (count, 3))]
    wanted = np.sin(users + (words % 7).sum(axis=1)).astype(np.float32)[:, np.newaxis]
    # Records of the validation split are looked up, too: ids that no record of the other has.
    own = np.arange(count) if split == "train" else RECORDS + np.arange(count)
    return {"own": own, "user": users, "words": words}, wanted


def trainings(optimizer: str, weights: np.ndarray, slots: np.ndarray, grads_to_wait: int) -> np.ndarray:
    """How often each record was trained, of its row in "counted": float64 `[n]`, exact for "sgd"; NaN for nonsense.

    Every training of a record adds the same gradient to its row, `weights` `[n, 1]` and `slots` `[n, slots]`.
    """
    gradient = 1.0 / (MICRO_BATCH * grads_to_wait)
    wide = slots.astype(np.float64)
    if optimizer == "sgd":
        return -weights[:, 0].astype(np.float64) / (RATE * gradient)
    if optimizer == "adagrad":
        return (wide[:, 0] - ACCUMULATOR) / gradient**2
    # The first moment after n equal gradients is gradient x (1 - beta_1 ** n).
    with np.errstate(invalid="ignore", divide="ignore"):
        counts: np.ndarray = np.log1p(-wide[:, 0] / gradient) / np.log(BETA_1)
    return counts


def trainings_followed(
    optimizer: str, weights: np.ndarray, slots: np.ndarray, grads_to_wait: int, epochs: int
) -> np.ndarray:
    """As `trainings`, of a whole job of rows that follow every step.

    What is left of a training's gradient depends on how many steps came after
    it. So this is what there is, as a share of what there would be had each
    record been trained once an epoch, in its place of the order.
    """
    gradient = 1.0 / (MICRO_BATCH * grads_to_wait)
    wide = slots.astype(np.float64)
    if optimizer == "momentum":
        # A row goes on by the sum of a series: wherever it is on its way, the end is the same.
        end = weights[:, 0] + wide[:, 0] * MOMENTUM / (1 - MOMENTUM)
        return -end * (1 - MOMENTUM) / (RATE * gradient)
    kept, one = (RHO, gradient**2 * (1 - RHO)) if optimizer == "rmsprop" else (BETA_1, gradient * (1 - BETA_1))
    steps = RECORDS // (MICRO_BATCH * grads_to_wait)
    expected = np.zeros(RECORDS)
    for epoch in range(epochs):
        order = record_order(RECORDS, epoch, SEED, True, None).take(0, RECORDS)
        step = epoch * steps + np.arange(RECORDS) // (MICRO_BATCH * grads_to_wait)
        expected[order] += one * kept ** (epochs * steps - 1.0 - step)
    counts: np.ndarray = wide[:, 0] / expected * epochs
    return counts
