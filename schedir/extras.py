"""The optional packages, and the extras of `pip install` that install them.

Example:
    >>> install_command("torch")
    "pip install 'schedir[torch]'"
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from traceback import walk_tb
from typing import Final, NamedTuple

from schedir.errors import UsageError, describe_exception


class Extra(NamedTuple):
    """The extra of `pip install 'schedir[...]'` that installs a package.

    Attributes:
        name: Name of the extra.
        min_version: The lowest version of the package that works, such as `2.10`; "" if every
            version works.
    """

    name: str
    min_version: str = ""


EXTRAS: Final = {
    "anywidget": Extra("notebook"),
    "argcomplete": Extra("completion"),
    "hypothesis": Extra("testing"),
    "megatron.core": Extra("megatron", "0.16"),
    "numba": Extra("fast"),
    "ortools": Extra("solver"),
    "pandas": Extra("notebook"),
    "tokenizers": Extra("tokenizers", "0.20"),
    "torch": Extra("torch", "2.10"),
}


class MissingPackageError(UsageError, ImportError):
    """A package of `EXTRAS` that is not installed, is too old, or cannot be imported.

    Attributes:
        name: Name of the package.
    """


def install_command(package: str) -> str:
    """Return the command that installs a package of `EXTRAS`.

    Args:
        package: Name of the package.
    """
    return f"pip install 'schedir[{EXTRAS[package].name}]'"


def require_package(package: str, feature: str, *, field: str = "", min_version: str = "") -> None:
    """Raise an error if an optional package is missing or too old, without importing it.

    Args:
        package: A package of `EXTRAS`.
        feature: The feature that needs the package, as the subject of the error's sentence.
        field: The setting that needs the package, if there is one.
        min_version: The lowest version that works, if the feature needs a later version than the
            one in `EXTRAS`.

    Raises:
        MissingPackageError: The package is not installed, or its version is too low.
    """
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:  # a parent is not installed, such as megatron for megatron.core
        spec = None
    # a spec without an origin is only a folder with this name
    if spec is None or spec.origin is None:
        raise _make_missing_error(
            package, f"{feature} needs {package}, which is not installed", field
        )
    min_version = min_version or EXTRAS[package].min_version
    installed = _get_version(package)
    if min_version and installed and _parse_version(installed) < _parse_version(min_version):
        reason = f"{feature} needs {package} {min_version} or later, but {installed} is installed"
        raise _make_missing_error(package, reason, field)


def broken_package(error: BaseException) -> MissingPackageError | None:
    """Return the error to show for an exception that the import of an optional package caused.

    Args:
        error: An exception with its traceback.

    Returns:
        An error that names the package, or None if the exception has another cause.
    """
    for frame, _ in walk_tb(error.__traceback__):
        package = frame.f_globals.get("__name__", "")
        if package in EXTRAS and frame.f_code.co_name == "<module>":
            return _make_missing_error(
                package, f"{package} cannot be imported: {describe_exception(error)}"
            )
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return _make_missing_error(error.name, f"the package {error.name} is not installed")
    return None


def _get_version(package: str) -> str:
    """Return the version of an installed package, or an empty string if it has no metadata."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _make_missing_error(package: str, reason: str, field: str = "") -> MissingPackageError:
    fields = [field] if field else []
    error = MissingPackageError(reason, hint=install_command(package), fields=fields)
    error.name = package
    return error


def _parse_version(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
