"""The packages that a plain install leaves out, and the extras that install them.

>>> install("torch")
"pip install 'schedir[torch]'"
"""

from __future__ import annotations

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


def require(package: str, who: str, *, field: str = "") -> None:
    """Refuse to go on without an optional package. This imports nothing.

    Args:
        package: A package of `EXTRAS`.
        who: What needs it, as the subject of a sentence.
        field: The setting that asks for it, if there is one.

    Raises:
        MissingPackageError: The package is not installed.
    """
    if find_spec(package) is None:
        error = MissingPackageError(
            f"{who} needs {package}, which is not installed",
            hint=install(package),
            fields=[field] if field else [],
        )
        error.name = package
        raise error
