"""Sizes of tiles and options of the compiler, for each kernel of attention and each kind of GPU."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from trifuse.kernels.attention_arguments import AttentionBlock


class Config(NamedTuple):
    """Sizes of tiles, as in ``AttentionBlock``, and options of the compiler."""

    M: int
    N: int
    K: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread, so that more programs fit a multiprocessor


class Workload(NamedTuple):
    """Key of a configuration. It does not depend on batch size or lengths."""

    kernel: str
    unit: str  # the unit that multiplies: "fma", "mma", "wgmma", or "interpreter"
    head_dim: int  # 64, 128 or 256: no smaller than E and Ev
    extras: bool  # a mask or dropout, which take registers


# Configurations by kernel and by the unit that multiplies: fma for float32; for 16 bits mma, or
# wgmma if the GPU has it. Each row lists the configuration for calls without extras, the one for
# calls with extras, and others worth timing. A single entry is used for all calls.
#
# They were found by compiling ahead of time, with a causal bound, boolean and float masks, dropout,
# and all of these. They are the largest tiles whose loops spill little or nothing. For wgmma at a
# head_dim of 64 without extras, several were timed on an H100: key_value's takes 0.8 of the time of
# (64, 128), and query's takes 0.66 of that of (128, 64). The others have not been timed against
# each other.
#
# - M and N: with more owned rows in a tile, the other side is loaded fewer times. The sums of the
#   owned rows stay in registers (M · Ev numbers in the forward, N · (E + Ev) in key_value, M · E in
#   query), so tiles shrink as head_dim grows. key_value owns keys, so there N is the larger.
# - K: bounds the operands that a thread holds in registers; see ``pair_products``.
# - num_stages: with wgmma and two stages, loads begin when the previous step ends, and the kernel
#   waits for them at once; a third stage hides them. Shared memory stays under the 99 KiB of the
#   smallest GPU with an mma unit for bfloat16, and under the 227 KiB of GPUs with wgmma.
# - rows: it walks through keys only if a logsumexp is coarse, so one row serves every head_dim.
_TABLE: dict[tuple[str, str], dict[int, tuple[tuple[int, ...], ...]]] = {
    # head_dim: (M, N, K, num_warps, num_stages[, max_registers]), ...
    ("forward", "fma"): {
        64: ((64, 32, 16, 8, 2),),
        128: ((64, 16, 16, 8, 2),),
        256: ((32, 16, 16, 8, 2),),
    },
    ("forward", "mma"): {
        64: ((128, 64, 0, 8, 3), (128, 32, 0, 8, 3), (64, 64, 0, 4, 3)),
        128: ((128, 32, 0, 8, 3), (64, 64, 0, 8, 2), (128, 64, 0, 8, 2)),
        256: ((64, 32, 0, 8, 2),),
    },
    ("forward", "wgmma"): {
        64: ((128, 64, 0, 8, 3, 128), (128, 64, 0, 8, 3), (64, 128, 0, 4, 3), (128, 128, 0, 8, 3)),
        128: ((128, 64, 0, 8, 3), (128, 64, 0, 8, 3), (64, 64, 0, 4, 3), (128, 128, 0, 8, 3)),
        256: ((128, 64, 0, 8, 2), (128, 32, 0, 8, 2), (64, 32, 0, 4, 3)),
    },
    ("rows", "fma"): dict.fromkeys((64, 128, 256), ((64, 32, 16, 8, 1),)),
    ("rows", "mma"): dict.fromkeys((64, 128, 256), ((64, 64, 64, 8, 1),)),
    ("rows", "wgmma"): dict.fromkeys((64, 128, 256), ((64, 64, 64, 8, 1),)),
    ("key_value", "fma"): {
        64: ((32, 64, 16, 8, 1), (16, 64, 16, 8, 2)),
        128: ((16, 32, 16, 8, 2),),
        256: ((16, 16, 16, 8, 2),),
    },
    ("key_value", "mma"): {
        64: ((32, 128, 0, 8, 2), (16, 64, 0, 8, 2), (32, 64, 0, 8, 2)),
        128: ((32, 64, 0, 8, 2), (32, 64, 0, 8, 2), (16, 128, 0, 8, 2)),
        256: ((16, 64, 0, 8, 1), (16, 64, 0, 8, 1), (16, 32, 0, 8, 1)),
    },
    ("key_value", "wgmma"): {
        64: ((64, 64, 0, 4, 2), (32, 128, 0, 8, 3), (64, 128, 0, 8, 3), (32, 128, 0, 8, 2)),
        128: ((64, 128, 0, 8, 3), (32, 128, 0, 8, 3), (32, 128, 0, 8, 2)),
        256: ((32, 64, 0, 8, 2), (32, 64, 0, 8, 2), (64, 64, 0, 8, 2)),
    },
    ("query", "fma"): {
        64: ((64, 32, 16, 8, 2),),
        128: ((64, 16, 16, 8, 2),),
        256: ((32, 16, 16, 8, 2),),
    },
    ("query", "mma"): {
        64: ((128, 32, 0, 8, 2), (64, 32, 0, 8, 2)),
        128: ((64, 32, 0, 4, 2), (64, 32, 0, 8, 2)),
        256: ((64, 16, 0, 8, 1),),
    },
    ("query", "wgmma"): {
        64: ((64, 64, 0, 4, 3), (128, 64, 0, 8, 3), (128, 64, 0, 4, 2)),
        128: ((128, 64, 0, 8, 3), (128, 64, 0, 8, 2), (64, 64, 0, 4, 2)),
        256: ((128, 32, 0, 8, 2),),
    },
    ("mask", "fma"): dict.fromkeys((64, 128, 256), ((32, 64, 16, 8, 1),)),
    ("mask", "mma"): {
        64: ((64, 64, 0, 8, 1),),
        128: ((64, 64, 64, 8, 1),),
        256: ((64, 64, 32, 8, 1),),
    },
    ("mask", "wgmma"): dict.fromkeys((64, 128, 256), ((64, 64, 0, 8, 1),)),
    # M is a multiple of N.
    ("relative_bias", "fma"): dict.fromkeys((64, 128, 256), ((64, 32, 16, 8, 1),)),
    ("relative_bias", "mma"): {
        64: ((64, 64, 0, 8, 1),),
        128: ((64, 64, 64, 8, 1),),
        256: ((64, 64, 32, 8, 1),),
    },
    ("relative_bias", "wgmma"): dict.fromkeys((64, 128, 256), ((64, 64, 0, 8, 1),)),
}
# A chunk has the tiles of the forward, and so its bits.
_TABLE |= {("chunk", unit): _TABLE["forward", unit] for unit in ("fma", "mma", "wgmma")}
# Joining chunks: a program owns one row; N is the number of chunks that it reads at a time.
_JOIN = (1, 16, 0, 4, 1)
_TABLE |= {
    ("join", unit): dict.fromkeys((64, 128, 256), (_JOIN,)) for unit in ("fma", "mma", "wgmma")
}
# The gradients of tables sum tiles of dS too.
_TABLE |= {
    (kernel, unit): _TABLE["mask", unit]
    for kernel in ("table", "query_bias", "key_bias")
    for unit in ("fma", "mma", "wgmma")
}


@functools.cache
def configs(workload: Workload) -> tuple[Config, ...]:
    """Returns the configurations worth trying; the first is used without autotuning."""
    if workload.unit == "interpreter":
        return (Config(*_JOIN) if workload.kernel == "join" else Config(64, 32, 32, 4, 1),)
    row = _TABLE[workload.kernel, workload.unit][workload.head_dim]
    default = row[min(workload.extras, len(row) - 1)]
    return tuple(Config(*sizes) for sizes in dict.fromkeys((default, *row)))


def launch_options(config: Config) -> dict[str, Any]:
    """Returns a configuration as keyword arguments of a launch."""
    *block, num_warps, num_stages, max_registers = config
    return {
        "block": AttentionBlock(*block),
        "num_warps": num_warps,
        "num_stages": num_stages,
        "maxnreg": max_registers,
    }


def multiplying_unit(device: torch.device, dtype: torch.dtype) -> str:
    """Returns the name of the unit that multiplies matrices of ``dtype``: ``Workload.unit``."""
    if device.type == "cpu":
        return "interpreter"
    if dtype == torch.float32:
        return "fma"
    return "wgmma" if _has_wgmma(device) else "mma"


@functools.cache
def _has_wgmma(device: torch.device) -> bool:
    """Hopper has wgmma, and data-centre Blackwell an equivalent."""
    return 9 <= torch.cuda.get_device_capability(device)[0] < 12
