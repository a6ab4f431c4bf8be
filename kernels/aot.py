"""Ahead of time: compile every kernel for a GPU that need not be there.

    python -m schedir.kernels.aot

shows registers, spills and shared memory of each, as ptxas counts them for sm_90.  The types
and block shapes are those that the operations choose for a large bfloat16 model.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from schedir.kernels import boundary_triton, cross_entropy_triton, gelu_triton, layer_norm_triton
from schedir.kernels import weight_gradient_triton as weight_gradient


@dataclass(frozen=True)
class Case:
    """A kernel as it is compiled; `most` are the registers a thread may take, without spilling."""

    module: str
    kernel: str
    types: str  # of the arguments in order, see KINDS
    constants: Mapping[str, Any]
    warps: int
    most: int
    stages: int = 3

    @property
    def name(self) -> str:
        return f"{self.module.removesuffix('_triton')}.{self.kernel.removesuffix('_kernel')}"


# Pointers to tensors; numbers; and m, a whole number that 16 divides, for which Triton makes wider
# loads: what it sees at run time as well.
KINDS = {"bf16": "*bf16", "f32": "*fp32", "i64": "*i64", "i": "i32", "m": "i32", "f": "fp32"}

_HIDDEN = 8192
_COLUMNS, _WARPS = layer_norm_triton.shape(_HIDDEN)
_GELU = {"ROWS": gelu_triton.ROWS, "COLUMNS": gelu_triton.COLUMNS}
_LOGITS = {"BLOCK": cross_entropy_triton.block(51200 // 8)}
_WIRE = {"FLAT": False, "BLOCK": boundary_triton.BLOCK}
_TILE = {name: getattr(weight_gradient, name) for name in ("ROWS", "COLUMNS", "TOKENS", "GROUP")}

CASES = (
    Case("cross_entropy_triton", "statistics_kernel", "bf16 i64 f32 m m m m", _LOGITS, 8, 48),
    Case(
        "cross_entropy_triton",
        "gradient_kernel",
        "bf16 i64 f32 f32 m i m m m i",
        {"T": 8, **_LOGITS},
        8,
        48,
    ),
    Case("boundary_triton", "pack_kernel", "bf16 bf16 m m i m m m i", _WIRE, 4, 48),
    Case("gelu_triton", "forward_kernel", "bf16 bf16 bf16 m m", _GELU, 4, 64),
    Case("gelu_triton", "backward_kernel", "bf16 bf16 bf16 bf16 f32 m m i", _GELU, 4, 96),
    Case(
        "layer_norm_triton",
        "forward_kernel",
        "bf16 bf16 bf16 bf16 bf16 bf16 f32 m m f",
        {"COLUMNS": _COLUMNS},
        _WARPS,
        64,
    ),
    Case(
        "layer_norm_triton",
        "backward_kernel",
        "bf16 bf16 bf16 bf16 f32 bf16 f32 m m i",
        {"COLUMNS": _COLUMNS},
        _WARPS,
        128,
    ),
    Case(
        "weight_gradient_triton",
        "accumulate_kernel",
        "f32 bf16 bf16 m m m",
        {**_TILE, "UPCAST": False},
        weight_gradient.WARPS,
        224,
        weight_gradient.STAGES,
    ),
)


@dataclass(frozen=True)
class Compiled:
    """What ptxas says: registers per thread, bytes spilled per thread, shared bytes per block."""

    registers: int
    spilled: int
    shared: int
    ptx: str


def compile_for(case: Case, capability: int = 90) -> Compiled:
    """Compile a kernel for a GPU of this capability (90 is an H100 or H200)."""
    kernel = getattr(import_module(f"schedir.kernels.{case.module}"), case.kernel)
    arguments = [name for name in kernel.arg_names if name not in case.constants]
    types = dict(zip(arguments, case.types.split(), strict=True))
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind == "m" or KINDS[kind].startswith("*")
    }
    source = ASTSource(
        fn=kernel,
        signature={name: KINDS[kind] for name, kind in types.items()}
        | dict.fromkeys(case.constants, "constexpr"),
        constexprs=dict(case.constants),
        attrs=aligned,
    )
    options = {"num_warps": case.warps, "num_stages": case.stages}
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx: str = done.asm["ptx"]
    said = _ptxas(ptx, capability)
    (registers,) = re.findall(r"Used (\d+) registers", said)
    (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
    return Compiled(int(registers), int(spilled), done.metadata.shared, ptx)


def _ptxas(ptx: str, capability: int) -> str:
    """What the assembler tells of a kernel."""
    architecture = re.findall(r"\.target (\w+)", ptx)[0]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"-arch={architecture}", source.name]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stderr


def main() -> None:
    """Compile all, and show what it took."""
    print(f"triton {triton.__version__}, sm_90")
    print(f"{'kernel':32} {'registers':>9} {'at most':>8} {'spilled':>8} {'shared':>8}")
    for case in CASES:
        c = compile_for(case)
        print(f"{case.name:32} {c.registers:9} {case.most:8} {c.spilled:8} {c.shared:8}")


if __name__ == "__main__":
    main()
