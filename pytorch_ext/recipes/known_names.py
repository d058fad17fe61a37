"""The names of the modules in layers that run as one op, by the families that have them."""

from __future__ import annotations

from typing import NamedTuple

from trifuse.recipes.arguments import BIAS, HIDDEN_STATES, MEMORY_BIAS


class Memory(NamedTuple):
    """The names, or paths, of the modules that attend to another sequence, an encoder's output."""

    attention: str
    query: str  # of the attention
    output: str
    norm: str


class Names(NamedTuple):
    """The names, or paths, that a library gives to the modules of such a layer."""

    attention: str
    projections: tuple[str, ...]  # of the attention
    output: str
    network: str  # "": the layer itself holds the network's modules
    up: str  # of the network
    factor: str | None  # the linear layer whose result multiplies the activation
    down: str
    activation: str
    norms: tuple[str, str]
    dropouts: tuple[str, ...] = ()  # the paths of the dropouts
    rotates: bool = True  # whether queries and keys are rotated by their positions
    rotates_partly: bool = False  # whether heads may have further features, which are not rotated
    norm_first: bool | str = True  # a string: the layer's attribute that says so
    in_chunks: bool = False  # whether the network may run on one part of the tokens after another
    takes_cache: bool = False  # whether the parts append to a cache, and don't ignore it
    holders: tuple[str, ...] = ()  # further modules whose ``forward`` must be known
    takes_bias: bool = False  # whether layers share a bias of relative positions
    # The names of what a layer returns as a tuple; None: only its output.
    returns: tuple[str | None, ...] | None = None
    adapter: str | None = None  # the layer's attribute with a further module, or None
    result_norms: tuple[str, ...] = ()  # of the attention's result and of the network's
    parallel: str | None = None  # the attribute that says whether both sublayers get the input
    # Whether the joint projection makes query, key and value of one head, then those of the next.
    by_head: bool = False
    memory: Memory | None = None  # of layers in a decoder
    decoder: Names | None = None  # those of a layer of the same class whose ``is_decoder`` is true


