"""Launches a kernel on tiles of rows by columns.

The launchers follow these steps, as far as an operator needs them:

1. Check the tensors (``arguments.py``). The caller has checked those of a forward, but tensors of a
   backward may have been replaced since its forward.
2. Convert the op's arguments to the kernels': a class such as ``_LstmCall`` holds ``inputs``, the
   tensors that all its kernels read, and ``variant``, the compile-time parameters.
3. Allocate the results.
4. Launch, on the device of the tensors, with a configuration that depends on sizes and dtypes.
5. Return the results in the op's order.

Attention's tiles have other sizes: see ``_AttentionCall.launch`` in ``attention.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Block(NamedTuple):
    """The size of a tile."""

    rows: int
    columns: int  # a power of 2, at least 8


class Config(NamedTuple):
    """Launch parameters of a kernel whose programs own one tile at a time."""

    block: Block
    num_warps: int


def launch(kernel: Any, grid: tuple[int, ...], config: Config, *args: Any) -> Any:
    """Launches a kernel whose last parameter is ``block``. Returns the compiled kernel, or None in
    the interpreter."""
    return kernel[grid](
        *args, block=config.block, num_warps=config.num_warps, enable_fp_fusion=True
    )
