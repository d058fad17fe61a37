"""The names of the modules in layers that run as one op, by the families that have them."""

from __future__ import annotations

from typing import Any, NamedTuple

from trifuse.recipes.arguments import BIAS, HIDDEN_STATES, MEMORY_BIAS


class Memory(NamedTuple):
    """The names, or paths, of the modules that attend to another sequence, an encoder's output."""

    attention: str
    query: str  # of the attention
    output: str
    norm: str
    dropout: str = ""  # the path of a dropout that no layer without such an attention has
    takes_options: bool = True  # whether further arguments of the layer reach the attention


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
    norms: tuple[str, str]  # "": the layer has no such norm
    dropouts: tuple[str, ...] = ()  # the paths of the dropouts
    rotates: bool = True  # whether queries and keys are rotated by their positions
    norm_first: bool | str = True  # a string: the layer's attribute that says so
    in_chunks: bool = False  # whether the network may run on one part of the tokens after another
    takes_cache: bool = False  # whether the parts append to a cache, and don't ignore it
    holders: tuple[str, ...] = ()  # further modules whose ``forward`` must be known
    takes_bias: bool = False  # whether layers share a bias of relative positions
    # The names of what a layer returns as a tuple; None: only its output.
    returns: tuple[str | None, ...] | None = None
    adapter: str | None = None  # the layer's attribute with a further module, or None
    result_norms: tuple[str, ...] = ()  # of the attention's result and of the network's
    # Whether both sublayers get the layer's input; a string: the attribute that says so.
    parallel: str | bool = False
    residual_first: bool = False  # whether their results are added to the input one by one
    # Whether the network's norm serves only if the sublayers follow each other.
    norm_if_serial: bool = False
    # Whether the joint projection makes query, key and value of one head, then those of the next.
    by_head: bool = False
    memory: Memory | None = None  # of layers in a decoder
    decoder: Names | None = None  # those of a layer of the same class whose ``is_decoder`` is true
    # Whether ``output`` is a path from the layer, because another module than the attention has it.
    outer_output: bool = False
    chunk: str = "ff_chunk"  # the method that computes such parts
    # Paths of attributes, and the values that the op needs.
    required: tuple[tuple[str, Any], ...] = ()
    # The paths of vectors that multiply the results of the attention and of the network. A layer
    # may lack them.
    factors: tuple[str, ...] = ()
    result_scale: str | None = None  # the attribute with a number that multiplies both results
    rotates_last: bool = False  # whether only the last tokens may be rotated
    drop_path: str | None = None  # a module that drops whole samples in training
    # The path of the module that calls ``activation``, if that is a function.
    activates: str | None = None
    # Whether the layer gets ALiBi (:mod:`trifuse.recipes.known_alibi`), and in which form.
    alibi: str | None = None
    # The name of a function in the class's module that drops elements, in training, and adds.
    adds: str | None = None
    unused: tuple[str, ...] = ()  # arguments that change nothing in layers that the op computes


