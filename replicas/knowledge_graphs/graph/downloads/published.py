"""Published graphs: where their files are, which checksums these have, and how many triples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.downloads.fetch import Checksum

__all__ = ["PUBLISHED_GRAPHS", "PublishedFile", "PublishedGraph", "published_graph"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A file of a graph.

    Attributes:
        name: Its name at the source, and in the folder.
        checksum: What it must have; None: nobody has published one.
        most_bytes: Bytes that it may have.
    """

    name: str
    checksum: Checksum | None = None
    most_bytes: int = 64 * _MIB


@dataclass(frozen=True, slots=True)
class PublishedGraph:
    """A graph that can be downloaded.

    Attributes:
        name: Its name.
        url: Folder of the files, with a slash at the end.
        files: All files.
        entities, relations: How many names all splits have together, as its paper says.
        train, valid, test: How many triples.
        terms: Licence and paper, for people.
    """

    name: str
    url: str
    files: tuple[PublishedFile, ...]
    entities: int
    relations: int
    train: int
    valid: int
    test: int
    terms: str


def _files(algorithm: str, **digits: str) -> tuple[PublishedFile, ...]:
    return tuple(PublishedFile(f"{name}.txt", Checksum(algorithm, each)) for name, each in digits.items())


_ROTATE = "https://raw.githubusercontent.com/DeepGraphLearning/KnowledgeGraphEmbedding/master/data/"
_CODEX = "https://raw.githubusercontent.com/tsafavi/codex/master/data/triples/"
_CODEX_TERMS = "MIT; Safavi and Koutra, 2020"
_SPLITS = tuple(PublishedFile(f"{split}.txt") for split in ("train", "valid", "test"))

_GRAPHS = (
    PublishedGraph(
        "fb15k-237",
        f"{_ROTATE}FB15k-237/",
        _files(
            "md5",
            train="c05b87b9ac00f41901e016a2092d7837",
            valid="6a94efd530e5f43fcf84f50bc6d37b69",
            test="f5bdf63db39f455dec0ed259bb6f8628",
        ),
        entities=14_541, relations=237, train=272_115, valid=17_535, test=20_466,
        terms="CC BY 2.5 (Freebase); Toutanova and Chen, 2015",
    ),
    PublishedGraph(
        "wn18rr",
        f"{_ROTATE}wn18rr/",
        _files(
            "sha256",
            train="038612e783c215ee5f3ca9fbfca27b8d0739be1028fe4ee7c174aecf0b83d5df",
            valid="453ce7202afa58094a04d2b1560ee2b02660f1c260b32ce6651c8ccedd1028ab",
            test="0383bceaaa1096cf3c03ec021ed0048068e2355dbfc0239b292cefdac821cec5",
        ),
        entities=40_943, relations=11, train=86_835, valid=3_034, test=3_134,
        terms="WordNet 3.0 licence; Dettmers et al., 2018",
    ),
    PublishedGraph(
        "codex-s",
        f"{_CODEX}codex-s/",
        _files(
            "sha256",
            train="64f93b7f314f3936a6f65739721429db3f6a7c8f5a1e1104ec3bb544f7434f59",
            valid="3831c0e57daef03c3a18cdd1a72e370b496f696c5218883d35c7d2ab8a6a772c",
            test="27127fcb34688c4778e88a39ef3c9b540807da846021e9d9685660ac1838aca1",
            valid_negatives="c1d84860d6ee786419f1f118d0e9479c6614283b3e267afc158734389036901f",
            test_negatives="d3fb32c41f3be26d09484ace571965806f1ade0ca712551b0de684c283cdbb22",
        ),
        entities=2_034, relations=42, train=32_888, valid=1_827, test=1_828, terms=_CODEX_TERMS,
    ),
    PublishedGraph(
        "codex-m", f"{_CODEX}codex-m/", _SPLITS,
        entities=17_050, relations=51, train=185_584, valid=10_310, test=10_311, terms=_CODEX_TERMS,
    ),
    PublishedGraph(
        "codex-l", f"{_CODEX}codex-l/", _SPLITS,
        entities=77_951, relations=69, train=551_193, valid=30_622, test=30_622, terms=_CODEX_TERMS,
    ),
)  # fmt: skip

PUBLISHED_GRAPHS: Mapping[str, PublishedGraph] = MappingProxyType({graph.name: graph for graph in _GRAPHS})
"""Graphs by name."""


def published_graph(name: str) -> PublishedGraph:
    """A graph by its name, in any case. Raises BadInput where there is none; names those there are."""
    found = PUBLISHED_GRAPHS.get(name.lower())
    if found is None:
        raise BadInput(f"graph {name!r}: known are {', '.join(PUBLISHED_GRAPHS)}")
    return found
