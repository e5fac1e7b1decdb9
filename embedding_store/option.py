"""Settings defined once: a field of a frozen dataclass carries its help, its bounds and its name on the command line.

    @dataclass(frozen=True, slots=True) class TrainOptions:
        epochs: int = setting(1, Option("Passes over the training data.", at_least=1))

        def __post_init__(self) -> None:
            check_options(self)

The command line is made from the same fields (`elastable.commands.command_line`), and so are the words that start a
child process with the same settings (`command_words`).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from elastable.embedding_store.errors import BadInput

T = TypeVar("T")
_OPTION = "option"


@dataclass(frozen=True, slots=True)
class Option:
    """What a setting means and which values it may have.

    Attributes:
        help: One sentence for `--help`.
        flags: Its names on the command line; (): the field's name. A flag that switches off follows a slash.
        group: Heading under which `--help` lists it.
        metavar: Stands for the value in `--help`: its unit or its form.
        choices: The values it may have; (): any.
        at_least: The smallest value.
        above: The value must be greater.
        unset: What the default None means.
        positional: Whether it is an argument and not an option.
    """

    help: str
    flags: tuple[str, ...] = ()
    group: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    at_least: int | None = None
    above: int | None = None
    unset: str | None = None
    positional: bool = False


@dataclass(frozen=True, slots=True)
class OptionField:
    """One field of a config dataclass.

    Attributes:
        name: Of the field.
        kinds: The types that its value may have; `tuple` and `list` hold strings.
        option: What it means.
        default: Its value where nobody sets it; `dataclasses.MISSING`: it must be set.
    """

    name: str
    kinds: tuple[type, ...]
    option: Option
    default: object

    @property
    def flags(self) -> tuple[str, ...]:
        """Names on the command line."""
        name = self.name.replace("_", "-")
        switch = f"--{name}/--no-{name}" if bool in self.kinds and self.default is not False else f"--{name}"
        return self.option.flags or (switch,)

    @property
    def shown_name(self) -> str:
        """The name that a message for the user of a command says."""
        return self.option.metavar or self.name if self.option.positional else self.flags[0].partition("/")[0]

    @property
    def wanted(self) -> str:
        """What a value must be, as the end of a sentence."""
        if self.option.choices:
            return f"must be one of {', '.join(self.option.choices)}"
        if self.option.at_least is not None:
            return f"must be at least {self.option.at_least}"
        if self.option.above is not None:
            return f"must be above {self.option.above}"
        return f"must be of type {' or '.join(kind.__name__ for kind in self.kinds)}"

    def accepts(self, value: object) -> bool:
        """Whether the setting may have this value."""
        if value is None:
            return self.default is None
        if isinstance(value, bool):
            return bool in self.kinds
        if not isinstance(value, (*self.kinds, int) if float in self.kinds else self.kinds):
            return False
        if isinstance(value, int | float):
            least, above = self.option.at_least, self.option.above
            finite = isinstance(value, int) or math.isfinite(value)
            return finite and (least is None or value >= least) and (above is None or value > above)
        return not self.option.choices or value in self.option.choices

    def words(self, value: object) -> list[str]:
        """The words of a command line that set this value."""
        if self.option.positional:
            return [str(value)]
        if isinstance(value, bool):
            on, _, off = self.flags[0].partition("/")
            return [on if value else off]
        return [self.flags[0], ",".join(value) if isinstance(value, tuple) else str(value)]


def setting(default: T, option: Option) -> T:
    """A field of a config dataclass, with its default and its option."""
    made: T = field(default=default, metadata={_OPTION: option})
    return made


def required(option: Option) -> Any:
    """A field of a config dataclass that has no default."""
    return field(metadata={_OPTION: option})


def option_fields(config: type) -> Mapping[str, OptionField]:
    """The fields of a config dataclass that were made by `setting` or `required`, by name; keyword-only ones last."""
    hints, found = get_type_hints(config), {}
    for each in sorted(fields(config), key=attrgetter("kw_only")):
        if _OPTION not in each.metadata:
            continue
        hint = hints[each.name]
        parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kinds = tuple(_plain_type(part) for part in parts if part is not NoneType)
        found[each.name] = OptionField(each.name, kinds, each.metadata[_OPTION], each.default)
    return found


def _plain_type(hint: type) -> type:
    """`tuple` of `tuple[str, ...]`, `str` of a literal."""
    origin = get_origin(hint)
    return str if origin is Literal else origin or hint


def check_options(config: object, *, python: bool = False) -> None:
    """Checks the fields of a config dataclass against their options.

    Args:
        config: The dataclass.
        python: Whether a message shows a field as an argument in Python, `dim=0`, and not as an option, `--dim 0`.

    Raises:
        BadInput: a value is not allowed; the message says what would be.
    """
    for name, each in option_fields(type(config)).items():
        value = getattr(config, name)
        if not each.accepts(value):
            shown = f"{name}={value!r}" if python else f"{each.shown_name} {value}"
            raise BadInput(f"{shown}: {each.wanted}")


def command_words(config: object, leave_out: Collection[str] = ()) -> list[str]:
    """The words of a command line that give these settings; defaults are left out.

    Args:
        config: The dataclass.
        leave_out: Names of fields to leave out.
    """
    words = []
    for name, each in option_fields(type(config)).items():
        value = getattr(config, name)
        if value != each.default and name not in leave_out:
            words += each.words(value)
    return words
