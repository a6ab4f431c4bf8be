"""Every Triton kernel, compiled for a GPU that is not there."""

import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from schedir.kernels import aot


@pytest.mark.parametrize("case", aot.CASES, ids=lambda case: case.name)
def test_fits_its_registers(case: aot.Case) -> None:
    compiled = aot.compile_for(case)
    assert compiled.registers <= case.most
    assert compiled.spilled == 0
    if case.kernel == "accumulate_kernel":
        assert "wgmma.mma_async" in compiled.ptx  # the tensor cores are used


def test_every_kernel_is_compiled() -> None:
    folder = Path(aot.__file__).parent
    kernels = {
        (file.stem, name)
        for file in folder.glob("*_triton.py")
        for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)
    }
    assert kernels == {(case.module, case.kernel) for case in aot.CASES}
