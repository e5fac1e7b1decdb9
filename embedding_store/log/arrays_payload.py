"""A payload of named fields and arrays, without a copy of the arrays.

```
offset  size  field
0       4     bytes of the fields, uint32 little-endian
4       4     0
8       n     the fields, a JSON object; `arrays` lists [dtype, shape] of each array
...     ...   the arrays, C-contiguous and little-endian, each at a multiple of 8
```
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.log.contract import Buffer

__all__ = ["Payload", "decode_payload", "encode_payload"]

_LENGTHS = struct.Struct("<II")
_DTYPES: dict[str, type[np.int64] | type[np.float32] | type[np.uint8]] = {
    "<i8": np.int64,
    "<f4": np.float32,
    "|u1": np.uint8,
}
_MAX_FIELD_BYTES = 64 << 20
_MAX_DIMS = 2
_UNREADABLE: tuple[type[Exception], ...] = (*MALFORMED, struct.error)
_Array = npt.NDArray[np.int64] | npt.NDArray[np.float32] | npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Payload:
    """What was encoded. Arrays are views of the payload."""

    fields: Mapping[str, object]
    arrays: Sequence[_Array]


def encode_payload(fields: Mapping[str, object], arrays: Sequence[_Array]) -> list[Buffer]:
    """The pieces of a payload; those of contiguous arrays are the arrays' own memory."""
    contiguous = [np.ascontiguousarray(array) for array in arrays]
    listed = [[array.dtype.str, list(array.shape)] for array in contiguous]
    text = json.dumps({**fields, "arrays": listed}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pieces: list[Buffer] = [_LENGTHS.pack(len(text), 0), text]
    for array in contiguous:
        if array.size:
            pieces.append(array.reshape(-1).view(np.uint8).data)
        if array.nbytes % 8:
            pieces.append(bytes(-array.nbytes % 8))
    return pieces


def decode_payload(payload: memoryview) -> Payload:
    """The inverse of `encode_payload`.

    Raises:
        StoreBroken: the payload is not one.
    """
    try:
        length, zero = _LENGTHS.unpack_from(payload)
        if zero or length > min(_MAX_FIELD_BYTES, len(payload)):
            raise ValueError(f"{length} bytes of fields")
        fields = json.loads(bytes(payload[_LENGTHS.size : _LENGTHS.size + length]))
        arrays = list(_arrays(payload, _LENGTHS.size + length, fields.pop("arrays")))
        return Payload(fields, arrays)
    except _UNREADABLE as error:
        raise StoreBroken(f"a log entry of {len(payload):,} bytes cannot be read: {error}") from error


def _arrays(payload: memoryview, offset: int, listed: Sequence[tuple[str, Sequence[int]]]) -> Iterator[_Array]:
    for dtype_name, shape in listed:
        dtype = np.dtype(_DTYPES[dtype_name])
        if len(shape) > _MAX_DIMS or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"an array of shape {shape}")
        count = prod(shape)
        if count * dtype.itemsize > len(payload) - offset:
            raise ValueError(f"an array of shape {shape} ends behind the entry")
        array = np.frombuffer(payload, dtype, count, offset).reshape(shape)
        yield array
        offset += -(-array.nbytes // 8) * 8
    if offset != len(payload):
        raise ValueError(f"{len(payload) - offset} bytes are left over")
