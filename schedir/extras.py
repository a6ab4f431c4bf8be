"""The packages that a plain install leaves out, and the extras that install them.

>>> install("torch")
"pip install 'schedir[torch]'"
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Final

from schedir.errors import UsageError

EXTRAS: Final = {  # by package, the extra of `pip install schedir[...]` that installs it
    "hypothesis": "testing",
    "numba": "fast",
    "ortools": "solver",
    "tokenizers": "tokenizers",
    "torch": "torch",
}


class MissingPackageError(UsageError, ImportError):
    """A package of `EXTRAS` is needed, and is not installed. `name` is the package."""


def install(package: str) -> str:
    """Return the command that installs a package of `EXTRAS`."""
    return f"pip install 'schedir[{EXTRAS[package]}]'"


def require(package: str, who: str, *, field: str = "", lowest: str = "") -> None:
    """Refuse to go on without an optional package. This imports nothing.

    Args:
        package: A package of `EXTRAS`.
        who: What needs it, as the subject of a sentence.
        field: The setting that asks for it, if there is one.
        lowest: The lowest version that will do, as `2.13`, if not all will.

    Raises:
        MissingPackageError: The package is not installed, or its version is lower.
    """
    if find_spec(package) is None:
        raise _missing(package, f"{who} needs {package}, which is not installed", field)
    if lowest and _numbers(found := version(package)) < _numbers(lowest):
        why = f"{who} needs {package} {lowest} or later, and {found} is installed"
        raise _missing(package, why, field)


def _missing(package: str, why: str, field: str) -> MissingPackageError:
    fields = [field] if field else []
    error = MissingPackageError(why, hint=install(package), fields=fields)
    error.name = package
    return error


def _numbers(version: str) -> tuple[int, ...]:
    """Return the major and the minor number of a version."""
    return tuple(map(int, version.split(".")[:2]))
