"""The machine and the versions that figures are of; exit code 2 where torch sees no GPU.

python benchmarks/gpu_machine.py
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import parse


def said(*command: str) -> str:
    """What a command says, in one line; nothing if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(done.stdout.strip().splitlines())


def packages(*names: str) -> str:
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def main() -> int:
    import torch

    smoke = parse(argparse.ArgumentParser(description=__doc__)).smoke
    there = torch.cuda.is_available()
    print(f"commit: {said('git', 'rev-parse', '--short', 'HEAD') or 'not known'}")
    print(f"processor: {platform.machine()}, {os.cpu_count()} cores")
    print(f"versions: python {platform.python_version()}, torch {torch.__version__}, "
          f"{packages('triton', 'numpy', 'pytest', 'hypothesis', 'liger-kernel')}")  # fmt: skip
    if not there:
        print("GPU: none, or torch sees none")
        return 0 if smoke else 2
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    print(f"CUDA: {torch.version.cuda}, NCCL {nccl}")
    for k in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(k)
        print(f"GPU: {card.name}, {card.total_memory / 2**30:.0f} GiB, "
              f"{card.multi_processor_count} multiprocessors")  # fmt: skip
    query = "driver_version,clocks.max.sm,power.limit"
    print(f"driver: {said('nvidia-smi', f'--query-gpu={query}', '--format=csv,noheader')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
