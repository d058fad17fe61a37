"""The Transformer in plain ``torch.nn``: the eager baseline for translation and language models.

Vaswani, Shazeer, Parmar, Uszkoreit, Jones, Gomez, Kaiser and Polosukhin, "Attention Is All You
Need" (2017); its sections are cited as VASWANI. :class:`Transformer` is that paper's encoder and
decoder, :class:`LanguageModel` a decoder alone, as in GPT-2 (Radford, Wu, Child, Luan, Amodei and
Sutskever, "Language Models are Unsupervised Multitask Learners", 2019) and, with the norms after
the sublayers, in GPT (Radford, Narasimhan, Salimans and Sutskever, "Improving Language
Understanding by Generative Pre-Training", 2018).

The layers are torch's own, which :func:`trifuse.fuse` supports. They have no key/value cache, so
decoding calls their parts step by step. It does so through three modules without parameters,
:class:`Products`, :class:`SoftmaxAttention` and :class:`AddNorm`. Only torch is imported here.

Boolean masks are True where a token is real. In the shapes below B is the batch, S the length of
the source, T the length of the target, L the length of a text, W the beams for each source, N the
targets being written, H the heads, E the head dimension and V the vocabulary; d_model is H · E.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trifuse.models._key_value_cache import KeyValueCache, Padding, PromptCache
from trifuse.models._tokens import (
    at_last_token,
    check_mask,
    check_pair,
    check_prompt,
    check_tokens,
    class_indices,
    real_lengths,
)
from trifuse.models.decoding import (
    Decoded,
    beam_search,
    check_evaluating,
    greedy_search,
    sample,
)

__all__ = [
    "AddNorm",
    "Attentions",
    "Decoded",
    "DecodingState",
    "KeyValueCache",
    "LanguageModel",
    "LanguageModelConfig",
    "LanguageModelOutput",
    "Products",
    "PromptCache",
    "SinusoidalPositions",
    "SoftmaxAttention",
    "Transformer",
    "TransformerConfig",
    "beam_search",
    "greedy_search",
    "log_likelihood",
    "sample",
    "token_loss",
    "warmup_inverse_sqrt",
]

# The models -------------------------------------------------------------------------------------


@dataclass
class TransformerConfig:
    """The sizes and rates of a :class:`Transformer`; the defaults are VASWANI's base model.

    The fields are named as the arguments of ``torch.nn.Transformer``. ``max_length`` bounds source
    and target. As in torch's layers, ``dropout`` also applies to the attention weights and to the
    feed-forward network's inner activations, unlike in the paper.

    Raises:
        ValueError: ``d_model`` is odd, or not a multiple of ``nhead``; ``nhead`` or a number of
            layers is below 1.
    """

    vocab_size: int = 37000
    d_model: int = 512
    nhead: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    dim_feedforward: int = 2048
    dropout: float = 0.1
    activation: str = "relu"
    layer_norm_eps: float = 1e-5
    norm_first: bool = False
    max_length: int = 1024

    def __post_init__(self) -> None:
        _check_heads(self.d_model, self.nhead)
        _check_at_least_1("num_encoder_layers", self.num_encoder_layers)
        _check_at_least_1("num_decoder_layers", self.num_decoder_layers)
        if self.d_model % 2:
            raise ValueError(f"d_model: expected an even number; got {self.d_model}")


@dataclass
class LanguageModelConfig:
    """The sizes and rates of a :class:`LanguageModel`; the defaults are GPT-2's smallest.

    ``norm_first`` is torch's name: normalise before each sublayer and after the last layer, as in
    GPT-2, or only after each sublayer, as in GPT.

    Raises:
        ValueError: ``d_model`` is not a multiple of ``nhead``, or ``nhead`` or ``num_layers`` is
            below 1.
    """

    vocab_size: int = 50257
    d_model: int = 768
    nhead: int = 12
    num_layers: int = 12
    dim_feedforward: int = 3072
    dropout: float = 0.1
    activation: str = "gelu"
    layer_norm_eps: float = 1e-5
    max_length: int = 1024
    initializer_range: float = 0.02
    norm_first: bool = True

    def __post_init__(self) -> None:
        _check_heads(self.d_model, self.nhead)
        _check_at_least_1("num_layers", self.num_layers)


def _check_at_least_1(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}: expected at least 1; got {value}")


def _check_heads(d_model: int, nhead: int) -> None:
    _check_at_least_1("nhead", nhead)
    if d_model % nhead:
        raise ValueError(f"d_model: expected a multiple of nhead={nhead}; got {d_model}")


class SinusoidalPositions(nn.Module):
    """Add sin(p / 10000^(2i / d_model)) to feature 2i of position p, and its cosine to 2i + 1.

    VASWANI 3.5.
    """

    table: Tensor  # (max_length, d_model)

    def __init__(self, max_length: int, d_model: int) -> None:
        super().__init__()
        positions = torch.arange(max_length, dtype=torch.float64)
        exponents = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model
        angles = positions[:, None] / 10000**exponents
        table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
        self.register_buffer("table", table.to(torch.get_default_dtype()), persistent=False)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Add positions ``start``, ``start`` + 1, … to (B, L, d_model).

        Raises:
            ValueError: a position lies past the table.
        """
        stop = start + x.shape[1]
        _check_length("x", stop, self.table.shape[0])
        return x + self.table[start:stop]


