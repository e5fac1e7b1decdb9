"""Requests and replies of the Open Inference Protocol (v2, REST and gRPC) and of TensorFlow Serving's `:predict`.

The first with its binary tensors, as Triton's clients send them. Shapes and sizes are checked before anything is made.
"""

import json
import math
import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.errors import BadInput
from elastable.models.predictor import TensorSignature
from elastable.serving.v1.inference_pb2 import ModelInferRequest, ModelInferResponse

_DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32", "float64": "FP64",
    "string": "BYTES",
}  # fmt: skip
_DTYPES = {said: dtype for dtype, said in _DATATYPES.items()}
_MOST_DIMENSIONS = 32  # that all of NumPy takes
_LARGEST_SIZE = (1 << 31) - 1
_MOST_PARTS = 1 << 18  # lists and objects of a request in JSON: three bytes that are one take a hundred or more
_AT_ONCE = 1_000  # records that are written by one call
_SIGNATURE = "serving_default"  # TensorFlow Serving's name of what a model predicts


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request of the Open Inference Protocol.

    Attributes:
        id: Of the request, which the reply repeats; "": it has none.
        x: Inputs by name.
        outputs: Name -> whether it is wanted as bytes; empty: all outputs, as `binary` says.
        binary: Whether outputs are wanted as bytes that do not say it themselves.
    """

    id: str
    x: Mapping[str, Array]
    outputs: Mapping[str, bool] = field(default_factory=dict)
    binary: bool = False


def infer_request(body: bytes, header_bytes: int | None) -> InferRequest:
    """Reads the body of an inference request.

    Args:
        header_bytes: Length of its JSON, which the bytes of tensors follow (the header `Inference-Header-Content-
            Length`); None: it is all JSON.

    Raises:
        BadInput: it is malformed; names the field.
    """
    if header_bytes is not None and not 0 <= header_bytes <= len(body):
        raise BadInput(f"Inference-Header-Content-Length is {header_bytes}; the body has {len(body)} bytes")
    said = _object(body if header_bytes is None else body[:header_bytes], "the request")
    rest = memoryview(b"" if header_bytes is None else body)[header_bytes or 0 :]
    x: dict[str, Array] = {}
    for place, given in enumerate(_list(said, "inputs")):
        name = _text(given, "name", f"inputs[{place}]")
        if name in x:
            raise BadInput(f"input {name!r} is given twice")
        x[name], rest = _tensor(given, name, rest)
    if len(rest):
        raise BadInput(f"{len(rest)} bytes follow the tensors that the request names")
    outputs = {}
    for place, wanted in enumerate(_list(said, "outputs") if "outputs" in said else []):
        outputs[_text(wanted, "name", f"outputs[{place}]")] = _parameters(wanted).get("binary_data", False) is True
    binary = _parameters(said).get("binary_data_output", False) is True
    return InferRequest(_text(said, "id", "the request") if "id" in said else "", x, outputs, binary)


def infer_reply(
    request: InferRequest, model: str, version: int, signatures: Sequence[TensorSignature], found: Mapping[str, Array]
) -> tuple[bytes, int | None]:
    """The body of the reply, and the length of its JSON where bytes of tensors follow it.

    Raises:
        BadInput: an output is wanted that the model does not have.
    """
    said, parts = [], []
    for name, datatype, array in _wanted(request, signatures, found):
        tensor: dict[str, object] = {"name": name, "datatype": datatype, "shape": list(array.shape)}
        if request.outputs.get(name, False) or request.binary:
            parts.append(_as_bytes(array))
            tensor["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            tensor["data"] = _plain(array.reshape(-1))
        said.append(tensor)
    reply: dict[str, object] = {"model_name": model, "model_version": str(version), "outputs": said}
    if request.id:
        reply["id"] = request.id
    head = json.dumps(reply).encode()
    return b"".join((head, *parts)), len(head) if parts else None


_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


def message_request(asked: ModelInferRequest) -> InferRequest:
    """The same of a message of gRPC, whose outputs are bytes. Raises `BadInput`, which names the field."""
    raw, x = list(asked.raw_input_contents), dict[str, Array]()
    if raw and len(raw) != len(asked.inputs):
        raise BadInput(f"raw_input_contents has {len(raw)} entries, and the request {len(asked.inputs)} inputs")
    for place, given in enumerate(asked.inputs):
        where, datatype, shape = f"input {given.name!r}", given.datatype, list(given.shape)
        if given.name in x:
            raise BadInput(f"{where} is given twice")
        count = _count(datatype, shape, where)
        if raw:
            if given.HasField("contents"):
                raise BadInput(f"{where} is in contents; with raw_input_contents every input must be there")
            array = _from_bytes(memoryview(raw[place]), datatype, count, where)
        elif datatype not in _CONTENTS:
            raise BadInput(f"{where}: {datatype} has no contents; send it in raw_input_contents")
        else:
            array = _from_contents(getattr(given.contents, _CONTENTS[datatype]), datatype, where)
        x[given.name] = _shaped(array, shape, where)
    return InferRequest(asked.id, x, {each.name: True for each in asked.outputs}, True)


def message_reply(
    request: InferRequest, model: str, version: int, signatures: Sequence[TensorSignature], found: Mapping[str, Array]
) -> ModelInferResponse:
    """The reply to it, as `infer_reply`."""
    reply = ModelInferResponse(model_name=model, model_version=str(version), id=request.id)
    for name, datatype, array in _wanted(request, signatures, found):
        reply.outputs.add(name=name, datatype=datatype, shape=array.shape)
        reply.raw_output_contents.append(_as_bytes(array))
    return reply


def _wanted(
    request: InferRequest, signatures: Sequence[TensorSignature], found: Mapping[str, Array]
) -> list[tuple[str, str, Array]]:
    """Name, datatype and values of each output that a request asks for."""
    if unknown := set(request.outputs) - set(found):
        raise BadInput(f"outputs {', '.join(sorted(unknown))} are wanted; the model has {', '.join(found)}")
    datatypes = {each.name: _DATATYPES[each.dtype] for each in signatures}
    return [(name, datatypes[name], found[name]) for name in request.outputs or found]


def predict_request(body: bytes, inputs: Sequence[TensorSignature]) -> tuple[Mapping[str, Array], bool]:
    """Reads the body of a `:predict` request: inputs by name, and whether it is by records ("instances").

    Raises:
        BadInput: it is malformed; names the field.
    """
    said = _object(body, "the request")
    if (signature := said.get("signature_name", "")) not in ("", _SIGNATURE):
        raise BadInput(f"'signature_name' is {reprlib.repr(signature)}; the model has {_SIGNATURE!r}")
    rows, columns = said.get("instances"), said.get("inputs")
    if (rows is None) == (columns is None):
        raise BadInput("a request has either 'instances' (a list of records) or 'inputs' (a list for each input)")
    dtypes = {each.name: each.dtype for each in inputs}
    if rows is not None:
        if not isinstance(rows, list) or not rows:
            raise BadInput("'instances' must be a list of at least 1 record")
        if isinstance(rows[0], dict) and set(rows[0]) != {"b64"}:
            names = set(rows[0])
            if any(not isinstance(row, dict) or set(row) != names for row in rows):
                raise BadInput(f"'instances': every record must be an object with {', '.join(sorted(names))}")
            return {name: _array([row[name] for row in rows], dtypes.get(name, ""), name) for name in rows[0]}, True
        columns = rows
    if not isinstance(columns, dict):
        if len(inputs) != 1:
            raise BadInput(f"the model has {len(inputs)} inputs: give each by name, {', '.join(dtypes)}")
        columns = {inputs[0].name: columns}
    return {name: _array(values, dtypes.get(name, ""), name) for name, values in columns.items()}, rows is not None


def predict_reply(found: Mapping[str, Array], by_record: bool) -> bytes:
    """The body of the reply: `predictions` by record, or `outputs`; of a model with one output without its name."""
    plain = {name: _plain(array) for name, array in found.items()}
    if len(plain) == 1:
        return b'{"%s": %s}' % (b"predictions" if by_record else b"outputs", _listed(next(iter(plain.values()))))
    if not by_record:
        named = (b"%s: %s" % (json.dumps(name).encode(), _listed(values)) for name, values in plain.items())
        return b'{"outputs": {%s}}' % b", ".join(named)
    records = zip(*plain.values(), strict=True)
    return b'{"predictions": %s}' % _listed([dict(zip(plain, values, strict=True)) for values in records])


def _listed(values: Sequence[object]) -> bytes:
    """A list in JSON, by pieces: between two of them another thread may go on."""
    pieces = (json.dumps(values[at : at + _AT_ONCE])[1:-1] for at in range(0, len(values), _AT_ONCE))
    return f"[{', '.join(pieces)}]".encode()


def held_version(body: bytes) -> int | None:
    """The version that is to be held, `{"version": V}`; None, for `null`: none. Raises `BadInput`."""
    version = _object(body, "the request").get("version", "")
    if version is not None and (type(version) is not int or version < 0):
        raise BadInput("'version' must be a version to hold, or null to free the one that is held")
    return version


def metadata(
    model: str, version: int, inputs: Sequence[TensorSignature], outputs: Sequence[TensorSignature]
) -> dict[str, object]:
    """What the Open Inference Protocol says of a model."""
    return {
        "name": model,
        "versions": [str(version)],
        "platform": "elastable",
        "inputs": [_described(each) for each in inputs],
        "outputs": [_described(each) for each in outputs],
    }


def _described(each: TensorSignature) -> dict[str, object]:
    shape = [-1, *(-1 if size is None else size for size in each.shape)]
    return {"name": each.name, "datatype": _DATATYPES[each.dtype], "shape": shape}


def _tensor(given: object, name: str, rest: memoryview) -> tuple[Array, memoryview]:
    """A tensor of a request, and the bytes that follow it."""
    where = f"input {name!r}"
    assert isinstance(given, dict)
    datatype, shape = _text(given, "datatype", where), given.get("shape")
    if not isinstance(shape, list):
        raise BadInput(f"{where}: shape {reprlib.repr(shape)}; it must be a list of integers from 0 on")
    count = _count(datatype, shape, where)
    size = _parameters(given).get("binary_data_size")
    if size is None:
        if "data" not in given:
            raise BadInput(f"{where} has neither data nor a parameter binary_data_size")
        array = _array(given["data"], _DTYPES[datatype], name)
    else:
        if type(size) is not int or not 0 <= size <= len(rest):
            raise BadInput(f"{where}: binary_data_size is {size!r}; {len(rest)} bytes are left")
        array, rest = _from_bytes(rest[:size], datatype, count, where), rest[size:]
    return _shaped(array, shape, where), rest


def _count(datatype: str, shape: Sequence[int], where: str) -> int:
    """The values of a tensor whose datatype and shape may be so."""
    if datatype not in _DTYPES:
        raise BadInput(f"{where}: datatype {datatype!r}; known are {', '.join(_DTYPES)}")
    if len(shape) > _MOST_DIMENSIONS or any(type(size) is not int or not 0 <= size <= _LARGEST_SIZE for size in shape):
        raise BadInput(
            f"{where}: shape {reprlib.repr(shape)} of {len(shape)} sizes; it must be a list of at most "
            f"{_MOST_DIMENSIONS} integers from 0 to {_LARGEST_SIZE}"
        )
    return math.prod(shape)


def _shaped(array: Array, shape: Sequence[int], where: str) -> Array:
    if array.size != math.prod(shape):
        raise BadInput(f"{where} has {array.size} values; its shape {shape} has {math.prod(shape)}")
    try:
        return array.reshape(shape)
    except ValueError as error:  # sizes beside a 0 may be too large together
        raise BadInput(f"{where}: shape {shape}: {error}") from error


def _from_bytes(given: memoryview, datatype: str, count: int, where: str) -> Array:
    if datatype != "BYTES":
        dtype = np.dtype(_DTYPES[datatype]).newbyteorder("<")
        if len(given) != count * dtype.itemsize:
            raise BadInput(
                f"{where} has {len(given)} bytes; {count} values of {datatype} have {count * dtype.itemsize}"
            )
        return np.frombuffer(given, dtype)
    texts, at = [], 0
    while at < len(given):
        if at + 4 > len(given) or (end := at + 4 + struct.unpack_from("<I", given, at)[0]) > len(given):
            raise BadInput(f"{where}: a string goes beyond its {len(given)} bytes")
        texts.append(bytes(given[at + 4 : end]))
        at = end
    return _texts(texts, where)


def _from_contents(values: Sequence[Any], datatype: str, where: str) -> Array:
    if datatype == "BYTES":
        return _texts(values, where)
    try:
        return np.array(list(values), _DTYPES[datatype])  # of the field itself NumPy would cut what does not fit
    except OverflowError as error:
        raise BadInput(f"{where}: {error}") from error


def _as_bytes(array: Array) -> bytes:
    if array.dtype.kind in "SUO":
        texts = (text if isinstance(text, bytes) else str(text).encode() for text in array.reshape(-1))
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def _array(values: object, dtype: str, name: str) -> Array:
    """Values in JSON as an array: numbers, text as objects.

    Not by NumPy's own choice: it would give every string the room of the longest, and take text for numbers.
    """
    try:
        array = np.array(values, object)
        if array.ndim > _MOST_DIMENSIONS:
            raise ValueError(f"lists {array.ndim} deep or deeper; at most {_MOST_DIMENSIONS} are read")
        kinds = {type(each) for each in array.flat}
        if kinds <= {bool}:
            return array.astype(np.bool_)
        if kinds <= {int} and "float" not in dtype:
            bits = dtype == "bool" and set(array.flat) <= {0, 1}
            return array.astype(dtype if bits or "int" in dtype else np.int64)
        if kinds <= {int, float}:
            return _within(array.astype(np.float64), dtype)
    except (ValueError, OverflowError) as error:
        raise BadInput(f"input {name!r}: {error}") from error
    if kinds != {str}:
        raise BadInput(f"input {name!r}: its values are not all numbers, or all strings, in lists of one length")
    return array


def _within(numbers: Array, dtype: str) -> Array:
    """The numbers. Raises `OverflowError` for one that would be another number, or infinite, as an integer or float."""
    if "float" in dtype:
        with np.errstate(over="ignore"):
            beyond = np.isinf(numbers.astype(dtype)) & np.isfinite(numbers)
    elif "int" in dtype:
        beyond = (numbers < np.iinfo(dtype).min) | (numbers > np.iinfo(dtype).max)
    else:
        return numbers
    if beyond.any():
        raise OverflowError(f"{numbers[beyond][0]} is out of bounds for {dtype}")
    return numbers


def _texts(texts: Sequence[bytes], where: str) -> Array:
    try:
        return np.array([text.decode() for text in texts], object)
    except UnicodeDecodeError as error:
        raise BadInput(f"{where}: a string is no UTF-8") from error


def _plain(array: Array) -> list[object]:
    if array.dtype.kind in "SO":
        texts = [each.decode() if isinstance(each, bytes) else str(each) for each in array.reshape(-1)]
        array = np.array(texts, object).reshape(array.shape)
    values: list[object] = array.tolist()
    return values


def _object(body: bytes, what: str) -> dict[str, object]:
    if (parts := body.count(b"[") + body.count(b"{")) > _MOST_PARTS:
        raise BadInput(f"{what} has {parts} lists and objects; at most {_MOST_PARTS} are read")
    try:
        said = json.loads(body)
    except MALFORMED as error:
        raise BadInput(f"{what} is no JSON: {error}") from error
    if not isinstance(said, dict):
        raise BadInput(f"{what} must be a JSON object")
    return said


def _list(said: Mapping[str, object], name: str) -> list[dict[str, object]]:
    found = said.get(name)
    if not isinstance(found, list) or any(not isinstance(each, dict) for each in found):
        raise BadInput(f"{name!r} must be a list of objects")
    return found


def _text(said: Mapping[str, object], name: str, where: str) -> str:
    found = said.get(name)
    if not isinstance(found, str):
        raise BadInput(f"{where}: {name!r} must be a string")
    return found


def _parameters(said: Mapping[str, object]) -> Mapping[str, object]:
    found = said.get("parameters", {})
    if not isinstance(found, dict):
        raise BadInput("'parameters' must be an object")
    return found
