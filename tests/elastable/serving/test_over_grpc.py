"""Predictions over gRPC: the official client, hostile messages, who may ask."""

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import keras
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor

import elastable as et
from elastable.embedding_store.wire.access.credentials import Credentials, Proof, Role, Rule, rule_of_call
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.models.predictor import Predictor
from elastable.serving.batches import MOST_WAITING
from elastable.serving.over_grpc import inference_service
from elastable.serving.service import LARGEST_BODY, PredictionService
from elastable.serving.v1 import inference_pb2 as pb
from tests.certificates import TOKEN
from tests.servers import Server

LIMIT_S = 60.0
IDS = np.random.default_rng(0).integers(0, 40, (64, 3))
NAME = "inference.GRPCInferenceService"


@pytest.fixture(scope="module")
def served(valkey_node: Server) -> Iterator[tuple[GrpcServer, PredictionService, keras.Model]]:
    url = f"{valkey_node.url}?namespace={uuid.uuid4().hex}"
    ids = keras.Input((3,), dtype="int64", name="ids")
    hidden = keras.layers.Dense(4, "relu")(et.Embedding(None, 4, combiner="mean", name="any")(ids))
    model = keras.Model(ids, keras.layers.Dense(1, name="click")(hidden), name="clicks")
    model.compile("adam", "mse")
    et.fit(model, IDS, np.ones((64, 1), np.float32), store=url, batch_size=16, verbose=0)
    with ExitStack() as held:
        found = held.enter_context(PredictionService(held.enter_context(Predictor(url)), False, 512))
        server = GrpcServer("127.0.0.1:0", [inference_service(found)], largest_message=2 * LARGEST_BODY)
        yield held.enter_context(server), found, model


@pytest.fixture
def channel(served: tuple[GrpcServer, PredictionService, keras.Model]) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served[0].address) as opened:
        yield opened


def asked(channel: grpc.Channel, message: bytes) -> tuple[grpc.StatusCode, str]:
    call = channel.unary_unary(f"/{NAME}/ModelInfer", None, pb.ModelInferResponse.FromString)
    try:
        call(message, timeout=LIMIT_S)
    except grpc.RpcError as error:
        return error.code(), str(error.details())
    return grpc.StatusCode.OK, ""


def request(shape: list[int], datatype: str = "INT64", raw: bytes | None = None, **contents: Any) -> bytes:
    given = pb.ModelInferRequest.InferInputTensor(name="ids", datatype=datatype, shape=shape)
    if contents:
        given.contents.CopyFrom(pb.InferTensorContents(**contents))
    message = pb.ModelInferRequest(model_name="clicks", inputs=[given])
    if raw is not None:
        message.raw_input_contents.append(raw)
    return message.SerializeToString()


def fields(message: Descriptor, prefix: str = "") -> dict[str, list[int]]:
    found = {f"{prefix}{message.name}.{one.name}": [one.number, one.type, one.is_repeated] for one in message.fields}
    for nested in message.nested_types:
        found |= fields(nested, f"{prefix}{message.name}.")
    return found


