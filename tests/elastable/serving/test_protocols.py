"""What is read of requests, and what is refused before anything is made of it."""

import json
import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.errors import BadInput
from elastable.models.predictor import TensorSignature
from elastable.serving.protocols import infer_reply, infer_request, predict_reply, predict_request

INPUTS = [TensorSignature("ids", "int64", (2,)), TensorSignature("age", "float32", ())]
ONE = INPUTS[:1]
OUTPUTS = [TensorSignature("click", "float32", (1,)), TensorSignature("said", "string", ())]
FOUND = {"click": np.array([[0.25], [0.5]], np.float32), "said": np.array(["a", "\u00e9"], object)}


def infer(*inputs: dict[str, object], rest: bytes = b"", **more: object) -> tuple[bytes, int | None]:
    head = json.dumps({"inputs": list(inputs), **more}).encode()
    return head + rest, len(head) if rest else None


def tensor(name: str = "ids", datatype: str = "INT64", shape: object = (1, 2), **more: object) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": shape, **more}


@pytest.mark.parametrize("data", [[1, 2], [[1, 2]]])
def test_tensors_in_json_are_read_flat_or_nested(data: object) -> None:
    asked = infer_request(*infer(tensor(data=data), id="7"))
    np.testing.assert_array_equal(asked.x["ids"], [[1, 2]])
    assert (asked.id, asked.binary, asked.outputs) == ("7", False, {})


@pytest.mark.parametrize(
    ("datatype", "data"), [("UINT64", [2**64 - 1, 0]), ("UINT8", [255, 0]), ("FP32", [3.4028235e38, -1])]
)
def test_the_largest_numbers_of_a_datatype_are_read(datatype: str, data: list[float]) -> None:
    assert infer_request(*infer(tensor(datatype=datatype, data=data))).x["ids"].tolist() == [data]


@pytest.mark.parametrize(
    ("datatype", "array"),
    [
        ("INT64", np.array([[2**62, -1]])),
        ("UINT8", np.array([[0, 255]], np.uint8)),
        ("FP32", np.array([[0.5, -1]], np.float32)),
        ("BOOL", np.array([[True, False]])),
    ],
)
def test_tensors_in_bytes_are_read(datatype: str, array: np.ndarray) -> None:
    given = tensor(datatype=datatype, parameters={"binary_data_size": array.nbytes})
    asked = infer_request(*infer(given, rest=array.tobytes()))
    np.testing.assert_array_equal(asked.x["ids"], array)


@pytest.mark.parametrize("several", [False, True])
def test_large_bodies_are_read_and_written_as_small_ones(several: bool) -> None:
    """These by pieces, so that other threads run meanwhile."""
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, (5_500, 2))
    ages = np.random.default_rng(1).random(len(ids)).astype(np.float32)
    records = [{"ids": row, "age": age} for row, age in zip(ids.tolist(), ages.tolist(), strict=True)]
    x, by_record = predict_request(json.dumps({"instances": records}).encode(), INPUTS)
    np.testing.assert_array_equal(x["ids"], ids)
    np.testing.assert_array_equal(x["age"].astype(np.float32), ages)
    assert by_record
    found: dict[str, np.ndarray] = {"ids": ids, "age": ages} if several else {"ids": ids}
    plain = {name: array.tolist() for name, array in found.items()}
    assert json.loads(predict_reply(found, by_record=True)) == {"predictions": records if several else ids.tolist()}
    assert json.loads(predict_reply(found, by_record=False)) == {"outputs": plain if several else ids.tolist()}


def test_strings_in_bytes_are_read() -> None:
    texts = [b"", "\u00e9".encode(), b"x" * 300]
    rest = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    given = tensor(datatype="BYTES", shape=[3], parameters={"binary_data_size": len(rest)})
    assert infer_request(*infer(given, rest=rest)).x["ids"].tolist() == [text.decode() for text in texts]


