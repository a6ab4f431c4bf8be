"""Triton kernels on a CPU: modules of them, as Triton's interpreter runs them.

What is known to be different there (seen with triton 3.7): programs run one after the other, so
a missing atomic passes; bfloat16 is carried as bits, so arithmetic and `tl.dot` on it are garbage
and kernels must cast first; a cast from float32 to bfloat16 cuts off instead of rounding, so
tolerances are twice as wide; `triton.autotune` and libdevice are not there.
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
def interpreting() -> Iterator[None]:
    """Within this, kernels that are defined are interpreted, and can be run.

    TRITON_INTERPRET=1 is for a whole process, in which nothing can be compiled any more.  Here
    both can be had: what Triton itself defines (tl.sum and the like) is interpreted when an
    interpreted kernel calls it, and triton.language is as it was when the call is over.
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
        # Of triton 3.6, int() of an array that has a dimension, which numpy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda x: x.handle.data.item())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
        patch.setattr(JITFunction, "__call__", call)
        patch.setattr(InterpretedFunction, "__call__", call)
        yield


def load(name: str, **constants: int) -> ModuleType:
    """A copy of schedir.kernels.NAME, of its own, with other constants; see `interpreting`."""
    spec = importlib.util.find_spec(f"schedir.kernels.{name}")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(constants)
    return module