def test_tritons_client_talks_to_it(served: tuple[GrpcServer, PredictionService, keras.Model]) -> None:
    server, _, model = served
    program = Path(__file__).with_name("triton_client.py")
    done = subprocess.run([sys.executable, program, server.address], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ready"] == [True, True, True]
    assert told["server"] == {"name": "elastable", "version": "2"}
    assert told["model"] == {
        "name": "clicks", "versions": ["4"], "platform": "elastable",
        "inputs": [{"name": "ids", "datatype": "INT64", "shape": ["-1", "3"]}],
        "outputs": [{"name": "click", "datatype": "FP32", "shape": ["-1", "1"]}],
    }  # fmt: skip
    np.testing.assert_allclose(told["click"], model.predict(IDS, verbose=0), rtol=1e-5, atol=1e-6)
    assert (told["same"], told["said"]) == (True, ["4", "7"])
    for (status, message), (code, said) in zip(
        told["refused"],
        [
            ("NOT_FOUND", "version 9 is not here; version 4 is"),
            ("NOT_FOUND", "model 'other' is not here"),
            ("INVALID_ARGUMENT", "input 'ids' is [64, 2]; it must be [records, 3]"),
            ("INVALID_ARGUMENT", f"it has at most {LARGEST_BODY}"),
            ("INVALID_ARGUMENT", "outputs more are wanted; the model has click"),
        ],
        strict=True,
    ):
        assert code in status
        assert said in message
    ours: dict[str, list[int]] = {}
    for each in pb.DESCRIPTOR.message_types_by_name.values():
        ours |= fields(each)
    assert {name: told["fields"].get(name) for name in ours} == ours


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (request([1, 3], int64_contents=[1, 2, 3]), ""),
        (request([1, 3], "INT32", int_contents=[1, 2, 3]), ""),
        (request([1, 3], "UINT64", uint64_contents=[1, 2, 3]), ""),
        (b"\xff\xff\xff", "is no ModelInferRequest"),
        (b"\x2a\x00" * 4_000_000, "ModelInferRequest: more than 16384 entries"),
        (request([1, 3], int64_contents=[1, 2]), "has 2 values; its shape [1, 3] has 3"),
        (request([1 << 30, 1 << 30], int64_contents=[1]), "has 1 values; its shape"),
        (request([1 << 62] * 20_000, int64_contents=[1]), "of 20000 sizes; it must be a list of at most 32 integers"),
        (request([-1, 3], int64_contents=[1, 2, 3]), "shape [-1, 3]"),
        (request([1, 3], "INT9", int64_contents=[1, 2, 3]), "datatype 'INT9'; known are BOOL"),
        (request([1, 3], "INT8", int_contents=[1, 2, 300]), "out of bounds for int8"),
        (request([1, 3], "FP16"), "FP16 has no contents"),
        (request([1, 3], "BYTES", bytes_contents=[b"\xff"] * 3), "no UTF-8"),
        (request([1, 3], raw=bytes(23)), "has 23 bytes; 3 values of INT64 have 24"),
        (request([1, 3], raw=bytes(24), int64_contents=[1, 2, 3]), "with raw_input_contents every input must be there"),
        (pb.ModelInferRequest(model_name="clicks", raw_input_contents=[b"1"]).SerializeToString(), "0 inputs"),
        (pb.ModelInferRequest(model_name="clicks").SerializeToString(), "the model takes ids"),
    ],
)
def test_messages_are_answered_by_what_they_are(channel: grpc.Channel, message: bytes, said: str) -> None:
    code, details = asked(channel, message)
    assert said in details
    assert code is (grpc.StatusCode.INVALID_ARGUMENT if said else grpc.StatusCode.OK)


def test_one_more_than_may_wait_is_refused_as_exhausted(
    served: tuple[GrpcServer, PredictionService, keras.Model], channel: grpc.Channel
) -> None:
    _, found, _ = served
    with found.predictor._one:
        first = found.batches.predict({"ids": IDS[:1]})
        end = time.monotonic() + LIMIT_S
        while not first.running():
            assert time.monotonic() < end
            time.sleep(0.005)
        others = [found.batches.predict({"ids": IDS[:1]}) for _ in range(MOST_WAITING)]
        code, details = asked(channel, request([1, 3], int64_contents=[1, 2, 3]))
        assert (code, details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_WAITING} requests wait already")
    assert all(one.result(LIMIT_S)[1] == 4 for one in (first, *others))


def test_readers_may_ask_and_strangers_may_not(served: tuple[GrpcServer, PredictionService, keras.Model]) -> None:
    for call in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        assert rule_of_call(f"/{NAME}/{call.name}") == Rule(Role.READER, Proof.NONE)
    message = request([1, 3], int64_contents=[1, 2, 3])
    with (
        GrpcServer(
            "127.0.0.1:0", [inference_service(served[1])], credentials=Credentials(reader_token=TOKEN)
        ) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        assert asked(channel, message)[0] is grpc.StatusCode.UNAUTHENTICATED
        infer = channel.unary_unary(f"/{NAME}/ModelInfer", None, pb.ModelInferResponse.FromString)
        answer = infer(message, metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=LIMIT_S)
        assert answer.outputs[0].name == "click"
