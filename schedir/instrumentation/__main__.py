"""Run a program with its trainers instrumented: `python -m schedir.instrumentation train.py ARGS`.

The program is a file, or a module after `-m`. With a launcher, `-m schedir.instrumentation` comes
before the program: `torchrun --nproc-per-node 2 -m schedir.instrumentation -m torchtitan.train`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from schedir.instrumentation.instrument import instrument


def main() -> None:
    """Instrument all installed trainers, and run the program that the command line names."""
    is_module = sys.argv[1:2] == ["-m"]
    del sys.argv[: 1 + is_module]
    if not sys.argv:
        sys.exit("usage: python -m schedir.instrumentation [-m MODULE | FILE.py] ARGUMENTS")
    instrument()
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
