"""A model as its Keras configuration: what a version of a job says of its model, and the model made of that again."""

import base64
import json
import logging
import zlib
from collections.abc import Iterator, Mapping

import keras
import numpy as np

from elastable.embedding_store.contract.malformed import MALFORMED, DocumentFields
from elastable.embedding_store.errors import CheckpointError, ModelError
from elastable.worker.keras.seeds import layers_of

_log = logging.getLogger(__name__)

_HINT = "name the model file, too (--model-file MODEL.py)"
_UNREADABLE: tuple[type[Exception], ...] = (*MALFORMED, zlib.error)
_MOST_WORDS = 10_000  # that layers have learned: every version of a job holds its configuration
_LARGEST = 16 << 20  # bytes of JSON: an array in a layer's configuration is not what a version is for


def config_of(model: keras.Model) -> str:
    """The configuration of a compiled model, as `JobSpec.model_config` has it; "": Keras cannot write it."""
    try:
        found = keras.saving.serialize_keras_object(model)
        _add_words(found, _learned_words(model))
        said = json.dumps(found).encode()
    except Exception as error:  # noqa: BLE001 - get_config of the user's classes may raise anything
        named = getattr(model, "name", model)
        _log.info("model %r has no configuration (%s): it is served with its model file", named, error)
        return ""
    if len(said) > _LARGEST:
        _log.info("the configuration of model %r has %d bytes: it is served with its model file", model.name, len(said))
        return ""
    return base64.b64encode(zlib.compress(said, 9)).decode()


def _lookups(model: keras.Model) -> list[keras.Layer]:
    """Layers whose words are not in their configuration: what they learn by `adapt()` Keras keeps in files alone."""
    lookups = [layer for layer in layers_of(model) if hasattr(layer, "get_vocabulary")]
    return [layer for layer in lookups if layer.get_config().get("vocabulary", "") is None]


def _learned_words(model: keras.Model) -> dict[str, list[object]]:
    """Layer -> what it has learned; empty: it is too much, or not words alone."""
    lookups = _lookups(model)
    if any(layer.get_config().get("output_mode") == "tf_idf" for layer in lookups):
        return {}
    words = {each.name: np.asarray(each.get_vocabulary(include_special_tokens=False)).tolist() for each in lookups}
    return words if sum(map(len, words.values())) <= _MOST_WORDS else {}


def _add_words(said: object, words: Mapping[str, list[object]]) -> None:
    if isinstance(said, dict):
        config = said.get("config")
        if isinstance(config, dict) and config.get("vocabulary", "") is None:
            config["vocabulary"] = words.get(str(config.get("name")))
    for each in said.values() if isinstance(said, dict) else said if isinstance(said, list) else ():
        _add_words(each, words)


def refuse_other_words(before: str, now: str) -> None:
    """Refuses a model whose layers number words, or the bounds of bins, otherwise than those of their name before.

    Args:
        before, now: As `config_of` gives them; "": nothing is known, and nothing refused.

    Raises:
        CheckpointError: with the layer. Words may come behind those that it had.
    """
    then = dict(_numbered(_unpacked(before))) if before and now else {}
    for name, found in _numbered(_unpacked(now)) if then else ():
        had = then.get(name, [])
        if found[: len(had)] != had:
            raise CheckpointError(
                f"layer {name!r} numbers other words or bins than it did, so that rows would be of others: give it "
                "those that it had and new words behind them (vocabulary=, bin_boundaries=), without adapt() on others"
            )


def _numbered(said: object) -> Iterator[tuple[str, list[object]]]:
    if isinstance(said, dict):
        for key in ("vocabulary", "bin_boundaries"):
            if isinstance(found := said.get(key), list):
                yield str(said.get("name")), found
    for each in said.values() if isinstance(said, dict) else said if isinstance(said, list) else ():
        yield from _numbered(each)


def own_names(config: str) -> list[str]:
    """Classes and functions that a configuration of `config_of` names, and that another process would not know."""
    return list(_own(_unpacked(config)))


def _own(said: object) -> Iterator[str]:
    if isinstance(said, dict):
        if "class_name" in said and "registered_name" in said:
            home = str(said.get("module"))
            if said["class_name"] == "function":
                try:
                    home = keras.saving.deserialize_keras_object(said, safe_mode=True).__module__
                except Exception:  # noqa: BLE001 - Keras does not know it
                    home = ""
            if home.split(".")[0] not in ("keras", "elastable", "keras_rs"):
                yield str(said["config"] if said["class_name"] == "function" else said["class_name"])
                return
        code = said["value"] if said.keys() == {"value"} else None
        if (isinstance(code, list) and code and isinstance(code[0], str)) or said.get("class_name") == "__lambda__":
            yield "a lambda"
            return
    for each in said.values() if isinstance(said, dict) else said if isinstance(said, list) else ():
        yield from _own(each)


def same_model(one: DocumentFields, other: DocumentFields) -> bool:
    """Whether two jobs have one model, however it is compiled."""
    if any(one.get(name) != other.get(name) for name in ("model_sha256", "offload_above", "on_worker")):
        return False
    configs = one.get("model_config"), other.get("model_config")
    if configs[0] == configs[1]:
        return True
    layers = [{**_unpacked(str(each or "")), "compile_config": None} for each in configs]
    return layers[0] == layers[1]


def model_of(config: str) -> keras.Model:
    """The compiled model of a configuration that `config_of` gave, with new weights.

    Nothing of the configuration is run: Lambda layers are refused by Keras.

    Raises:
        ModelError: there is none, it is malformed, or it names classes and functions of the user's.
    """
    said = _unpacked(config)
    try:
        model = keras.saving.deserialize_keras_object(said, safe_mode=True)
    except Exception as error:
        raise ModelError(f"the version's model cannot be made of its configuration alone ({error}); {_HINT}") from error
    if not isinstance(model, keras.Model):
        raise ModelError(f"the version's model is a {type(model).__name__}, and no keras.Model")
    if lacking := _lookups(model):
        raise ModelError(
            f"layer {lacking[0].name!r} has learned by adapt() what the version does not hold (it holds up to "
            f"{_MOST_WORDS:,} words in all); {_HINT}"
        )
    return model


def _unpacked(config: str) -> dict[str, object]:
    if not config:
        raise ModelError(f"the version names no model: its class has no configuration for Keras; {_HINT}")
    try:
        unpacked = zlib.decompressobj()
        said: dict[str, object] = dict(
            json.loads(unpacked.decompress(base64.b64decode(config, validate=True), _LARGEST))
        )
    except _UNREADABLE as error:
        raise ModelError(f"the version's model is no configuration of Keras: {error}") from error
    return said