LLAMAS = Names(
    attention="self_attn",
    projections=("q_proj", "k_proj", "v_proj"),
    output="o_proj",
    network="mlp",
    up="gate_proj",
    factor="up_proj",
    down="down_proj",
    activation="act_fn",
    norms=("input_layernorm", "post_attention_layernorm"),
    takes_cache=True,
)
GRANITES = LLAMAS._replace(result_scale="residual_multiplier")
MODERN_BERTS = Names(
    attention="attn",
    projections=("Wqkv",),
    output="Wo",
    network="mlp",
    up="Wi",
    factor="Wi",
    down="Wo",
    activation="act",
    norms=("attn_norm", "mlp_norm"),
    dropouts=("attn.out_drop", "mlp.drop"),
)
CLIPS = Names(
    attention="self_attn",
    projections=("q_proj", "k_proj", "v_proj"),
    output="out_proj",
    network="mlp",
    up="fc1",
    factor=None,
    down="fc2",
    activation="activation_fn",
    norms=("layer_norm1", "layer_norm2"),
    rotates=False,
)
GPT2S = Names(
    attention="attn",
    projections=("c_attn",),
    output="c_proj",
    network="mlp",
    up="c_fc",
    factor=None,
    down="c_proj",
    activation="act",
    norms=("ln_1", "ln_2"),
    dropouts=("attn.resid_dropout", "mlp.dropout"),
    rotates=False,
    takes_cache=True,
    memory=Memory(
        attention="crossattention",
        query="q_attn",
        output="c_proj",
        norm="ln_cross_attn",
        dropout="crossattention.resid_dropout",
        takes_options=False,
    ),
)
VITS = CLIPS._replace(
    attention="attention",
    output="o_proj",
    norms=("layernorm_before", "layernorm_after"),
    dropouts=("dropout",),
)
# The layer itself holds the network. Its dropouts are functions.
BARTS = Names(
    attention="self_attn",
    projections=("q_proj", "k_proj", "v_proj"),
    output="out_proj",
    network="",
    up="fc1",
    factor=None,
    down="fc2",
    activation="activation_fn",
    norms=("self_attn_layer_norm", "final_layer_norm"),
    rotates=False,
    norm_first=False,
    takes_cache=True,
    memory=Memory(
        attention="encoder_attn",
        query="q_proj",
        output="out_proj",
        norm="encoder_attn_layer_norm",
    ),
)
MBARTS = BARTS._replace(norm_first=True)
OPTS = BARTS._replace(norm_first="do_layer_norm_before", memory=None)
WAV2VEC2S = Names(
    attention="attention",
    projections=("q_proj", "k_proj", "v_proj"),
    output="out_proj",
    network="feed_forward",
    up="intermediate_dense",
    factor=None,
    down="output_dense",
    activation="intermediate_act_fn",
    norms=("layer_norm", "final_layer_norm"),
    dropouts=("dropout", "feed_forward.intermediate_dropout", "feed_forward.output_dropout"),
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
)
GEMMAS = LLAMAS._replace(
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    result_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
NEOXS = Names(
    attention="attention",
    projections=("query_key_value",),
    output="dense",
    network="mlp",
    up="dense_h_to_4h",
    factor=None,
    down="dense_4h_to_h",
    activation="act",
    norms=("input_layernorm", "post_attention_layernorm"),
    dropouts=("post_attention_dropout", "post_mlp_dropout"),
    takes_cache=True,
    parallel="use_parallel_residual",
    by_head=True,
)
DISTILBERTS = Names(
    attention="attention",
    projections=("q_lin", "k_lin", "v_lin"),
    output="out_lin",
    network="ffn",
    up="lin1",
    factor=None,
    down="lin2",
    activation="activation",
    norms=("sa_layer_norm", "output_layer_norm"),
    dropouts=("ffn.dropout",),
    rotates=False,
    norm_first=False,
    in_chunks=True,
)
ALBERTS = Names(
    attention="attention",
    projections=("query", "key", "value"),
    output="dense",
    network="",
    up="ffn",
    factor=None,
    down="ffn_output",
    activation="activation",
    norms=("attention.LayerNorm", "full_layer_layer_norm"),
    dropouts=("attention.output_dropout",),
    rotates=False,
    norm_first=False,
    in_chunks=True,
)
MPNETS = Names(
    attention="attention.attn",
    projections=("q", "k", "v"),
    output="o",
    network="",
    up="intermediate.dense",
    factor=None,
    down="output.dense",
    activation="intermediate.intermediate_act_fn",
    norms=("attention.LayerNorm", "output.LayerNorm"),
    dropouts=("attention.attn.dropout", "attention.dropout", "output.dropout"),
    rotates=False,
    norm_first=False,
    holders=("attention", "intermediate", "output"),
    takes_bias=True,
    returns=(HIDDEN_STATES,),
)
T5S = Names(
    attention="layer.0.SelfAttention",
    projections=("q", "k", "v"),
    output="o",
    network="layer.1.DenseReluDense",
    up="wi",
    factor=None,
    down="wo",
    activation="act",
    norms=("layer.0.layer_norm", "layer.1.layer_norm"),
    dropouts=("layer.0.dropout", "layer.1.DenseReluDense.dropout", "layer.1.dropout"),
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
    memory=Memory(
        attention="layer.1.EncDecAttention", query="q", output="o", norm="layer.1.layer_norm"
    ),
)
T5S = T5S._replace(decoder=T5_DECODERS)
GATED_T5S, GATED_T5_DECODERS = (
    names._replace(up="wi_0", factor="wi_1") for names in (T5S, T5_DECODERS)
)
PHIS = LLAMAS._replace(
    output="dense",
    up="fc1",
    factor=None,
    down="fc2",
    activation="activation_fn",
    norms=("input_layernorm", ""),
    dropouts=("resid_dropout",),
    parallel=True,
)
STABLE_LMS = LLAMAS._replace(
    dropouts=("dropout",),
    parallel="use_parallel_residual",
    residual_first=True,
    norm_if_serial=True,
)
OLMO2S = LLAMAS._replace(
    norms=("", ""), result_norms=("post_attention_layernorm", "post_feedforward_layernorm")
)
COHERES = LLAMAS._replace(norms=("input_layernorm", ""), parallel=True, residual_first=True)
# With one linear layer for the network's gate and its factor.
GLMS = LLAMAS._replace(up="gate_up_proj", factor="gate_up_proj", activation="activation_fn")
GLM4S = GLMS._replace(result_norms=("post_self_attn_layernorm", "post_mlp_layernorm"))
GPTJS = Names(
    attention="attn",
    projections=("q_proj", "k_proj", "v_proj"),
    output="out_proj",
    network="mlp",
    up="fc_in",
    factor=None,
    down="fc_out",
    activation="act",
    norms=("ln_1", ""),
    dropouts=("attn.resid_dropout", "mlp.dropout"),
    takes_cache=True,
    parallel=True,
)
# The norms of BERT's relatives come last, as RemBERT's, or first.
REMBERTS = Names(
    attention="attention.self",
    projections=("query", "key", "value"),
    output="attention.output.dense",
    network="",
    up="intermediate.dense",
    factor=None,
    down="output.dense",
    activation="intermediate.intermediate_act_fn",
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    dropouts=("attention.self.dropout", "attention.output.dropout", "output.dropout"),
    rotates=False,
    norm_first=False,
    in_chunks=True,
    holders=("attention", "attention.output", "intermediate", "output"),
    returns=(HIDDEN_STATES, None),
    outer_output=True,
    chunk="feed_forward_chunk",
)
MEGATRON_BERTS = REMBERTS._replace(norms=("attention.ln", "ln"), norm_first=True)
PRE_NORM_ROBERTAS = MEGATRON_BERTS._replace(
    norms=("attention.LayerNorm", "intermediate.LayerNorm"),
    returns=None,
    required=(("attention.is_cross_attention", False),),
)
XL_ROBERTAS = PRE_NORM_ROBERTAS._replace(
    norms=("attention.self_attn_layer_norm", "LayerNorm"),
    dropouts=("attention.self.dropout", "attention.output.dropout"),
)
ESMS = MEGATRON_BERTS._replace(
    activation="gelu",
    activates="intermediate",
    norms=("attention.LayerNorm", "LayerNorm"),
    dropouts=("attention.output.dropout", "output.dropout"),
    rotates=True,
    returns=None,
    required=(
        ("attention.self.position_embedding_type", "rotary"),
        ("attention.self.scaling", 1.0),  # queries are scaled before they are rotated
    ),
)
BLOOMS = Names(
    attention="self_attention",
    projections=("query_key_value",),
    output="dense",
    network="mlp",
    up="dense_h_to_4h",
    factor=None,
    down="dense_4h_to_h",
    activation="gelu_impl",
    norms=("input_layernorm", "post_attention_layernorm"),
    dropouts=("self_attention.attention_dropout",),
    rotates=False,
    takes_cache=True,
    by_head=True,
    returns=(HIDDEN_STATES, None),
    required=(
        ("apply_residual_connection_post_layernorm", False),
        ("self_attention.beta", 1.0),
        ("self_attention.slow_but_exact", False),
        ("mlp.slow_but_exact", False),
    ),
    alibi="bloom",
    adds="dropout_add",
)
MPTS = Names(
    attention="attn",
    projections=("Wqkv",),
    output="out_proj",
    network="ffn",
    up="up_proj",
    factor=None,
    down="down_proj",
    activation="act",
    norms=("norm_1", "norm_2"),
    dropouts=("resid_attn_dropout",),
    rotates=False,
    takes_cache=True,
    returns=(HIDDEN_STATES, None),
    required=(("attn.clip_qkv", None),),
    alibi="mpt",
)
# LayerScale multiplies the results of sublayers by vectors.
DINOV2S = VITS._replace(
    norms=("norm1", "norm2"),
    dropouts=(),
    holders=("layer_scale1", "layer_scale2"),
    factors=("layer_scale1.lambda1", "layer_scale2.lambda1"),
    drop_path="drop_path",
)
DINOV3S = DINOV2S._replace(
    up="up_proj", down="down_proj", activation="act_fn", rotates=True, rotates_last=True
)
GATED_DINOV2S, GATED_DINOV3S = (
    names._replace(up="gate_proj", factor="up_proj", down="down_proj", activation="act_fn")
    for names in (DINOV2S, DINOV3S)
)
BEITS = VITS._replace(
    factors=("lambda_1", "lambda_2"),
    drop_path="drop_path",
    required=(("relative_position_bias", None),),
    unused=("interpolate_pos_encoding", "resolution"),
)
