"""Loads modules of Triton kernels for Triton's interpreter, which runs them on a CPU.

The known differences from a GPU, as of triton 3.7, are as follows. Programs run one after the
other, so a missing atomic is not noticed. bfloat16 is stored as bits, so arithmetic and `tl.dot` on
it are garbage, and kernels must cast first. A cast from float32 to bfloat16 truncates, so
tolerances are twice as wide. `triton.autotune` and libdevice are not available.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import triton
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, _patch_lang
from triton.runtime.jit import JITFunction


@contextmanager
def interpret_kernels() -> Iterator[None]:
    """Interpret the kernels that are defined while the context is active.

    TRITON_INTERPRET=1 applies to a whole process, which then cannot compile any kernel. Here both
    are possible: Triton's own functions, such as tl.sum, are interpreted when an interpreted kernel
    calls them, and triton.language is restored after the call.
    """

    def call(self: Any, *args: Any, **options: Any) -> Any:
        patched = _patch_lang(self.fn)
        try:
            return InterpretedFunction(self.fn).rewrite()(*args, **options)
        finally:
            patched.restore()

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # triton 3.6 calls int() on an array with a dimension, which numpy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda x: x.handle.data.item())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
        patch.setattr(JITFunction, "__call__", call)
        patch.setattr(InterpretedFunction, "__call__", call)
        yield


def load_kernels(name: str, **constants: int) -> ModuleType:
    """Return a separate copy of schedir.kernels.NAME with other constants. See `interpreting`."""
    spec = importlib.util.find_spec(f"schedir.kernels.{name}")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(constants)
    return module
