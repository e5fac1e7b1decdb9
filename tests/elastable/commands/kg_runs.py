"""A small typed graph, a run trained on it, and its scores computed again in float64 from the run's checkpoint."""

from pathlib import Path

import numpy as np
from typer.testing import CliRunner, Result

from elastable.command import app
from elastable.embedding_store.contract.arrays import Array
from elastable.replicas.knowledge_graphs.graph_run import GraphCheckpoints

PEOPLE, PLACES = 14, 6
QUICK = ("--dim", "16", "--epochs", "12", "--batch", "32", "--learning-rate", "0.3", "--regularization", "0.001")


def write_graph(home: Path) -> Path:
    """People who know each other and live in places; everyone and everything has a type; with false triples."""
    draw = np.random.default_rng(5)
    knows = [f"person-{a}\tknows\tperson-{(a + k) % PEOPLE}" for a in range(PEOPLE) for k in (1, 2, 5)]
    lives = [f"person-{a}\tlives in\tplace-{a % PLACES}" for a in range(PEOPLE)]
    capital = [f"place-{a}\tnear\tplace-{(a + 1) % PLACES}" for a in range(PLACES)]
    lines = [*knows, *lives, *capital]
    held_out = [lines[k] for k in draw.permutation(len(knows))[:10]] + [lives[4], lives[11]]
    home.mkdir(parents=True, exist_ok=True)
    (home / "train.txt").write_text("".join(f"{line}\n" for line in lines if line not in held_out))
    for name, some in (("valid", held_out[::2]), ("test", held_out[1::2])):
        (home / f"{name}.txt").write_text("".join(f"{line}\n" for line in some))
        false = [line.rpartition("-")[0] + f"-{(int(line.rpartition('-')[2]) + 3) % PLACES}" for line in some]
        (home / f"{name}_negatives.txt").write_text("".join(f"{line}\n" for line in false))
    types = [f"person-{a}\tperson" for a in range(PEOPLE)] + [f"place-{a}\tplace" for a in range(PLACES)]
    (home / "entity_types.txt").write_text("".join(f"{line}\n" for line in types))
    return home


def elastable(*words: object) -> Result:
    """The result of a command that must succeed."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done


def trained_run(graph: Path, home: Path, *more: object) -> Path:
    elastable("kg", "train", graph, *QUICK, *more, "--run-dir", home)
    return (home / "latest").resolve()


def names_of(run: Path, kind: str = "entities") -> list[str]:
    return (run / f"{kind}.txt").read_text().splitlines()


def ids_of(run: Path, file: Path) -> Array:
    """int64 `[N, 3]`, by the names that the run saved."""
    entities, relations = names_of(run), names_of(run, "relations")
    triples = [line.split("\t") for line in file.read_text().splitlines()]
    return np.array([(entities.index(h), relations.index(r), entities.index(t)) for h, r, t in triples])


def float64_scores(run: Path, side: str, triples: Array) -> Array:
    """float64 `[N, E]`: ComplEx with reciprocal relations, every entity in place of the head or tail."""
    state = GraphCheckpoints(run / "checkpoints").best().state
    entities, relations = (complex_rows(np.asarray(state[name], np.float64)) for name in ("entities", "relations"))
    given = triples[:, 0] if side == "tail" else triples[:, 2]
    relation = triples[:, 1] + (0 if side == "tail" else len(relations) // 2)
    found: Array = ((entities[given] * relations[relation]) @ entities.conj().T).real
    return found


def complex_rows(rows: Array) -> Array:
    half = rows.shape[1] // 2
    return rows[:, :half] + 1j * rows[:, half:]
