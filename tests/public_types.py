"""Check that type checkers know the type of each public name: `make types`.

It runs `pyright --verifytypes` in a new environment, which downloads pyright and Node.js, and
prints each public name with an attribute, parameter or result of unknown type.  Names that are not
in `docs/reference/api.md` may have inferred types.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from docs.api_page import list_public_names

ROOT = Path(__file__).resolve().parents[1]


def run_pyright(folder: str) -> list[dict[str, Any]]:
    """Return what pyright reports of each symbol of schedir.

    Args:
        folder: An empty folder, for the environment of pyright.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    binary = Path(folder, "bin")
    install = ["-m", "pip", "install", "--quiet", "pyright[nodejs]"]
    subprocess.run([binary / "python", *install], check=True)
    # pyright finds the installed packages, such as torch, by the first `python` in PATH.
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        [binary / "pyright", "--outputjson", "--ignoreexternal", "--verifytypes", "schedir"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PATH": search, "PYTHONPATH": str(ROOT)},
    )
    symbols: list[dict[str, Any]] = json.loads(run.stdout)["typeCompleteness"]["symbols"]
    return symbols


def list_incomplete_names(symbols: list[dict[str, Any]]) -> list[str]:
    """Return the public names with a symbol whose type is unknown or ambiguous.

    Args:
        symbols: What `run_pyright` returns.

    Raises:
        SystemExit: pyright reports nothing of a public name.
    """
    is_complete = {s["name"]: s["isTypeKnown"] and not s["isTypeAmbiguous"] for s in symbols}
    incomplete = []
    for name, value in list_public_names().items():
        path = f"schedir.{name}"
        if inspect.ismodule(value):
            path = value.__name__
        elif hasattr(value, "__qualname__"):
            path = f"{value.__module__}.{value.__qualname__}"
        path = f"schedir.{path}" if path.startswith("viz.") else path
        members = [s for s in is_complete if s == path or s.startswith(f"{path}.")]
        if not members and f"schedir.{name}" not in is_complete:
            raise SystemExit(f"pyright reports nothing of {name}, which is {path}")
        incomplete += [f"{name}: {s}" for s in members if not is_complete[s]]
    return incomplete


def main() -> int:
    """Print the incomplete public names, and return 1 if there is one."""
    with TemporaryDirectory() as folder:
        incomplete = list_incomplete_names(run_pyright(folder))
    for line in incomplete:
        print(line)
    print(
        f"{len(list_public_names())} public names, "
        f"{len(incomplete)} attributes without a known type"
    )
    return bool(incomplete)


if __name__ == "__main__":
    raise SystemExit(main())
