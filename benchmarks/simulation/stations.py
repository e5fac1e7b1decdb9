"""Where work waits for its turn: processes, and network cards."""

from collections.abc import Generator

import numpy as np
import simpy

Steps = Generator[simpy.Event, object, None]

_SLICE_S = 0.003  # of Linux' scheduler where several processes want a core


class Cores:
    """Cores that processes share in turns.

    Args:
        env: The simulation.
        count: How many; None: as many as anybody wants.
        others: Cores' worth of work that other programs ask for, at random times.
        seed: Of these times.
        crowded: What all work is multiplied by, as of `Calibration.crowded`.
    """

    def __init__(
        self, env: simpy.Environment, count: int | None, others: float = 0.0, seed: int = 0, crowded: float = 1.0
    ) -> None:
        self._crowded = crowded
        self._cores = None if count is None else simpy.Resource(env, count)
        self._env = env
        if others:
            env.process(self._keep_busy(others, np.random.default_rng(seed)))

    def work(self, seconds: float) -> Steps:
        """Has a core for so long, a slice at a time."""
        seconds *= self._crowded
        if self._cores is None:
            yield self._env.timeout(seconds)
            return
        while seconds > 0:
            with self._cores.request() as core:
                yield core
                yield self._env.timeout(min(seconds, _SLICE_S))
            seconds -= _SLICE_S

    def _keep_busy(self, others: float, random: np.random.Generator) -> Steps:
        while True:
            yield self._env.timeout(random.exponential(_SLICE_S / others))
            self._env.process(self.work(_SLICE_S))


class Station:
    """One process, or one direction of a network card: does one thing at a time, in the order of asking.

    Args:
        env: The simulation.
        cores: That it works on; None: it needs none.
        beside: The share of its work that nobody waits for.

    Attributes:
        busy_s: Seconds of work until now.
    """

    def __init__(self, env: simpy.Environment, cores: Cores | None = None, beside: float = 0.0) -> None:
        self._env, self._cores, self._beside = env, cores, beside
        self._turn = simpy.Resource(env, 1)
        self.busy_s = 0.0

    def work(self, seconds: float) -> Steps:
        """Waits for its turn, and works; what is beside takes a turn of its own, once the rest is done."""
        if seconds <= 0:
            return
        yield from self._turn_of((1 - self._beside) * seconds)
        if self._beside:
            self._env.process(self._turn_of(self._beside * seconds))

    def _turn_of(self, seconds: float) -> Steps:
        with self._turn.request() as turn:
            yield turn
            self.busy_s += seconds
            if self._cores is None:
                yield self._env.timeout(seconds)
            else:
                yield from self._cores.work(seconds)
