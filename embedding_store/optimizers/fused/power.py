"""Powers of decay rates, the same on every machine."""

from __future__ import annotations

import numpy as np

__all__ = ["adam_rate", "float32_power"]

_ONE = np.float32(1)


def float32_power(base: float, exponent: int) -> np.float32:
    """float32 `base ** exponent`, base rounded to float32 first, as Keras' `ops.power`.

    Taken in double precision and rounded once: float32 library powers differ
    between machines, and `1 - beta_2 ** t` magnifies their last bit.
    """
    return np.float32(float(np.float32(base)) ** exponent)


def adam_rate(beta_1: float, beta_2: float, step: int, rate: np.float32) -> np.float32:
    """float32 `rate sqrt(1 - beta_2^t) / (1 - beta_1^t)`, t = step + 1: the learning rate, corrected for bias."""
    powers = float32_power(beta_1, step + 1), float32_power(beta_2, step + 1)
    corrected: np.float32 = rate * np.sqrt(_ONE - powers[1]) / (_ONE - powers[0])
    return corrected
