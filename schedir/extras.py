"""The packages that a plain install leaves out, and the extras that install them.

>>> install_command("torch")
"pip install 'schedir[torch]'"
"""

from __future__ import annotations

import re
from importlib.metadata import version
from importlib.util import find_spec
from typing import Final

from schedir.errors import UsageError

# The extra of `pip install 'schedir[...]'` that installs each package.
EXTRAS: Final = {
    "hypothesis": "testing",
    "numba": "fast",
    "ortools": "solver",
    "tokenizers": "tokenizers",
    "torch": "torch",
}


class MissingPackageError(UsageError, ImportError):
    """A package of `EXTRAS` is not installed, or its version is too low. `name` is the package."""


def install_command(package: str) -> str:
    """Return the command that installs a package of `EXTRAS`."""
    return f"pip install 'schedir[{EXTRAS[package]}]'"


def require(package: str, feature: str, *, field: str = "", lowest: str = "") -> None:
    """Raise an error if an optional package is not installed. This does not import the package.

    Args:
        package: A package of `EXTRAS`.
        feature: What needs the package. It is the subject of the error's sentence.
        field: The setting that needs the package, if there is one.
        lowest: The lowest version that works, such as `2.13`. By default every version works.

    Raises:
        MissingPackageError: The package is not installed, or its version is lower than `lowest`.
    """
    if find_spec(package) is None:
        raise _missing(package, f"{feature} needs {package}, which is not installed", field)
    if lowest and _numbers(found := version(package)) < _numbers(lowest):
        why = f"{feature} needs {package} {lowest} or later, and {found} is installed"
        raise _missing(package, why, field)


def _missing(package: str, why: str, field: str) -> MissingPackageError:
    fields = [field] if field else []
    error = MissingPackageError(why, hint=install_command(package), fields=fields)
    error.name = package
    return error


def _numbers(version: str) -> list[int]:
    """Return the major and the minor number of a version."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
