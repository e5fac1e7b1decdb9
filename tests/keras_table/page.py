"""docs/keras.md, written from what ran."""

import keras

from tests.keras_table import (
    callback_cases,
    compile_cases,
    fit_cases,
    layer_cases,
    micro_batch_cases,
    model_cases,
    optimizer_cases,
    weight_cases,
)
from tests.keras_table.case import Case, Different, verdict

SECTIONS: dict[str, list[Case]] = {
    "compile": compile_cases.CASES,
    "fit": fit_cases.CASES,
    "Optimizers": optimizer_cases.CASES,
    "Callbacks": callback_cases.CASES,
    "Layers": layer_cases.CASES,
    "Models": model_cases.CASES,
    "Weights": weight_cases.CASES,
    "Micro-batches": micro_batch_cases.CASES,
}
_HEAD = """# What a Keras program may say

Look up here whether a Keras program trains unchanged with its embedding tables in a store. Every row is a small
program. A test runs it twice, with plain Keras and with its tables in a store (`et.fit` with
`offload_embeddings_above=1`, or `et.Embedding`), and compares final weights, rows and history, and predictions where
it makes some. The result is one of three:

* **same numbers**: equal to 1e-5;
* **same meaning**: numbers cannot be compared, and the row says what is the same;
* **refused**: an error, with this message, before anything is trained.

Nothing else trains differently in silence: such a program fails the test. **One difference is there on purpose: ids
that a batch has several times.** Their gradients are summed before an optimizer squares or clips them, as Keras does
on JAX and PyTorch but not on TensorFlow, with which this page compares; batches of the other rows have each id once.
[lazy.md](lazy.md#ids-that-repeat-in-a-batch) says which optimizers that concerns, and how much. It also explains
`lazy=False`.

Programs are trained with `grads_to_wait=1`, a version for each batch. Those under [Micro-batches](#micro-batches)
compute each batch in two micro-batches, with `grads_to_wait=2`, and are compared with plain Keras on the whole batch
([how](model-file.md#how-losses-of-several-micro-batches-are-combined)).

`make keras-table` writes this page, with Keras {version}; an argument of a newer Keras fails the test
until it has a row.
"""


def verdicts(sections: dict[str, list[Case]]) -> tuple[dict[str, list[tuple[str, str]]], list[str]]:
    found: dict[str, list[tuple[str, str]]] = {}
    wrong = []
    for section, cases in sections.items():
        rows = found.setdefault(section, [])
        for case in cases:
            try:
                rows.append((case.name, verdict(case)))
            except Different as difference:
                wrong.append(str(difference))
            except Exception as error:  # noqa: BLE001 - reported with the others, and the page is not written
                wrong.append(f"{case.name}: {type(error).__name__}: {error}")
    return found, wrong


def page(found: dict[str, list[tuple[str, str]]]) -> str:
    parts = [_HEAD.format(version=keras.__version__)]
    for section, rows in found.items():
        lines = [f"| {name.replace('|', chr(92) + '|')} | {text} |" for name, text in rows]
        parts.append(
            "\n".join([f"## {section}", "", "| a program says | with tables in a store |", "| --- | --- |", *lines, ""])
        )
    return "\n".join(parts)
