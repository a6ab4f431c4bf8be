"""Every Triton kernel, compiled for a GPU that is not there."""

import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from schedir.kernels import aot


@pytest.mark.parametrize("case", aot.CASES, ids=str)
def test_it_fits_a_multiprocessor(case: aot.Case) -> None:
    compiled = aot.compile_for(case)
    assert compiled.occupancy >= 0.5
    assert compiled.spilled <= case.spilled
    if case.constants.get("STAGES", 1) > 1:
        assert "cp.async" in compiled.ptx  # it fetches ahead


def test_what_fits_a_multiprocessor() -> None:
    """By hand: 100 registers count as 104, and each of four limits is the lowest once."""

    def blocks(registers: int, warps: int, shared: int = 0) -> int:
        return aot.Compiled(registers, 0, shared, warps, "").blocks

    assert blocks(100, 16) == 1 and blocks(104, 1) == 19  # 65536 // (104 * 32)
    assert blocks(16, 1) == 32
    assert blocks(16, 4) == 16
    assert blocks(16, 4, shared=100 << 10) == 2
    assert aot.Compiled(100, 0, 16384, 16, "").occupancy == 0.25


def test_every_kernel_is_compiled() -> None:
    folder = Path(aot.__file__).parent
    kernels = {
        (file.stem, name)
        for file in folder.glob("*_triton.py")
        for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)
    }
    assert kernels == {(case.module, case.kernel) for case in aot.CASES}
