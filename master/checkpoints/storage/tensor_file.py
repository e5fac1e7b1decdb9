"""Tensors in the safetensors format: written without a copy, read as views of the bytes that were checked.

The format is eight bytes with the length of a JSON header, the header, and the
tensors' bytes; https://github.com/huggingface/safetensors describes it. Files
of this module are read by the safetensors library, and the other way round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import numpy as np

from elastable.embedding_store.contract.arrays import UInt8
from elastable.embedding_store.contract.malformed import MALFORMED, DocumentFields
from elastable.master.api import Tensor
from elastable.master.checkpoints.storage.checkpoint_files import Part

__all__ = ["parts_of", "tensors_in"]

_NOTE = "__metadata__"
_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {code: name for name, code in _CODES.items()}
_MOST_RANK = 64  # of NumPy's arrays


def parts_of(tensors: Mapping[str, Sequence[Tensor]], note: Mapping[str, str]) -> list[Part]:
    """The bytes of a file, for `CheckpointFiles.write`.

    Args:
        tensors: Name -> blocks of one tensor, at least one of them, in the order of
            their first axis; of one dtype and of equal shapes but for that axis.
        note: Is kept in the header.

    Raises:
        TypeError: a dtype that the format does not have.
    """
    header: dict[str, object] = {_NOTE: dict(note)}
    blocks: list[Tensor] = []
    end = 0
    # The widest first, so that each lies at a multiple of its item's size.
    for name in sorted(tensors, key=lambda key: (-tensors[key][0].dtype.itemsize, key)):
        pieces = [np.ascontiguousarray(piece).reshape(piece.shape) for piece in tensors[name]]
        code = _CODES.get(pieces[0].dtype.name)
        if code is None:
            raise TypeError(f"{name}: a checkpoint cannot hold {pieces[0].dtype}; it can hold {', '.join(_CODES)}")
        shape: list[int] = list(pieces[0].shape)
        if shape:
            shape[0] = sum(len(piece) for piece in pieces)
        begin, end = end, end + sum(piece.nbytes for piece in pieces)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        blocks += pieces
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = memoryview(len(text).to_bytes(8, "little") + text)
    return [head, *(block.reshape(-1).view(np.uint8).data for block in blocks if block.nbytes)]


def tensors_in(content: UInt8) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, views of `content` uint8 `[bytes]`, and its note.

    Raises:
        ValueError: the bytes are no such file.
    """
    if len(content) < 8:
        raise ValueError(f"{len(content)} bytes are no safetensors file")
    begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
    if begin > len(content):
        raise ValueError(f"its header of {begin - 8} bytes is longer than the file")
    try:
        header = json.loads(content[8:begin].tobytes())
        note = {str(name): str(said) for name, said in header.pop(_NOTE, {}).items()}
        return {name: _tensor(entry, content[begin:]) for name, entry in header.items()}, note
    except MALFORMED as error:
        raise ValueError(f"its header is none of safetensors: {error!r}") from error


def _tensor(entry: DocumentFields, content: UInt8) -> Tensor:
    if len(entry["shape"]) > _MOST_RANK:  # first: the product of a million lengths takes hours
        raise ValueError(f"a tensor of {len(entry['shape'])} dimensions")
    dtype, shape = _dtype(_NAMES[entry["dtype"]]), tuple(int(length) for length in entry["shape"])
    first, last = entry["data_offsets"]
    if not 0 <= first <= last <= len(content) or last - first != dtype.itemsize * math.prod(shape):
        raise ValueError(f"a tensor of {dtype} {list(shape)} cannot lie at {first}..{last} of {len(content)} bytes")
    return content[first:last].view(dtype).reshape(shape)


def _dtype(name: str) -> np.dtype[np.generic]:
    if name == "bfloat16":
        import ml_dtypes  # of TensorFlow; needed for models of this dtype only

        name = ml_dtypes.bfloat16
    dtype: np.dtype[np.generic] = np.dtype(name)
    return dtype
