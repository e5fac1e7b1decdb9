"""A tier in a dictionary, which fails when a test wants it to; what is in it survives the store that wrote it."""

import copy

from elastable.embedding_store import Unavailable
from tests.embedding_store.tiers.dict_tier import DictTier, Kept


class FailingTier(DictTier):
    """Records by id, or by position."""

    def __init__(self, keeps_positions: bool = False) -> None:
        super().__init__(Kept(), self._step, keeps_positions)
        self.left: int | None = None  # steps of `DictTier` that are taken before it fails

    def copy(self) -> "FailingTier":
        other = copy.deepcopy(self)
        other.left = None
        return other

    def _step(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Unavailable("the tier fails, as the test wants")
