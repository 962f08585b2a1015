"""Triton's interpreter as the tests need it: with the NumPy that is installed, and with bfloat16 as a GPU has it."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def adapt() -> None:
    """Mend four things of Triton 3.6, before the first launch.

    - It turns arrays of one element into loop bounds by ``int``, which NumPy 2.4 refuses.
    - It keeps bfloat16 as 16-bit integers, and multiplies matrices of them as integers.
    - It cuts float32 to bfloat16, where a GPU rounds to the nearest, ties to even.
    - After each launch it copies every storage, whole, onto itself: a pool of gigabytes would be filled.
    """
    patch_tensor = interpreter._patch_lang_tensor
    convert_float = interpreter._convert_float
    create_dot = interpreter.InterpreterBuilder.create_dot

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return widened(data)
        if (source, target) == (tl.float32, tl.bfloat16):
            return rounded(data)
        return convert_float(data, source, target, rounding)

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return create_dot(self, as_float32(a), as_float32(b), d, *options)

    def as_float32(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(widened(handle.data), tl.float32)

    interpreter._patch_lang_tensor = patch
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.GridExecutor._restore_args_dev = lambda *_: None


def widened(data: Any) -> Any:
    """Bits of bfloat16 as float32."""
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def rounded(data: Any) -> Any:
    """Float32 as bits of the nearest bfloat16; any NaN becomes one NaN."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), np.uint32(0x7FC0), nearest).astype(np.uint16)
