"""Settings of a command from a file and from the environment, below its command line."""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from elastable.embedding_store.contract.malformed import UNREADABLE
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.option import OptionField

CONFIG_VARIABLE = "ELASTABLE_CONFIG"
"""Names the file of settings, as `--config` does."""

_PREFIX = "ELASTABLE_"


def variable_of(field: OptionField) -> str:
    """The environment's name of a setting: `ELASTABLE_MICRO_BATCH_SIZE` of `--micro-batch-size`."""
    return _PREFIX + key_of(field).replace("-", "_").upper()


def key_of(field: OptionField) -> str:
    """A setting's name in a file: its option without the dashes; of `MODEL.py`, which has none, `model`."""
    if field.option.positional:
        return re.split(r"[^A-Za-z-]", field.shown_name)[0].lower() or field.name
    return field.shown_name.removeprefix("--")


def take_variables(fields: Iterable[OptionField]) -> None:
    """Takes the variables of a command out of the environment: its child processes have settings of their own."""
    for name in (CONFIG_VARIABLE, *(variable_of(field) for field in fields)):
        os.environ.pop(name, None)


def load_settings(
    file: Path, command: Sequence[str], fields: Collection[OptionField], commands: Collection[str]
) -> dict[str, object]:
    """What a TOML file sets for one command.

    Keys outside of tables are settings of the command. A table `[worker]` holds settings of `elastable worker` alone,
    `[kg.train]` those of `elastable kg train`: so one file serves several commands.

    Args:
        command: Words of the command, `("kg", "train")`.
        fields: Its settings.
        commands: Words that a command may begin with.

    Returns:
        Field name -> value.

    Raises:
        BadInput: no such file, no TOML, a setting that the command does not have, or a value that it cannot have.
    """
    try:
        content = tomllib.loads(file.read_text("utf-8"))
    except UNREADABLE as error:
        raise BadInput(f"settings file {file}: {error}") from error
    by_key = {key: field for field in fields for key in {key_of(field), key_of(field).replace("-", "_"), field.name}}
    found: dict[str, object] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            if key not in commands:
                raise BadInput(f"settings file {file}: [{key}] is no command of elastable{_meant(key, commands)}")
        else:
            _take(found, f"{file}: {key}", key, value, by_key, command)
    own: object = content
    for word in command:
        own = own.get(word) if isinstance(own, dict) else None
    for key, value in own.items() if isinstance(own, dict) else ():
        if not isinstance(value, dict):
            _take(found, f"{file}: [{'.'.join(command)}] {key}", key, value, by_key, command)
    return found


def _take(
    found: dict[str, object],
    where: str,
    key: str,
    value: object,
    by_key: Mapping[str, OptionField],
    command: Sequence[str],
) -> None:
    field = by_key.get(key)
    if field is None:
        raise BadInput(f"settings file {where} is no setting of elastable {' '.join(command)}{_meant(key, by_key)}")
    if isinstance(value, list) and tuple in field.kinds:
        value = tuple(value)
    if isinstance(value, str) and Path in field.kinds:
        value = Path(value)
    if (
        value is None
        or not field.accepts(value)
        or (isinstance(value, tuple) and not all(isinstance(each, str) for each in value))
    ):
        shown = list(value) if isinstance(value, tuple) else value
        texts = json.dumps([str(each) for each in shown] if isinstance(shown, list) else [str(shown)])
        wanted = f"must be a list of strings, as {key} = {texts}" if tuple in field.kinds else field.wanted
        raise BadInput(f"settings file {where} = {shown!r}: {wanted}")
    found[field.name] = value


def _meant(key: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(key, sorted(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def words_of(field: OptionField, value: object) -> object:
    """A value of a file as the command line gives it to the parser."""
    if isinstance(value, tuple):
        return list(value) if field.option.positional else ",".join(value)
    return str(value) if isinstance(value, Path) else value
