"""Train within a memory limit that needs both ZeRO and activation recomputation.

    python examples/zero.py [FOLDER]

The script writes its results to FOLDER, by default ./zero-output, and replaces results of an
earlier run. The exit code is 0 if schedir refuses three runs and trains the fourth. The refused
runs have plain replicas, ZeRO without recomputation, and recomputation without ZeRO.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from schedir.errors import SchedirError, format_bytes
from schedir.training.config.config_file import read_config
from schedir.training.run_results import make_directory
from schedir.training.train import run

CONFIG = Path(__file__).with_suffix(".toml")
MEMORY = read_config(str(CONFIG)).memory
ZERO, AGAIN = "pipeline.zero=3", "memory.recompute=fit"
REFUSED = {
    "Two replicas, each with all weights, gradients and the optimizer's state": [],
    "Running forwards again as far as that helps": [AGAIN],
    "Each replica with a part of weights, gradients and the optimizer's state (zero 3)": [ZERO],
}


def main() -> int:
    folder = Path(*sys.argv[1:2] or ["zero-output"])
    try:
        make_directory(str(folder))
    except SchedirError as error:
        print(error)
        return 2
    output = [f"output.dir={json.dumps(str(folder))}", "output.overwrite=true"]
    wrong = []
    for title, sets in REFUSED.items():
        print(f"{title}:", flush=True)
        if run(str(CONFIG), [*output, *sets]) != 2:
            wrong.append(f"was not refused: {title}")
        print(flush=True)
    print("Both:", flush=True)
    if code := run(str(CONFIG), [*output, ZERO, AGAIN]):
        return code
    summary = json.loads((folder / "summary.json").read_text())
    (predicted,), (counted,) = (summary["memory"][name] for name in ("predicted", "counted"))
    print(
        f"a replica held {format_bytes(counted)}, predicted {format_bytes(predicted)}, of "
        f"{MEMORY.memory_limit}"
    )
    if max(predicted, counted) > (MEMORY.limit_bytes or 0):
        wrong.append("the limit was exceeded")
    for fact in wrong:
        print(f"FAILED: {fact}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
