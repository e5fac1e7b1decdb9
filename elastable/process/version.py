"""The version of the installed distribution; `pyproject.toml` is where it is written."""

from importlib.metadata import PackageNotFoundError, version


def distribution_version() -> str:
    """As in `pyproject.toml`; "unknown (not installed)" where the packages are on the path without an installation."""
    try:
        return version("elastable")
    except PackageNotFoundError:
        return "unknown (not installed)"
