"""Train within a memory limit that is too small without activation recomputation.

    python examples/recompute.py [FOLDER]

The script writes its results to FOLDER, by default ./recompute-output, and replaces results of an
earlier run. The exit code is 0 if schedir refuses the run without recomputation, and completes the
run that recomputes as few forwards as the limit requires.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from schedir.errors import SchedirError
from schedir.training.run_results import make_directory
from schedir.training.train import run

CONFIG = Path(__file__).with_suffix(".toml")


def main() -> int:
    folder = Path(*sys.argv[1:2] or ["recompute-output"])
    try:
        make_directory(str(folder))
    except SchedirError as error:
        print(error)
        return 2
    set_options = [f"output.dir={json.dumps(str(folder))}", "output.overwrite=true"]
    print("Keeping all that forwards save:", flush=True)
    first_exit_code = run(str(CONFIG), set_options)
    print("\nRunning again what does not fit:", flush=True)
    exit_code = run(str(CONFIG), [*set_options, "memory.recompute=fit"])
    if not first_exit_code:
        print("FAILED: the limit is not exceeded")
    return exit_code or int(not first_exit_code)


if __name__ == "__main__":
    sys.exit(main())
