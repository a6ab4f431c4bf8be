"""Run tests with the lowest and the newest torch, and try a plain install in each Python.

With the newest torch, the newest torchtitan also trains with schedules of schedir. So do peft,
Accelerate and Lightning.
`make versions` runs this file. Each version gets a new environment, which is deleted before the
next one is made. A version of torch is a download of several gigabytes.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
# The executor, split backwards, ZeRO, traces and checkpoints.  What `schedir train` prints is not
# compared: torch 2.10 prints lines of its own.
EXECUTOR = (
    "test_executor*.py", "test_boundary_tensors.py", "test_split_backward*.py", "test_zero.py",
    "test_zero_optimizers.py", "test_gradient_reduction.py", "test_instrument.py",
    "test_measured_timelines.py", "test_checkpoint_resharding.py", "test_optimizer_state_tiers.py",
)  # fmt: skip
TRAINERS = ("transformers", "peft", "accelerate", "lightning")
DROP_IN = ("test_drop_in*.py", "test_torchtitan.py", "test_schedir_runtime*.py")  # needs torch 2.13


def lowest_torch() -> str:
    """Return the lowest version of torch that `schedir[torch]` in pyproject.toml allows."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = extras["optional-dependencies"]["torch"]
    found = re.fullmatch(r"torch>=([\d.]+)", needed)
    assert found, needed
    return found[1]


def pythons() -> list[str]:
    """Return the installed Python interpreters of the versions that pyproject.toml lists."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = [found[1] for c in classifiers if (found := re.search(r":: (3\.\d+)$", c))]
    paths = [path for v in versions if (path := shutil.which(f"python{v}"))]
    # A version manager has a script for each Python, which fails if that one is not installed.
    return [p for p in paths if subprocess.run([p, "-V"], capture_output=True).returncode == 0]


def passes_with(torch: str) -> bool:
    """Return whether the tests of the executor and the drop-in pass with a version of torch.

    Args:
        torch: A requirement for pip, such as `torch==2.10.*`.
    """
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder, "bin", "python")
        needed = (f"{ROOT}[testing]", torch, "pytest", "pytest-xdist")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *needed], check=True)
        drop_in = "import schedir.torch_pipelining"  # raises an error if the version is too low
        has_drop_in = subprocess.run([python, "-c", drop_in], stderr=DEVNULL).returncode == 0
        print(f"the drop-in is {'' if has_drop_in else 'not '}tested", flush=True)
        patterns = (*EXECUTOR, *(DROP_IN if has_drop_in else ()))
        files = [str(f) for one in patterns for f in sorted((ROOT / "tests/cpu").glob(one))]
        # torch 2.10 warns about its own code when it reads a checkpoint.
        options = ("-q", "-n", "2", "--dist", "loadfile", "-W", "ignore:TypedStorage:UserWarning")
        return subprocess.run([python, "-m", "pytest", *options, *files], cwd=ROOT).returncode == 0


def passes_script(module: str, requirements: Sequence[str]) -> bool:
    """Return whether a script of tests/ succeeds in an environment with some packages.

    Args:
        module: The module of the script, such as `tests.torchtitan_run`.
        requirements: Requirements for pip, such as `torchtitan==0.3.0`. The newest torch that fits
            is installed with them.
    """
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder, "bin", "python")
        needed = (str(ROOT), *requirements, "torch")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *needed], check=True)
        return subprocess.run([python, "-m", module], cwd=ROOT).returncode == 0


def passes_in(python: str, wheel: Path) -> bool:
    """Return whether a plain install of a wheel works with a Python interpreter."""
    argv = [sys.executable, "-m", "tests.plain_install", str(wheel), "--python", python]
    return subprocess.run(argv, cwd=ROOT).returncode == 0


def main() -> int:
    """Test all versions, and print which passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", nargs="*", default=[f"torch=={lowest_torch()}.*", "torch"],
                        metavar="REQUIREMENT", help="for pip, such as torch==2.12.*")  # fmt: skip
    parser.add_argument("--torchtitan", nargs="*", default=["torchtitan"], metavar="REQUIREMENT",
                        help="for pip, such as torchtitan==0.3.0")  # fmt: skip
    parser.add_argument("--trainers", nargs="*", default=TRAINERS, metavar="REQUIREMENT",
                        help="of tests/huggingface_trainers.py, such as peft==0.21.0")  # fmt: skip
    args = parser.parse_args()
    results = {}
    with TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "build", "--wheel", "--outdir", folder, str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        for python in pythons():
            print(f"== a plain install in {Path(python).name}", flush=True)
            results[f"{Path(python).name}, without torch"] = passes_in(python, wheel)
    for torch in args.torch:
        print(f"== {torch}", flush=True)
        results[torch] = passes_with(torch)
    for torchtitan in args.torchtitan:
        print(f"== {torchtitan} and the newest torch", flush=True)
        results[torchtitan] = passes_script("tests.torchtitan_run", [torchtitan])
    if args.trainers:
        name = ", ".join(args.trainers)
        print(f"== {name} and the newest torch", flush=True)
        results[name] = passes_script("tests.huggingface_trainers", args.trainers)
    for name, passed in results.items():
        print(f"{'passed' if passed else 'FAILED':<8}{name}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
