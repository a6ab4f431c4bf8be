"""Compile every Triton kernel ahead of time, on a machine that may have no GPU.

    python -m tests.kernel_compilation

shows registers, spills and shared memory of each kernel, as ptxas counts them for sm_90. It also
shows how many blocks fit a multiprocessor at once, since blocks hide each other's waits for memory.
The types and block shapes are those that the operations choose for a large bfloat16 model.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from schedir.kernels import cross_entropy_triton, gelu_triton, launch_grid, layer_norm_triton

# The resources of a multiprocessor of compute capability 9.0 (CUDA C++ Programming Guide,
# "Technical specifications per compute capability", and Hopper Tuning Guide, 1.4.1.1 and 1.4.2.4).
# Each block needs 1 KiB of shared memory in addition, and a warp gets registers in units of 256.
WARPS, BLOCKS, REGISTERS, SHARED, RESERVED, GRANULE = 64, 32, 1 << 16, 228 << 10, 1 << 10, 256


@dataclass(frozen=True)
class Case:
    """A kernel with the options of its compilation."""

    module: str
    kernel: str
    types: str  # types of the arguments in order, see KINDS
    constants: Mapping[str, Any]
    warps: int
    registers: int | None = None  # the limit for the compiler, if the launch has one
    spilled: int = 0  # the maximum of bytes per thread
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.module.removesuffix('_triton')}.{self.kernel.removesuffix('_kernel')}"

    def __str__(self) -> str:
        return f"{self.name} {self.note}".strip()


# Pointers to tensors, numbers, and m, a multiple of 16, for which Triton generates wider loads, as
# it does at run time.
KINDS = {"bf16": "*bf16", "f32": "*fp32", "i64": "*i64", "i": "i32", "m": "i32", "f": "fp32"}

_WIDTHS = 1024, 2048, 4096, 8192, 12288, 16384  # widths of normalised rows
_GELU = {"ROWS": gelu_triton.ROWS, "COLUMNS": gelu_triton.COLUMNS}
_LOGITS = {"BLOCK": cross_entropy_triton.choose_block_size(51200 // 8)}


def _layer_norm(n: int) -> Iterator[Case]:
    whole = launch_grid.next_power_of_2(n)
    yield Case(
        "layer_norm_triton",
        "forward_kernel",
        "bf16 bf16 bf16 bf16 bf16 bf16 f32 m m f",
        {"COLUMNS": whole},
        layer_norm_triton.count_warps(whole, 2),
        note=f"{n}",
    )
    by = layer_norm_triton.choose_tiling(n, 2, SHARED - RESERVED)
    yield Case(
        "layer_norm_triton",
        "backward_kernel",
        "bf16 bf16 bf16 bf16 f32 bf16 f32 m m m i",
        {"TILES": by.tiles, "COLUMNS": by.padded_columns, "STAGES": by.stages},
        by.warps,
        registers=layer_norm_triton.MAX_REGISTERS,
        spilled=0 if by.tiles == 1 else 16,  # 8 with triton 3.6
        note=f"{n}",
    )


CASES = (
    Case("cross_entropy_triton", "statistics_kernel", "bf16 i64 f32 m m m m", _LOGITS, 8),
    Case(
        "cross_entropy_triton",
        "gradient_kernel",
        "bf16 i64 f32 f32 m i m m m i",
        {"T": 8, **_LOGITS},
        8,
    ),
    Case("gelu_triton", "forward_kernel", "bf16 bf16 bf16 m m", _GELU, gelu_triton.NUM_WARPS),
    Case(
        "gelu_triton",
        "backward_kernel",
        "bf16 bf16 bf16 bf16 f32 m m i",
        _GELU,
        gelu_triton.NUM_WARPS,
        registers=gelu_triton.MAX_REGISTERS,
    ),
    *(case for n in _WIDTHS for case in _layer_norm(n)),
)


@dataclass(frozen=True)
class Compiled:
    """The counts of ptxas: registers and spilled bytes per thread, shared bytes per block."""

    registers: int
    spilled: int
    shared: int
    warps: int
    ptx: str

    @property
    def blocks(self) -> int:
        """The number of blocks that fit a multiprocessor of sm_90 at once."""
        of_a_warp = launch_grid.count_blocks(32 * self.registers, GRANULE) * GRANULE
        return min(
            BLOCKS,
            WARPS // self.warps,
            REGISTERS // (of_a_warp * self.warps),
            SHARED // (self.shared + RESERVED),
        )

    @property
    def occupancy(self) -> float:
        """The kernel's warps on a multiprocessor, as a share of the maximum."""
        return self.blocks * self.warps / WARPS


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
    options = {"num_warps": case.warps, "maxnreg": case.registers}
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx: str = done.asm["ptx"]
    said = _ptxas(ptx, capability)
    (registers,) = re.findall(r"Used (\d+) registers", said)
    (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
    return Compiled(int(registers), int(spilled), done.metadata.shared, case.warps, ptx)


def _ptxas(ptx: str, capability: int) -> str:
    """Return the assembler's output for a kernel."""
    architecture = re.findall(r"\.target (\w+)", ptx)[0]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"-arch={architecture}", source.name]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stderr


def main() -> None:
    """Compile all kernels, and print their resources."""
    print(f"triton {triton.__version__}, sm_90")
    columns = "registers", "spilled", "shared", "warps", "blocks", "occupancy"
    print(f"{'kernel':28}" + "".join(f"{column:>10}" for column in columns))
    for case in CASES:
        c = compile_for(case)
        figures = c.registers, c.spilled, c.shared, c.warps, c.blocks
        print(f"{case!s:28}" + "".join(f"{x:10}" for x in figures) + f"{c.occupancy:10.0%}")


if __name__ == "__main__":
    main()
