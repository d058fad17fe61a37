"""The C++ extension: what it was built with, plain calls, and hooks for tests and benchmarks.

Ops are not here; they go through ``torch.ops.trifuse``.
"""

from typing import Any

from torch import Tensor

def build_info() -> dict[str, Any]:
    """Build information by key.

    "capabilities": the compiled instruction sets. "compiler". "torch". "cuda": the operators with
    CUDA kernels. "cuda_code", if there are any: their architectures, such as "sm_90,compute_90"
    (compute_ is PTX).
    """

def cpu_maker() -> str:
    """The CPU's maker: "AMD", "Intel" or "other"."""

def cpu_capability() -> str:
    """The instruction set in use."""

def cpu_capabilities() -> list[str]:
    """The compiled instruction sets that this machine can run, least capable first."""

def set_cpu_capability(name: str) -> str:
    """Use another instruction set; returns the previous one.

    Raises ValueError if the machine can't run it.
    """

def has_matrix_unit() -> bool:
    """Whether bfloat16 products can run on AMX here."""

def split_pairs(split: bool) -> bool:
    """Whether AVX512_BF16 multiplies a pair by two multiply-adds; returns the choice before.

    Otherwise by a dot product. Both give the same bits.
    """

def use_matrix_unit(use: bool) -> None:
    """Whether AMX_BF16 uses the unit, if there is one, or the software in its place."""

def matrix_rate(dtype: str, seconds: float = 0.2) -> float:
    """FLOP/s of all threads' matrix products on tiles in their L1 caches.

    Args:
        dtype: "float32" or "bfloat16".
    """

def register_autograd(op: str, companion: str) -> None:
    """Run ``companion`` in place of ``op`` where a derivative is wanted.

    Both are "name.overload" in the namespace trifuse, and have the same schema.
    """

