"""Tests of the compiled form of every Triton kernel. They need no GPU."""

import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from schedir.kernels import layer_norm_triton
from tests.cases import cases
from tests.kernel_compilation import CASES, Case, Compiled, compile_for

# Rows between the smallest and the largest ones.
MIDDLE = [case for case in CASES if case.note in ("2048", "4096", "8192", "12288")]


@pytest.mark.parametrize("case", cases([c for c in CASES if c not in MIDDLE], MIDDLE), ids=str)
def test_kernel_has_occupancy_without_spills(case: Case) -> None:
    compiled = compile_for(case)
    assert compiled.occupancy >= 0.5
    assert compiled.spilled <= case.spilled
    if case.constants.get("STAGES", 1) > 1:
        assert "cp.async" in compiled.ptx  # it prefetches rows
        tiles, columns = case.constants["TILES"], case.constants["COLUMNS"]
        assert compiled.shared <= layer_norm_triton.count_shared_bytes(tiles, columns, itemsize=2)


def test_choose_tiling_prefetches_if_shared_memory_suffices() -> None:
    for n, size, shared, tiles, stages in [
        (8192, 2, 99 << 10, 1, 3),  # compute capability 8.9
        (16384, 2, 163 << 10, 2, 1),  # 8.0
        (16384, 2, 227 << 10, 2, 3),  # 9.0
        (16384, 4, 227 << 10, 4, 1),
    ]:
        tiling = layer_norm_triton.choose_tiling(n, size, shared)
        assert (tiling.tiles, tiling.stages) == (tiles, stages)
        assert tiling.tiles * tiling.tile_width >= n and tiling.padded_columns >= tiling.tile_width
        assert tiling.warps == 32


def test_occupancy_respects_each_limit() -> None:
    """The expected numbers were computed by hand. 100 registers count as 104."""

    def count_blocks(registers: int, warps: int, shared: int = 0) -> int:
        return Compiled(registers, 0, shared, warps, "").blocks

    assert count_blocks(100, 16) == 1 and count_blocks(104, 1) == 19  # 65536 // (104 * 32)
    assert count_blocks(16, 1) == 32
    assert count_blocks(16, 4) == 16
    assert count_blocks(16, 4, shared=100 << 10) == 2
    assert Compiled(100, 0, 16384, 16, "").occupancy == 0.25


def test_every_kernel_has_compilation_case() -> None:
    folder = Path(layer_norm_triton.__file__).parent
    kernels = {
        (file.stem, name)
        for file in folder.glob("*_triton.py")
        for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)
    }
    assert kernels == {(case.module, case.kernel) for case in CASES}
