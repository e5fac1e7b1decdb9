"""Triton's gRPC client against a server at sys.argv[1]; what it was told, as JSON.

A program of its own: the client brings the protocol's messages, too, and a process has one of each name.
"""

import json
import sys
from collections.abc import Callable

import numpy as np
import tritonclient.grpc as triton
from google.protobuf.descriptor import Descriptor
from tritonclient.grpc import service_pb2


def fields(message: Descriptor, prefix: str = "") -> dict[str, list[int]]:
    """Number, type and repetition of the fields of a message, and of those within it."""
    found = {f"{prefix}{message.name}.{one.name}": [one.number, one.type, one.is_repeated] for one in message.fields}
    for nested in message.nested_types:
        found |= fields(nested, f"{prefix}{message.name}.")
    return found


def refused(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except triton.InferenceServerException as error:
        return [str(error.status()), str(error.message())]
    return ["", ""]


def tensor(ids: np.ndarray, datatype: str = "INT64") -> triton.InferInput:
    given = triton.InferInput("ids", list(ids.shape), datatype)
    given.set_data_from_numpy(ids)
    return given


def main() -> None:
    ids = np.random.default_rng(0).integers(0, 40, (64, 3))
    with triton.InferenceServerClient(sys.argv[1]) as client:
        found = client.infer("clicks", [tensor(ids)], request_id="7")
        named = client.infer("clicks", [tensor(ids)], outputs=[triton.InferRequestedOutput("click")])
        told = {
            "ready": [client.is_server_live(), client.is_server_ready(), client.is_model_ready("clicks", "4")],
            "server": client.get_server_metadata(as_json=True),
            "model": client.get_model_metadata("clicks", as_json=True),
            "click": found.as_numpy("click").tolist(),
            "same": bool((found.as_numpy("click") == named.as_numpy("click")).all()),
            "said": [found.get_response().model_version, found.get_response().id],
            "refused": [
                refused(lambda: client.infer("clicks", [tensor(ids)], model_version="9")),
                refused(lambda: client.infer("other", [tensor(ids)])),
                refused(lambda: client.infer("clicks", [tensor(ids[:, :2])])),
                refused(lambda: client.infer("clicks", [tensor(np.zeros((700_000, 3), np.int64))])),
                refused(lambda: client.infer("clicks", [tensor(ids)], outputs=[triton.InferRequestedOutput("more")])),
            ],
        }
        told["fields"] = {}
        for message in service_pb2.DESCRIPTOR.message_types_by_name.values():
            told["fields"] |= fields(message)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