@pytest.mark.parametrize(
    ("body", "header", "said"),
    [
        (b"", None, "no JSON"),
        (b"[]", None, "must be a JSON object"),
        (b"{}", None, "'inputs' must be a list"),
        (b"[" * 100_000, None, "no JSON"),
        (b'{"inputs": [' + b"{}," * (1 << 18), None, "has 262146 lists and objects; at most 262144 are read"),
        (b'{"inputs": [1]}', None, "'inputs' must be a list of objects"),
        (b'{"inputs": []}', 99, "the body has 14 bytes"),
        (b'{"inputs": []}more', 14, "4 bytes follow"),
        (b'{"inputs": [], "parameters": 3}', None, "'parameters' must be an object"),
        (b'{"inputs": [{}]}', None, r"inputs\[0\]: 'name' must be a string"),
        (*infer(tensor()), "neither data nor"),
        (*infer(tensor(datatype="INT65", data=[1, 2])), "datatype 'INT65'"),
        (*infer(tensor(shape=[1, -2], data=[1, 2])), "shape"),
        (*infer(tensor(shape=[1, 2**30], data=[1, 2])), "2 values"),
        (
            *infer(tensor(shape=[1, 2**31], data=[1, 2])),
            r"'ids': shape \[1, 2147483648\].* integers from 0 to 2147483647",
        ),
        (*infer(tensor(shape=[0, 10**30], data=[])), "'ids': shape .*000\\] of 2 sizes; it must be"),
        (*infer(tensor(shape=[1] * 33, data=[1])), "shape .* of 33 sizes; it must be a list of at most 32"),
        (*infer(tensor(shape=[0, *[2**31 - 1] * 9], data=[])), "'ids': shape .* too big"),
        (*infer(tensor(shape=[9] * 200_000, data=[1])), "of 200000 sizes"),
        (*infer(tensor(shape=[10**4000] * 2, data=[1])), "of 2 sizes"),
        (*infer(tensor(shape=[True, 2], data=[1, 2])), "shape"),
        (*infer(tensor(shape=[3], data=[1, 2])), "2 values; its shape"),
        (*infer(tensor(data=[[1], [1, 2]])), "'ids'"),
        (*infer(tensor(data=[1, "2"])), "not all numbers"),
        (*infer(tensor(data=[1, None])), "not all numbers"),
        (*infer(tensor(data=[1, 2**70])), "'ids'"),
        (*infer(tensor(datatype="UINT8", data=[1, 300])), "'ids': Python integer 300 out of bounds for uint8"),
        (*infer(tensor(datatype="INT8", data=[1.0, 128.0])), "'ids': 128.0 is out of bounds for int8"),
        (*infer(tensor(datatype="FP32", data=[1, 1e39])), r"'ids': 1e\+39 is out of bounds for float32"),
        (*infer(tensor(datatype="FP16", data=[1, 70_000])), "'ids': 70000.0 is out of bounds for float16"),
        (*infer(tensor(data=[1, 2]), tensor(data=[1, 2])), "twice"),
        (*infer(tensor(parameters={"binary_data_size": 8}), rest=b"12345678"), "2 values of INT64 have 16"),
        (*infer(tensor(parameters={"binary_data_size": 64}), rest=b"12345678"), "8 bytes are left"),
        (*infer(tensor(parameters={"binary_data_size": "8"}), rest=b"12345678"), "binary_data_size is '8'"),
        (*infer(tensor("a", "BYTES", [1], parameters={"binary_data_size": 8}), rest=b"\xff\xff\xff\x7fabcd"), "beyond"),
        (*infer(tensor("a", "BYTES", [1], parameters={"binary_data_size": 5}), rest=b"\x01\0\0\0\xff"), "no UTF-8"),
    ],
)
def test_malformed_requests_are_refused(body: bytes, header: int | None, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        infer_request(body, header)


@given(st.binary(max_size=200), st.none() | st.integers(0, 200))
def test_whatever_comes_is_read_or_refused(body: bytes, header: int | None) -> None:
    for read in (lambda: infer_request(body, header), lambda: predict_request(body, INPUTS)):
        with suppress(BadInput):
            read()


def test_one_long_string_does_not_make_all_long() -> None:
    texts = ["x" * 1_000_000, *["y"] * 20_000]
    body = json.dumps({"inputs": {"ids": texts, "age": [1.0]}}).encode()
    found, _ = predict_request(body, INPUTS)
    assert found["ids"].nbytes < 1 << 20


def test_replies_are_in_json_or_in_bytes() -> None:
    asked = infer_request(*infer(tensor(data=[1, 2]), id="a"))
    body, header = infer_reply(asked, "m", 7, OUTPUTS, FOUND)
    assert header is None
    assert json.loads(body) == {
        "model_name": "m",
        "model_version": "7",
        "id": "a",
        "outputs": [
            {"name": "click", "datatype": "FP32", "shape": [2, 1], "data": [0.25, 0.5]},
            {"name": "said", "datatype": "BYTES", "shape": [2], "data": ["a", "\u00e9"]},
        ],
    }
    wanted = [{"name": "said", "parameters": {"binary_data": True}}, {"name": "click"}]
    body, header = infer_reply(infer_request(*infer(outputs=wanted)), "m", 7, OUTPUTS, FOUND)
    head = json.loads(body[:header])
    assert [each["name"] for each in head["outputs"]] == ["said", "click"]
    assert head["outputs"][0]["parameters"] == {"binary_data_size": 11}
    assert body[header:] == b"\x01\0\0\0a\x02\0\0\0\xc3\xa9"
    with pytest.raises(BadInput, match="outputs other are wanted"):
        infer_reply(infer_request(*infer(outputs=[{"name": "other"}])), "m", 7, OUTPUTS, FOUND)


def test_records_or_columns() -> None:
    by_record, rows = predict_request(
        b'{"instances": [{"ids": [1, 2], "age": 3}, {"ids": [4, 5], "age": 6.5}]}', INPUTS
    )
    by_column, columns = predict_request(b'{"inputs": {"ids": [[1, 2], [4, 5]], "age": [3, 6.5]}}', INPUTS)
    assert (rows, columns) == (True, False)
    for name in ("ids", "age"):
        np.testing.assert_array_equal(by_record[name], by_column[name])
    for body in (b'{"instances": [[1, 2]]}', b'{"inputs": [[1, 2]]}', b'{"inputs": {"ids": [[1, 2]]}}'):
        np.testing.assert_array_equal(predict_request(body, ONE)[0]["ids"], [[1, 2]])
    assert json.loads(predict_reply(FOUND, True)) == {
        "predictions": [{"click": [0.25], "said": "a"}, {"click": [0.5], "said": "\u00e9"}]
    }
    assert json.loads(predict_reply({"click": FOUND["click"]}, True)) == {"predictions": [[0.25], [0.5]]}
    assert json.loads(predict_reply({"click": FOUND["click"]}, False)) == {"outputs": [[0.25], [0.5]]}
    assert json.loads(predict_reply(FOUND, False))["outputs"]["said"] == ["a", "\u00e9"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{}", "either 'instances'"),
        (b'{"instances": [1], "inputs": [1]}', "either 'instances'"),
        (
            b'{"instances": [1], "signature_name": "other"}',
            "'signature_name' is 'other'; the model has 'serving_default'",
        ),
        (b'{"instances": [1], "signature_name": ["x"]}', r"'signature_name' is \['x'\]"),
        (b'{"instances": [{"age": 1e39, "ids": [1, 2]}]}', r"'age': 1e\+39 is out of bounds for float32"),
        (b'{"instances": []}', "at least 1 record"),
        (b'{"instances": {"ids": 1}}', "must be a list"),
        (b'{"instances": [{"ids": 1}, {"age": 1}]}', "every record"),
        (b'{"instances": [{"ids": 1}, 2]}', "every record"),
        (b'{"instances": [[1, 2]]}', "the model has 2 inputs"),
        (b'{"inputs": {"ids": [[1], [1, 2]]}}', "'ids'"),
        (b'{"inputs": {"ids": ' + b"[" * 33 + b"1" + b"]" * 33 + b"}}", "'ids': lists 33 deep or deeper; at most 32"),
        (b'{"inputs": {"ids": ' + b"[" * 100 + b"1" + b"]" * 100 + b"}}", "'ids': lists 64 deep or deeper"),
    ],
)
def test_malformed_records_are_refused(body: bytes, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        predict_request(body, INPUTS)
