"""The optional packages, and the extras of `pip install` that install them.

>>> install_command("torch")
"pip install 'schedir[torch]'"
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from traceback import walk_tb
from typing import Final, NamedTuple

from schedir.errors import UsageError, in_words


class Extra(NamedTuple):
    """The extra of `pip install 'schedir[...]'` that installs a package, and the lowest version."""

    name: str
    lowest: str = ""  # such as `2.10`; empty if every version works


EXTRAS: Final = {
    "hypothesis": Extra("testing"),
    "numba": Extra("fast"),
    "ortools": Extra("solver"),
    "tokenizers": Extra("tokenizers", "0.20"),
    "torch": Extra("torch", "2.10"),
}


class MissingPackageError(UsageError, ImportError):
    """A package of `EXTRAS` (`name`) is not installed, is too old, or cannot be imported."""


def install_command(package: str) -> str:
    """Return the command that installs a package of `EXTRAS`."""
    return f"pip install 'schedir[{EXTRAS[package].name}]'"


def require(package: str, feature: str, *, field: str = "", lowest: str = "") -> None:
    """Raise an error if an optional package is not installed. This does not import the package.

    Args:
        package: A package of `EXTRAS`.
        feature: What needs the package, as the subject of the error's sentence.
        field: The setting that needs the package, if there is one.
        lowest: The lowest version that works, if the feature needs a later one than `EXTRAS` has.

    Raises:
        MissingPackageError: The package is not installed, or its version is too low.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # no origin: only a folder of that name was found
        raise _missing(package, f"{feature} needs {package}, which is not installed", field)
    lowest = lowest or EXTRAS[package].lowest
    found = _version(package)
    if lowest and found and _numbers(found) < _numbers(lowest):
        why = f"{feature} needs {package} {lowest} or later, and {found} is installed"
        raise _missing(package, why, field)


def broken_package(error: BaseException) -> MissingPackageError | None:
    """Return the error to show if an exception was raised by the import of a package of `EXTRAS`.

    Args:
        error: An exception with its traceback.

    Returns:
        An error that names the package, or None if the exception has another cause.
    """
    for frame, _ in walk_tb(error.__traceback__):
        package = frame.f_globals.get("__name__", "")
        if package in EXTRAS and frame.f_code.co_name == "<module>":
            return _missing(package, f"{package} cannot be imported: {in_words(error)}")
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return _missing(error.name, f"this needs {error.name}, which is not installed")
    return None


def _version(package: str) -> str:
    """Return the version of an installed package, or an empty string if it has no metadata."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _missing(package: str, why: str, field: str = "") -> MissingPackageError:
    fields = [field] if field else []
    error = MissingPackageError(why, hint=install_command(package), fields=fields)
    error.name = package
    return error


def _numbers(version: str) -> list[int]:
    """Return the major and the minor number of a version."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