LLAMAS = Names(
    "self_attn",
    ("q_proj", "k_proj", "v_proj"),
    "o_proj",
    "mlp",
    "gate_proj",
    "up_proj",
    "down_proj",
    "act_fn",
    ("input_layernorm", "post_attention_layernorm"),
    takes_cache=True,
)
MODERN_BERTS = Names(
    "attn",
    ("Wqkv",),
    "Wo",
    "mlp",
    "Wi",
    "Wi",
    "Wo",
    "act",
    ("attn_norm", "mlp_norm"),
    ("attn.out_drop", "mlp.drop"),
)
CLIPS = Names(
    "self_attn",
    ("q_proj", "k_proj", "v_proj"),
    "out_proj",
    "mlp",
    "fc1",
    None,
    "fc2",
    "activation_fn",
    ("layer_norm1", "layer_norm2"),
    rotates=False,
)
GPT2S = Names(
    "attn",
    ("c_attn",),
    "c_proj",
    "mlp",
    "c_fc",
    None,
    "c_proj",
    "act",
    ("ln_1", "ln_2"),
    ("attn.resid_dropout", "mlp.dropout"),
    rotates=False,
    takes_cache=True,
)
VITS = CLIPS._replace(
    attention="attention",
    output="o_proj",
    norms=("layernorm_before", "layernorm_after"),
    dropouts=("dropout",),
)
# The layer itself holds the network. Its dropouts are functions.
BARTS = Names(
    "self_attn",
    ("q_proj", "k_proj", "v_proj"),
    "out_proj",
    "",
    "fc1",
    None,
    "fc2",
    "activation_fn",
    ("self_attn_layer_norm", "final_layer_norm"),
    rotates=False,
    norm_first=False,
    takes_cache=True,
    memory=Memory("encoder_attn", "q_proj", "out_proj", "encoder_attn_layer_norm"),
)
MBARTS = BARTS._replace(norm_first=True)
OPTS = BARTS._replace(norm_first="do_layer_norm_before", memory=None)
WAV2VEC2S = Names(
    "attention",
    ("q_proj", "k_proj", "v_proj"),
    "out_proj",
    "feed_forward",
    "intermediate_dense",
    None,
    "output_dense",
    "intermediate_act_fn",
    ("layer_norm", "final_layer_norm"),
    ("dropout", "feed_forward.intermediate_dropout", "feed_forward.output_dropout"),
    rotates=False,
    norm_first=False,
)
STABLE_WAV2VEC2S = WAV2VEC2S._replace(norm_first=True, adapter="adapter_layer")
PHI3S = LLAMAS._replace(
    projections=("qkv_proj",),
    up="gate_up_proj",
    factor="gate_up_proj",
    activation="activation_fn",
    dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
    rotates_partly=True,
)
GEMMAS = LLAMAS._replace(
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    result_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
NEOXS = Names(
    "attention",
    ("query_key_value",),
    "dense",
    "mlp",
    "dense_h_to_4h",
    None,
    "dense_4h_to_h",
    "act",
    ("input_layernorm", "post_attention_layernorm"),
    ("post_attention_dropout", "post_mlp_dropout"),
    rotates_partly=True,
    takes_cache=True,
    parallel="use_parallel_residual",
    by_head=True,
)
DISTILBERTS = Names(
    "attention",
    ("q_lin", "k_lin", "v_lin"),
    "out_lin",
    "ffn",
    "lin1",
    None,
    "lin2",
    "activation",
    ("sa_layer_norm", "output_layer_norm"),
    ("ffn.dropout",),
    rotates=False,
    norm_first=False,
    in_chunks=True,
)
ALBERTS = Names(
    "attention",
    ("query", "key", "value"),
    "dense",
    "",
    "ffn",
    None,
    "ffn_output",
    "activation",
    ("attention.LayerNorm", "full_layer_layer_norm"),
    ("attention.output_dropout",),
    rotates=False,
    norm_first=False,
    in_chunks=True,
)
MPNETS = Names(
    "attention.attn",
    ("q", "k", "v"),
    "o",
    "",
    "intermediate.dense",
    None,
    "output.dense",
    "intermediate.intermediate_act_fn",
    ("attention.LayerNorm", "output.LayerNorm"),
    ("attention.attn.dropout", "attention.dropout", "output.dropout"),
    rotates=False,
    norm_first=False,
    holders=("attention", "intermediate", "output"),
    takes_bias=True,
    returns=(HIDDEN_STATES,),
)
T5S = Names(
    "layer.0.SelfAttention",
    ("q", "k", "v"),
    "o",
    "layer.1.DenseReluDense",
    "wi",
    None,
    "wo",
    "act",
    ("layer.0.layer_norm", "layer.1.layer_norm"),
    ("layer.0.dropout", "layer.1.DenseReluDense.dropout", "layer.1.dropout"),
    rotates=False,
    holders=("layer.0", "layer.1"),
    takes_bias=True,
    returns=(HIDDEN_STATES, BIAS, None),
)
T5_DECODERS = T5S._replace(
    network="layer.2.DenseReluDense",
    norms=("layer.0.layer_norm", "layer.2.layer_norm"),
    dropouts=(
        *("layer.0.dropout", "layer.1.dropout"),
        *("layer.2.DenseReluDense.dropout", "layer.2.dropout"),
    ),
    holders=("layer.0", "layer.1", "layer.2"),
    takes_cache=True,
    returns=(HIDDEN_STATES, BIAS, MEMORY_BIAS),
    memory=Memory("layer.1.EncDecAttention", "q", "o", "layer.1.layer_norm"),
)
T5S = T5S._replace(decoder=T5_DECODERS)
GATED_T5S, GATED_T5_DECODERS = (
    names._replace(up="wi_0", factor="wi_1") for names in (T5S, T5_DECODERS)
)
