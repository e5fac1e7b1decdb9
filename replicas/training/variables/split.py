"""The balanced split of a tensor's elements into equal buffers: arithmetic only, no communication."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.errors import BadInput

Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class VariableSplit:
    """How the elements of a tensor, in C order, are divided.

    Sizes differ by at most 1 and longer parts come first, like those of
    `numpy.array_split`. Every part is stored in a buffer of the longest part's length, padded
    at its end (PopART's replicated tensor sharding; ZeRO, Rajbhandari et al. 2020).

    Attributes:
        elements: Elements of the tensor, at least 1.
        parts: Number of parts, at least 1.

    Raises:
        BadInput: a number below 1.
    """

    elements: int
    parts: int

    def __post_init__(self) -> None:
        for name in ("elements", "parts"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} of a split must be at least 1, got {getattr(self, name)}")

    @property
    def length(self) -> int:
        """Elements of a buffer: `ceil(elements / parts)`."""
        return -(-self.elements // self.parts)

    def bounds(self, part: int) -> tuple[int, int]:
        """(first, last + 1) element of a part. Raises BadInput if there is no such part."""
        if not 0 <= part < self.parts:
            raise BadInput(f"there is no part {part}; the parts are 0 to {self.parts - 1}")
        short, longer = divmod(self.elements, self.parts)
        first = part * short + min(part, longer)
        return first, first + short + (part < longer)

    def take(self, part: int, tensor: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """The buffer `[length]` of one part of a tensor of any shape: a copy, padded with zeros."""
        first, last = self.bounds(part)
        buffer = np.zeros(self.length, tensor.dtype)
        buffer[: last - first] = tensor.reshape(-1)[first:last]
        return buffer

    def put(self, tensor: npt.NDArray[Number], rows: npt.NDArray[Number]) -> None:
        """Writes the buffers of all parts of a tensor, padding included, into `rows` `[parts, >= length]`."""
        flat = tensor.reshape(-1)
        short, longer = divmod(self.elements, self.parts)
        end = longer * self.length
        rows[:longer, : self.length] = flat[:end].reshape(longer, self.length)
        rows[longer:, :short] = flat[end:].reshape(self.parts - longer, short)
        rows[longer:, short : self.length] = 0

    def join(self, rows: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """The elements `[elements]` in order, without padding, from `rows` `[parts, length]`; a copy."""
        short, longer = divmod(self.elements, self.parts)
        flat = np.empty(self.elements, rows.dtype)
        end = longer * self.length
        flat[:end] = rows[:longer].reshape(-1)
        flat[end:].reshape(self.parts - longer, short)[:] = rows[longer:, :short]
        return flat
