"""Train within a memory limit that is too small without activation recomputation.

    python examples/recompute.py [FOLDER]

The script writes its results to FOLDER, by default ./recompute-output, and replaces results of an
earlier run. The exit code is 0 if schedir refuses the run without recomputation, and trains the run
that recomputes as much as needed.
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
    output = [f"output.dir={json.dumps(str(folder))}", "output.overwrite=true"]
    print("Keeping all that forwards save:", flush=True)
    refused = run(str(CONFIG), output)
    print("\nRunning again what does not fit:", flush=True)
    code = run(str(CONFIG), [*output, "memory.recompute=fit"])
    if not refused:
        print("FAILED: the limit is not exceeded")
    return code or int(not refused)


if __name__ == "__main__":
    sys.exit(main())
