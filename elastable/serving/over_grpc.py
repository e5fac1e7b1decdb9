"""The Open Inference Protocol over gRPC."""

import time

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.wire.messages.frames import refuse_many_entries
from elastable.embedding_store.wire.server.grpc_server import Service
from elastable.embedding_store.wire.server.handlers import Later, handlers_of
from elastable.serving.batches import Prediction
from elastable.serving.protocols import message_reply, message_request, metadata
from elastable.serving.service import LARGEST_BODY, PredictionService
from elastable.serving.v1 import inference_pb2 as pb


def inference_service(predictions: PredictionService) -> Service:
    """`inference.GRPCInferenceService`, of what `predictions` answers."""
    name = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
    handlers = handlers_of(name, _Calls(predictions))
    return Service(name, handlers, waiting=frozenset({"ModelInfer"}), not_ready=predictions.why_not_ready)


class _Calls:
    """The calls, decoded and encoded."""

    def __init__(self, predictions: PredictionService) -> None:
        self._predictions, self._predictor = predictions, predictions.predictor

    def server_live(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    def server_metadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="elastable", version="2")

    def server_ready(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._predictions.why_not_ready() is None)

    def model_ready(self, request: pb.ModelReadyRequest, context: grpc.ServicerContext) -> pb.ModelReadyResponse:
        self._require(request.name, request.version, self._predictor.version, context)
        return pb.ModelReadyResponse(ready=self._predictions.why_not_ready() is None)

    def model_metadata(
        self, request: pb.ModelMetadataRequest, context: grpc.ServicerContext
    ) -> pb.ModelMetadataResponse:
        it = self._predictor
        self._require(request.name, request.version, it.version, context)
        return ParseDict(metadata(it.name, it.version, it.inputs, it.outputs), pb.ModelMetadataResponse())

    def model_infer(self, message: bytes, context: grpc.ServicerContext) -> Later[Prediction]:
        began, it = time.monotonic(), self._predictor
        if len(message) > LARGEST_BODY:
            raise BadInput(f"a request of {len(message)} bytes; it has at most {LARGEST_BODY}")
        refuse_many_entries(message, "ModelInferRequest")
        try:
            asked = pb.ModelInferRequest.FromString(message)
        except DecodeError as error:
            raise BadInput(f"a message of {len(message)} bytes is no ModelInferRequest: {error}") from error
        self._require(asked.model_name, "", it.version, context)
        request = message_request(asked)

        def reply(found: Prediction) -> pb.ModelInferResponse:
            outputs, version = found
            self._require(it.name, asked.model_version, version, context)
            answer = message_reply(request, it.name, version, it.outputs, outputs)
            self._predictions.seconds.add("grpc", time.monotonic() - began)
            return answer

        return Later(self._predictions.batches.predict(request.x), reply)

    def _require(self, name: str, wanted: str, version: int, context: grpc.ServicerContext) -> None:
        if name != self._predictor.name:
            context.abort(grpc.StatusCode.NOT_FOUND, f"model {name!r} is not here; {self._predictor.name!r} is")
        if wanted not in ("", str(version)):
            context.abort(grpc.StatusCode.NOT_FOUND, f"version {wanted} is not here; version {version} is")