def attention(
    query: object,
    key: object,
    value: object,
    attn_mask: object,
    dropout_p: object,
    is_causal: object,
    scale: object,
    enable_gqa: object,
    key_lengths: object,
    return_lse: object,
    /,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """The results of a plain and valid call, or None for any other.

    The arguments are those of ``trifuse.scaled_dot_product_attention``. A plain call has dense
    tensors on the CPU or on one NVIDIA GPU, of no subclass, in four dimensions, and runs while no
    mode or transform watches. The caller has found that the CUDA kernels serve a call on a GPU.
    """

def packed_attention(
    query: object,
    key: object,
    value: object,
    cu_seqlens_q: object,
    cu_seqlens_k: object,
    max_seqlen_q: object,
    max_seqlen_k: object,
    dropout_p: object,
    is_causal: object,
    scale: object,
    enable_gqa: object,
    /,
) -> Tensor | None:
    """Likewise with those of ``trifuse.varlen_attention``, but of (1, H, T, E) tensors."""

def dropout_add_layer_norm(
    x: object,
    residual: object,
    weight: object,
    bias: object,
    dropout_p: object,
    eps: object,
    training: object,
    prenorm: object,
    x_bias: object,
    rms_norm: object,
    /,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Likewise with the arguments of ``trifuse.dropout_add_layer_norm``; nothing may broadcast."""

def linear(
    x: object,
    weight: object,
    bias: object,
    activation: object,
    up: object,
    up_bias: object,
    unpacked_below: object,
    recorded_from: object,
    /,
) -> Tensor | None:
    """The result of a plain and valid call, or None for any other.

    Arguments as in :func:`trifuse.ops.linear.linear`; ``up`` and ``up_bias`` are the second weight
    and bias of a gated layer, which needs no gradient. A call without gradients is served if it has
    fewer rows than ``unpacked_below``. One with gradients runs on trifuse's product from
    ``recorded_from`` rows on, and on torch's otherwise.
    """

def dropout(x: object, p: object, /) -> Tensor | None:
    """The result of a plain and valid call in training, or None for any other."""

def split_heads(
    x: object, count: object, heads: object, batch_first: object, /
) -> Tensor | tuple[Tensor, ...] | None:
    """As :func:`trifuse.ops.heads.split_heads`, or None for a call that is not plain."""

def linear_packed(
    x: object,
    packed: object,
    out_features: object,
    in_features: object,
    bias: object,
    activation: object,
    up: object,
    up_bias: object,
    /,
) -> Tensor | None:
    """The result of a plain and valid call without gradients, or None for any other.

    ``packed`` is the packed weight of ``torch.ops.trifuse.linear_packed``, of x's dtype; ``up``,
    that of a gated layer's second weight.
    """

encoder_layer_options: tuple[str, ...]  # the names of encoder_layer's options, in order

def encoder_layer(
    x: object,
    attn_mask: object,
    cu_seqlens: object,
    max_seqlen: object,
    weights: object,
    biases: object,
    norms: object,
    options: object,
    key_cache: object,
    value_cache: object,
    past: object,
    cos: object,
    sin: object,
    relative_bias: object,
    memory_key: object,
    memory_value: object,
    memory_mask: object,
    /,
) -> Tensor | None:
    """The result of a plain and valid call without gradients, or None for any other.

    The arguments are those of ``trifuse.ops.encoder_layer.encoder_layer``, its tuples ``cache``,
    ``rotary`` and ``memory`` taken apart.
    """

def post_norm_layers(
    x: object,
    attn_mask: object,
    cu_seqlens: object,
    max_seqlen: object,
    layers: tuple[tuple[object, ...], ...],
    dropout_p: tuple[object, ...],
    /,
) -> Tensor | None:
    """The result of a plain and valid call, with gradients too, or None for any other.

    The arguments are those of ``trifuse.ops.post_norm_layers.post_norm_layers``.
    """

def embed(
    ids: tuple[object, ...],
    tables: tuple[object, ...],
    weight: object,
    bias: object,
    eps: float,
    last_is_residual: bool,
    /,
) -> Tensor | None:
    """The LayerNorm of a sum of embeddings, or None for a call that isn't plain and valid.

    The arguments are those of ``trifuse.ops.embeddings.embed``.
    """

def embedded_rows(
    ids: tuple[object, ...], tables: tuple[object, ...], paddings: tuple[object, ...], /
) -> tuple[Tensor, Tensor] | None:
    """The sum of embeddings but the last, and the last, or None for a call that isn't plain.

    The arguments are those of ``trifuse.ops.embeddings.embedded_rows``.
    """

def encoder_model(
    parts: tuple[object, ...],
    idle: dict[str, Any] | None,
    words: object,
    padding: object,
    types: object,
    positions: object,
    /,
) -> tuple[Tensor, Tensor | None] | None:
    """Hidden states and pooled output, or None for a call that isn't plain.

    The arguments are those of ``trifuse.ops.encoder_model.encoder_model``.
    """

def planned(
    modules: tuple[tuple[dict[str, Any], str, object, type], ...],
    values: tuple[
        tuple[dict[str, Any] | type, str, object] | tuple[dict[str, Any], str | int], ...
    ],
    /,
) -> Any:
    """What must hold before a call, for the functions below.

    Args:
        modules: of each its parent's ``_modules``, its name, itself, and its class.
        values: dictionaries or classes, keys, and their values; or dictionaries, and keys that they
            must lack, or their sizes.
    """

def values_as_planned(planned: object, /) -> bool: ...
def modules_as_planned(planned: object, idle: dict[str, Any] | None, trained: bool, /) -> bool:
    """Whether modules have the name and class that they had, evaluate unless ``trained``, and run
    nothing but their class's ``forward``.

    Args:
        idle: the globals of forward hooks that do nothing now; None if there are none.
        trained: the modules may train, and have no backward hooks either.
    """

def recurrent(
    name: str,
    input: object,
    h0: object,
    c0: object,
    parameters: tuple[object, ...],
    option: object,
    one_step: bool,
    /,
) -> tuple[Any, ...] | None:
    """The output, h_n and of an lstm c_n of a layer, or of one step, by the op ``name``_plain.

    ``option`` is the one that a gru or an rnn has. None if the call is not plain or not valid.
    """

def plain_call(*tensors: object) -> bool:
    """Whether a call on these tensors, or None, may skip the checks in Python."""

def fail_allocations(first: int, count: int = 1) -> None:
    """For tests: make ``count`` allocations fail, starting with the ``first`` from now.

    Counts from 1, and counts torch's own allocations on a CPU too. ``first`` = 0 stops the failing.

    If an allocation of the kernels fails, they release the cached memory of freed results and try
    again. The second attempt counts as an allocation.
    """

def counted_allocations() -> int:
    """Allocations since ``fail_allocations`` was last called with a non-zero ``first``."""

def throw_in_crew(threads: int, thread: int) -> None:
    """For tests: throw RuntimeError in one thread of a crew while the others wait for it."""

def exp2(x: Tensor) -> Tensor:
    """2ˣ of float32 as the kernels compute it."""

def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e⁻ˣ) of float32 as the kernels compute it."""

def tanh(x: Tensor) -> Tensor:
    """tanh(x) of float32 as the kernels compute it."""