def _check_length(what: str, length: int, limit: int) -> None:
    if length > limit:
        raise ValueError(f"{what}: expected at most max_length={limit} positions; got {length}")


class Products(nn.Module):
    """The products of a layer with its weights while decoding. Holds no parameters."""

    def project(
        self, attention: nn.MultiheadAttention, x: Tensor, which: Literal["qkv", "kv", "q"]
    ) -> tuple[Tensor, ...]:
        """Heads (N, H, n, E) of query, key and value, or of those named, from (N, n, d_model)."""
        rows = slice(*{"qkv": (0, 3), "kv": (1, 3), "q": (0, 1)}[which])
        weight, bias = (
            parameter.unflatten(0, (3, -1))[rows].flatten(0, 1)
            for parameter in (attention.in_proj_weight, attention.in_proj_bias)
        )
        return tuple(
            part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            for part in F.linear(x, weight, bias).split(attention.embed_dim, dim=-1)
        )

    def project_out(self, attention: nn.MultiheadAttention, heads: Tensor) -> Tensor:
        """The attention's output (N, n, d_model), from the heads (N, H, n, E)."""
        return attention.out_proj(heads.transpose(1, 2).flatten(-2))

    def feed_forward(
        self, layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, x: Tensor
    ) -> Tensor:
        """The feed-forward network of (N, n, d_model), without dropout."""
        return layer.linear2(layer.activation(layer.linear1(x)))

    def run_stack(
        self, stack: nn.TransformerEncoder, x: Tensor, past: KeyValueCache
    ) -> Tensor | None:
        """The output of a whole causal stack for (N, n, d_model), appended to the cache.

        None if the stack must run by its parts.
        """
        return None


class SoftmaxAttention(nn.Module):
    """softmax(Q Kᵀ / √E + mask) V, from projected heads, while decoding. Holds no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout_p = 0.0

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend.

        Args:
            query: (B, H, Lq, E).
            key, value: (B, H, Lk, E).
            mask: bool (B, Lk), True where a key takes part; or broadcastable to (B, H, Lq, Lk).

        Returns:
            (B, H, Lq, E).
        """
        if mask is not None and mask.dim() == 2:
            mask = mask[:, None, None, :]
        return F.scaled_dot_product_attention(query, key, value, mask)


