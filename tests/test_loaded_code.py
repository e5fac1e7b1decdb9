"""Nothing that is loaded can run code: no module has the means, and hostile files are refused before theirs runs."""

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.evaluation import read_triple_candidates
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import KnowledgeGraph, load_graph

ROOT = Path(__file__).parent.parent
PACKAGES = ("embedding_store", "master", "worker", "replicas", "elastable")
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
MODEL_FILE = ROOT / "worker" / "user_model" / "model_file.py"  # runs the file that the user names, and nothing else
UNPICKLING = {"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle", "code", "codeop"}
RUNNING = {"eval", "exec", "compile", "__import__"}
UNSAFE_METHODS = {"enable_unsafe_deserialization", "read_pickle", "unsafe_load", "full_load"}


def means_to_run_code(tree: ast.AST) -> Iterator[str]:
    """What in a module could run code that is in a file or message."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.partition(".")[0] in UNPICKLING)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNPICKLING:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _in_call(node)


def _in_call(call: ast.Call) -> Iterator[str]:
    words = {word.arg: word.value for word in call.keywords}
    if isinstance(call.func, ast.Name) and call.func.id in RUNNING:
        yield call.func.id
    if isinstance(call.func, ast.Attribute):
        module = ast.unparse(call.func.value) if call.func.attr == "load" else ""
        if call.func.attr in UNSAFE_METHODS or module in ("torch", "yaml", "numpy"):
            yield ast.unparse(call.func)
        if module == "np" and "allow_pickle" not in words:
            yield "np.load without allow_pickle=False"
    for word in ("allow_pickle", "safe_mode"):
        safe = word == "safe_mode"
        if word in words and getattr(words[word], "value", None) is not safe:
            yield f"{word}={ast.unparse(words[word])}"


def test_no_module_has_the_means_to_run_what_it_loads() -> None:
    found = {(path, means) for path in MODULES for means in means_to_run_code(ast.parse(path.read_text()))}
    assert found == {(MODEL_FILE, "exec"), (MODEL_FILE, "compile")}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from marshal import loads",
        "eval(text)",
        "np.load(file)",
        "np.load(file, allow_pickle=True)",
        "keras.saving.load_model(file, safe_mode=False)",
        "keras.config.enable_unsafe_deserialization()",
        "pd.read_pickle(file)",
        "torch.load(file)",
    ],
)
def test_such_means_would_be_found(line: str) -> None:
    assert list(means_to_run_code(ast.parse(line)))


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What the payload makes; it would do so where NumPy may unpickle."""
    mark, proof = tmp_path / "it-ran", tmp_path / "proof.npy"
    np.save(proof, np.array([Payload(mark)], object), allow_pickle=True)
    np.load(proof, allow_pickle=True)
    mark.rmdir()
    return mark


@pytest.mark.parametrize(
    ("file", "load"),
    [
        ("train.npz", lambda file: load_graph(f"ogb:{file.parent}")),
        (
            "candidates.npz",
            lambda file: read_triple_candidates(file, cast(KnowledgeGraph, None)),
        ),  # it is not asked for
    ],
)
def test_object_arrays_are_refused_by_name_and_never_unpickled(
    tmp_path: Path, mark: Path, file: str, load: Callable[[Path], object]
) -> None:
    hostile = np.array([Payload(mark)], object)
    names = ("head", "relation", "tail", "head_neg", "tail_neg", "format", "seed", "shards", "shard_of")
    np.savez(tmp_path / file, **dict.fromkeys(names, hostile))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=rf"(?s){file}.*allow_pickle=False"):
        load(tmp_path / file)
    assert not mark.exists()


def saved_lambda(mark: Path) -> dict[str, object]:
    """The config of a layer that runs Python code which the file brings."""
    text = f"__import__('os').mkdir({str(mark)!r}) or x"
    made = keras.layers.Lambda(eval(f"lambda x: {text}"), output_shape=(2,))
    config: dict[str, object] = keras.saving.serialize_keras_object(made)
    return config


@pytest.mark.parametrize("where", ["layer", "initializer", "optimizer"])
def test_a_model_that_brings_code_is_refused(tmp_path: Path, mark: Path, where: str) -> None:
    file = tmp_path / "hostile.keras"
    ids = keras.Input((3,), dtype="int64")
    layer = et.DistributedEmbedding(
        {
            "ids": et.FeatureConfig(
                "ids", et.TableConfig("t", 10, 2, initializer="ones", optimizer="sgd"), (None, 3), (None, 2)
            )
        }
    )
    hostile = saved_lambda(mark)
    honest = et.DistributedEmbedding.get_config

    def config_of(self: et.DistributedEmbedding) -> dict[str, object]:
        config = honest(self)
        config["tables"][0][where] = hostile  # type: ignore[index]
        return config

    with pytest.MonkeyPatch.context() as patch:
        if where == "layer":
            outputs = keras.layers.Lambda(lambda x: x)(layer({"ids": ids})["ids"])
        else:
            patch.setattr(et.DistributedEmbedding, "get_config", config_of)
            outputs = layer({"ids": ids})["ids"]
        keras.Model(ids, outputs).save(file)
    with pytest.raises((ValueError, TypeError), match=r"(?i)lambda.*(unsafe|arbitrary|safe_mode)"):
        keras.saving.load_model(file)
    assert not mark.exists()


def test_a_model_that_names_a_class_of_another_module_is_refused(tmp_path: Path) -> None:
    config = keras.saving.serialize_keras_object(keras.layers.Dense(2))
    for module, name in (
        ("os", "system"),
        ("subprocess", "Popen"),
        ("builtins", "exec"),
        ("elastable.launch.launch", "Launch"),
    ):
        hostile = {
            **config,
            "module": module,
            "class_name": name,
            "registered_name": name,
            "config": {"args": ["true"]},
        }
        with pytest.raises((TypeError, ValueError), match=rf"(?s){name}"):
            keras.saving.deserialize_keras_object(hostile)
