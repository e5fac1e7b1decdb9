"""The version of the installed distribution; `pyproject.toml` is where it is written."""

from importlib.metadata import PackageNotFoundError, version


def distribution_version() -> str:
    """The installed distribution's version; "unknown (not installed)" if the packages are only on the path."""
    try:
        return version("elastable")
    except PackageNotFoundError:
        return "unknown (not installed)"
