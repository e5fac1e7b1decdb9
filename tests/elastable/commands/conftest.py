"""A graph of people, and the run of a training on it: one of each for every test module."""

from pathlib import Path

import pytest

from tests.elastable.commands.kg_runs import trained_run, write_graph


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_graph(tmp_path_factory.mktemp("people"))


@pytest.fixture(scope="module")
def run(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(graph, tmp_path_factory.mktemp("runs"))