class AddNorm(nn.Module):
    """The end of a sublayer while decoding, where nothing is dropped. Holds no parameters."""

    def forward(self, x: Tensor, residual: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """norm(s) and s = residual + x, where x is a sublayer's output."""
        total = residual + x
        return norm(total), total


class Transformer(nn.Module):
    """An encoder and a decoder that share one embedding, which is also the output projection.

    Embeddings are multiplied by √d_model at the input (VASWANI 3.4). Matrices start Xavier uniform
    (Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    2010), where the three input projections of an attention count as one matrix of 3 d_model rows.
    Biases start at 0, and embeddings normal with variance 1 / d_model, so that inputs and logits
    both start near variance 1.

    Args:
        config: the sizes.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        d_model, eps = config.d_model, config.layer_norm_eps
        layer: dict[str, Any] = {
            "d_model": d_model,
            "nhead": config.nhead,
            "dim_feedforward": config.dim_feedforward,
            "dropout": config.dropout,
            "activation": config.activation,
            "layer_norm_eps": eps,
            "batch_first": True,
            "norm_first": config.norm_first,
        }
        # With norm_first the layers leave their sum unnormalised, so each stack ends with a norm.
        norms = [nn.LayerNorm(d_model, eps=eps) if config.norm_first else None for _ in range(2)]
        self.embedding = nn.Embedding(config.vocab_size, d_model)
        self.positions = SinusoidalPositions(config.max_length, d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**layer),
            config.num_encoder_layers,
            norms[0],
            enable_nested_tensor=False,  # NestedTensors cut the output to the longest source
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(**layer), config.num_decoder_layers, norms[1]
        )
        self.output = nn.Linear(d_model, config.vocab_size, bias=False)
        self.output.weight = self.embedding.weight
        self.products = Products()
        self.attention = SoftmaxAttention()
        self.add_norm = AddNorm()
        self._initialise()

    @property
    def max_target_length(self) -> int:
        return self.config.max_length

    @torch.no_grad()
    def _initialise(self) -> None:
        self.embedding.weight.normal_(0.0, self.config.d_model**-0.5)
        for stack in (self.encoder, self.decoder):
            for name, parameter in stack.named_parameters():
                if parameter.dim() == 2:
                    nn.init.xavier_uniform_(parameter)
                elif name.endswith("bias"):
                    parameter.zero_()

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, V) for the token that follows each position of the target.

        Args:
            source: integers (B, S).
            target: integers (B, T), starting with the token that begins every target.
            source_mask: bool (B, S), True where a token is real; at least one in each row.
            target_mask: bool (B, T), True where a token is real. Even without it, padding at the
                end does not change real positions.

        Raises:
            ValueError: source or target has another shape or more positions than
                ``config.max_length``, or a mask isn't boolean or hasn't its tokens' shape.
        """
        check_pair(source, target)
        memory = self.encode(source, source_mask)
        check_mask("target_mask", target_mask, target)
        decoded = self.decoder(
            self.dropout(self._embed("target", target)),
            memory,
            tgt_mask=_future(target.shape[1], target.device),
            tgt_is_causal=True,
            tgt_key_padding_mask=_padding(target_mask),
            memory_key_padding_mask=_padding(source_mask),
        )
        return self.output(decoded)

    def attentions(
        self, source: Tensor, target: Tensor, source_mask: Tensor | None = None
    ) -> Attentions:
        """The weights of every layer's attentions, each a softmax over keys.

        Every layer's attention runs once more, by the formula, to get them. Arguments and errors
        as in :meth:`forward`; the model is in evaluation mode.
        """
        check_evaluating(self)
        check_pair(source, target)
        check_mask("source_mask", source_mask, source)
        encoder, decoder, cross = [], [], []
        padding, future = _padding(source_mask), _future(target.shape[1], target.device)
        x = self.dropout(self._embed("source", source))
        for layer in self.encoder.layers:
            encoder.append(_self_attention(layer, x, key_padding_mask=padding)[1])
            x = layer(x, src_key_padding_mask=padding)
        memory = x if self.encoder.norm is None else self.encoder.norm(x)
        x = self.dropout(self._embed("target", target))
        for layer in self.decoder.layers:
            attended, weights = _self_attention(layer, x, attn_mask=future)
            decoder.append(weights)
            query = x + attended
            query = layer.norm2(query) if self.config.norm_first else layer.norm1(query)
            cross.append(
                _attention(layer.multihead_attn, query, memory, key_padding_mask=padding)[1]
            )
            x = layer(
                x, memory, tgt_mask=future, tgt_is_causal=True, memory_key_padding_mask=padding
            )
        return Attentions(tuple(encoder), tuple(decoder), tuple(cross))

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """The encoder's output (B, S, d_model). Arguments and errors as in :meth:`forward`."""
        check_mask("source_mask", source_mask, source)
        embedded = self.dropout(self._embed("source", source))
        return self.encoder(embedded, src_key_padding_mask=_padding(source_mask))

    def start(self, source: Tensor, source_mask: Tensor | None = None) -> DecodingState:
        """Encode a source, and project it once to the keys and values of every decoder layer."""
        memory = self.encode(source, source_mask)
        projected = []
        for layer in self.decoder.layers:
            projected.append(self.products.project(layer.multihead_attn, memory, "kv"))
        return DecodingState(KeyValueCache(), projected, source_mask)

    def step(self, tokens: Tensor, state: DecodingState) -> Tensor:
        """Logits (N, n, V) after each of n further tokens, without dropout.

        Args:
            tokens: integers (N, n). N is a multiple of the number of sources in ``state``; the rows
                of one source are adjacent.
            state: from :meth:`start`; the tokens' keys and values are appended to its cache.

        Raises:
            ValueError: the cached and the new tokens exceed ``config.max_length``.
        """
        x = self._embed("tokens", tokens, state.past.length)
        sublayers, norms = [], []
        for index, layer in enumerate(self.decoder.layers):
            sublayers += self._sublayers(layer, index, state)
            norms += [layer.norm1, layer.norm2, layer.norm3]
        return self.output(_run_sublayers(self.add_norm, x, sublayers, norms, self.decoder.norm))

    def _sublayers(
        self, layer: nn.TransformerDecoderLayer, index: int, state: DecodingState
    ) -> list[Sublayer]:
        def attend_to_past(x: Tensor) -> Tensor:
            return _attend_to_past(self, layer.self_attn, x, state.past, index)

        def attend_to_memory(x: Tensor) -> Tensor:
            # All rows of one source share its keys, so they become further queries of one row.
            key, value = state.memory[index]
            B = key.shape[0]
            queries = x.reshape(B, x.shape[0] // max(B, 1) * x.shape[1], x.shape[-1])
            (query,) = self.products.project(layer.multihead_attn, queries, "q")
            out = self.attention(query, key, value, state.memory_mask)
            return self.products.project_out(layer.multihead_attn, out).view_as(x)

        feed_forward = functools.partial(self.products.feed_forward, layer)
        return [attend_to_past, attend_to_memory, feed_forward]

    def _embed(self, name: str, tokens: Tensor, start: int = 0) -> Tensor:
        check_tokens(name, tokens)
        _check_length(name, start + tokens.shape[1], self.config.max_length)
        embedded = self.embedding(tokens) * math.sqrt(self.config.d_model)
        return self.positions(embedded, start)


class LanguageModelOutput(NamedTuple):
    """The output of :class:`LanguageModel` with ``output_hidden_states``."""

    logits: Tensor  # (B, L, V)
    # The embeddings, then each layer's result, (B, L, d_model) each. The last one is after the
    # final norm, if there is one: the output projection reads it.
    hidden_states: tuple[Tensor, ...]


class LanguageModel(nn.Module):
    """A causal Transformer over one text, with learnt positions.

    With ``norm_first`` a norm follows the last layer. The output projection is the embedding.
    Weights start normal with standard deviation ``initializer_range``. With ``norm_first`` the
    2 · num_layers weights whose output is added to the residual stream are scaled by
    1 / √(2 · num_layers), so that the sum of all additions starts as large as one unscaled addition
    (GPT-2, 2.3). Biases start at 0.

    Args:
        config: the sizes.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.max_length, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        layer = nn.TransformerEncoderLayer(
            config.d_model,
            config.nhead,
            config.dim_feedforward,
            config.dropout,
            config.activation,
            config.layer_norm_eps,
            batch_first=True,
            norm_first=config.norm_first,
        )
        norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.decoder = nn.TransformerEncoder(
            layer,
            config.num_layers,
            norm if config.norm_first else None,
            enable_nested_tensor=False,
        )
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.output.weight = self.embedding.weight
        self.products = Products()
        self.attention = SoftmaxAttention()
        self.add_norm = AddNorm()
        self._initialise()

    @property
    def max_target_length(self) -> int:
        return self.config.max_length

    @torch.no_grad()
    def _initialise(self) -> None:
        std = self.config.initializer_range
        added = std / math.sqrt(2 * self.config.num_layers) if self.config.norm_first else std
        for name, parameter in self.named_parameters():
            if name.endswith(("out_proj.weight", "linear2.weight")):
                parameter.normal_(0.0, added)
            elif parameter.dim() == 2:
                parameter.normal_(0.0, std)
            elif name.endswith("bias"):
                parameter.zero_()

    @overload
    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        *,
        output_hidden_states: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, *, output_hidden_states: bool
    ) -> Tensor | LanguageModelOutput: ...

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, *, output_hidden_states: bool = False
    ) -> Tensor | LanguageModelOutput:
        """Logits (B, L, V) for the token that follows each position.

        Args:
            tokens: integers (B, L).
            mask: bool (B, L), True where a token is real. Even without it, padding at the end does
                not change real positions.
            output_hidden_states: return a :class:`LanguageModelOutput`.

        Raises:
            ValueError: the tokens have another shape or more positions than ``config.max_length``,
                or the mask isn't boolean or hasn't the tokens' shape.
        """
        check_mask("mask", mask, tokens)
        if not output_hidden_states:
            return self.output(self._decode(tokens, mask))
        states = self._hidden_states(tokens, mask)
        return LanguageModelOutput(self.output(states[-1]), states)

    def features(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, L, d_model), which the output projection reads.

        Arguments and errors as in :meth:`forward`.
        """
        check_mask("mask", mask, tokens)
        return self._decode(tokens, mask)

    def _decode(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        return self.decoder(
            self.dropout(self._embed(tokens)),
            mask=_future(tokens.shape[1], tokens.device),
            is_causal=True,
            src_key_padding_mask=_padding(mask),
        )

    def _hidden_states(self, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        future, padding = _future(tokens.shape[1], tokens.device), _padding(mask)
        states = [self.dropout(self._embed(tokens))]
        states += layer_by_layer(self.decoder, states[0], future, padding)
        return tuple(states)

    def start(self, prompt: Tensor, prompt_mask: Tensor | None = None) -> PromptCache:
        """Read texts that :meth:`step` continues, without dropout.

        Args:
            prompt: integers (B, L), at least one in each row.
            prompt_mask: bool (B, L), True where a token is real. Padding comes after a row's
                tokens; those that :meth:`step` adds follow the last real one, as if the row had no
                padding.

        Raises:
            ValueError: more positions than ``config.max_length``, no positions, or the mask is not
                as above.
        """
        check_prompt(prompt)
        lengths = None if prompt_mask is None else real_lengths("prompt_mask", prompt_mask, prompt)
        cache = PromptCache(self.config.max_length)
        features = self._step(prompt, cache)
        if lengths is None or (lengths == prompt.shape[1]).all():
            last = features[:, -1]
        else:
            last = at_last_token(features, lengths)
            cache.leave_out(lengths)
        cache.logits = self.output(last)
        return cache

    def step(self, tokens: Tensor, past: KeyValueCache) -> Tensor:
        """Logits (N, n, V) after each of n further tokens, without dropout.

        Args:
            tokens: integers (N, n). N is a multiple of the number of texts in ``past``; the rows
                that continue one text are adjacent.
            past: an empty cache at the beginning, or that of :meth:`start`; the tokens' keys and
                values are appended to it.

        Raises:
            ValueError: the cached and the new tokens exceed ``config.max_length``, or N is not such
                a multiple.
        """
        return self.output(self._step(tokens, past))

    def _step(self, tokens: Tensor, past: KeyValueCache) -> Tensor:
        past.expand(len(tokens))
        x = self._embed(tokens, past.length, past.padding)
        whole = self.products.run_stack(self.decoder, x, past)
        if whole is not None:
            return whole
        sublayers: list[Sublayer] = []
        norms = []
        for index, layer in enumerate(self.decoder.layers):
            sublayers += [
                functools.partial(_attend_to_past, self, layer.self_attn, past=past, layer=index),
                functools.partial(self.products.feed_forward, layer),
            ]
            norms += [layer.norm1, layer.norm2]
        return _run_sublayers(self.add_norm, x, sublayers, norms, self.decoder.norm)

    def _embed(self, tokens: Tensor, start: int = 0, padding: Padding | None = None) -> Tensor:
        """The tokens' embeddings with those of the positions from ``start`` on, less padding."""
        check_tokens("tokens", tokens)
        stop = start + tokens.shape[1]
        _check_length(
            "tokens", stop - (0 if padding is None else padding.least), self.config.max_length
        )
        positions = torch.arange(start, stop, device=tokens.device)
        if padding is not None:
            positions = positions - padding.counts[:, None]
        return self.embedding(tokens) + self.positions(positions)


def layer_by_layer(
    stack: nn.TransformerEncoder, x: Tensor, mask: Tensor | None, padding: Any
) -> list[Tensor]:
    """Every layer's result for a causal mask, the last one after the stack's norm if it has one."""
    states = []
    for layer in stack.layers:
        x = layer(x, mask, padding, is_causal=True)
        states.append(x)
    if stack.norm is not None:
        states[-1] = stack.norm(states[-1])
    return states


def _padding(mask: Tensor | None) -> Tensor | None:
    """The mask in torch.nn's convention: True where a token is padding.

    None without rows, for which torch's attention takes no mask.
    """
    return None if mask is None or mask.shape[0] == 0 else ~mask


def _future(length: int, device: torch.device) -> Tensor:
    """The causal mask in torch.nn's convention: True where the key comes after the query."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


class Attentions(NamedTuple):
    """The attention weights of a :class:`Transformer`, a tensor for each layer."""

    encoder: tuple[Tensor, ...]  # (B, H, S, S)
    decoder: tuple[Tensor, ...]  # (B, H, T, T)
    cross: tuple[Tensor, ...]  # (B, H, T, S)


def _self_attention(layer: Any, x: Tensor, **masks: Tensor | None) -> tuple[Tensor, Tensor]:
    """A layer's self-attention of its input (B, L, d_model): its result and its weights."""
    x = layer.norm1(x) if layer.norm_first else x
    return _attention(layer.self_attn, x, x, **masks)


def _attention(
    attention: nn.Module, query: Tensor, memory: Tensor, **masks: Tensor | None
) -> tuple[Tensor, Tensor]:
    return attention(query, memory, memory, need_weights=True, average_attn_weights=False, **masks)


# Training ---------------------------------------------------------------------------------------


def token_loss(
    logits: Tensor, targets: Tensor, mask: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """The mean cross-entropy of the real tokens, in nats.

    With smoothing ε the target distribution is 1 − ε on the target and ε spread evenly over the
    vocabulary (Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016,
    section 7; VASWANI 5.4 uses ε = 0.1).

    Args:
        logits: (B, L, V).
        targets: integers (B, L).
        mask: bool (B, L), True where a target counts. If none does, the mean is NaN.
        label_smoothing: ε.

    Raises:
        RuntimeError: the shapes don't match, or ``label_smoothing`` is not in [0, 1].
    """
    targets = class_indices(targets)
    if mask is not None:
        targets = targets.masked_fill(~mask, -100)
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, label_smoothing=label_smoothing
    )


def log_likelihood(logits: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """log P of each text (B,), in nats: the sum over its tokens after the first, which is given.

    It is computed in float32 or wider.

    Args:
        logits: (B, L, V), a language model's for ``tokens``.
        tokens: integers (B, L).
        mask: bool (B, L), True where a token is real. A token counts if the one before it is real
            too.

    Raises:
        ValueError: the mask isn't boolean or hasn't the tokens' shape.
    """
    check_mask("mask", mask, tokens)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # for the sum
    targets = class_indices(tokens[:, 1:])
    log_probs = -F.cross_entropy(logits[:, :-1].mT, targets, reduction="none")
    if mask is not None:
        log_probs = log_probs.where(mask[:, 1:] & mask[:, :-1], 0)
    return log_probs.sum(1)


def warmup_inverse_sqrt(warmup_steps: int) -> Callable[[int], float]:
    """A factor for ``LambdaLR`` that rises to 1 in equal steps, then falls as 1 / √step.

    VASWANI eq. 3 is this with (d_model · warmup_steps)^−½ as the optimizer's learning rate. Steps
    count from 0, as LambdaLR's do, and the first has the factor 1 / warmup_steps.

    Raises:
        ValueError: ``warmup_steps`` is below 1.
    """
    if warmup_steps < 1:
        raise ValueError(f"warmup_steps: expected at least 1; got {warmup_steps}")

    def factor(step: int) -> float:
        return min((step + 1) / warmup_steps, math.sqrt(warmup_steps / (step + 1)))

    return factor


# Decoding with a cache --------------------------------------------------------------------------


@dataclass
class DecodingState:
    """The state that :meth:`Transformer.step` continues from. A source's rows share its memory."""

    past: KeyValueCache
    memory: list[tuple[Tensor, ...]] = field(repr=False)  # key, value (B, H, S, E) of each layer
    memory_mask: Tensor | None  # bool (B, S)

    def reorder(self, rows: Tensor) -> None:
        """Keep the targets with these indices, each in a row of its own source."""
        self.past.reorder(rows)


Sublayer = Callable[[Tensor], Tensor]


def _run_sublayers(
    add_norm: nn.Module,
    x: Tensor,
    sublayers: Sequence[Sublayer],
    norms: Sequence[nn.Module],
    last: nn.Module | None,
) -> Tensor:
    """Run sublayers, each with its norm before it and the last norm at the end.

    Without a last norm, each sublayer's norm comes after it.
    """
    if last is None:
        for sublayer, norm in zip(sublayers, norms, strict=True):
            x, _ = add_norm(sublayer(x), x, norm)
        return x
    residual, x = x, norms[0](x)
    for sublayer, norm in zip(sublayers, [*norms[1:], last], strict=True):
        x, residual = add_norm(sublayer(x), residual, norm)
    return x


def _attend_to_past(
    model: Transformer | LanguageModel,
    attention: nn.MultiheadAttention,
    x: Tensor,
    past: KeyValueCache,
    layer: int,
) -> Tensor:
    """Causal self-attention of the newest tokens (N, n, d_model) over all tokens so far."""
    query, key, value = model.products.project(attention, x, "qkv")
    key, value = past.append(layer, key, value)
    new, total = query.shape[2], key.shape[2]
    mask = past.keys_taking_part(total)
    if new > 1:
        causal = torch.ones(new, total, dtype=torch.bool, device=x.device).tril(total - new)
        mask = causal[None, None] if mask is None else causal & mask[:, None, None]
    return model.products.project_out(attention, model.attention(query, key, value, mask))
