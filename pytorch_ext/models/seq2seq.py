"""Recurrent encoder-decoders with and without attention, in ``torch.nn``: the eager baseline.

A recurrent network reads the source, and another writes the target. Between them is the global
attention of Luong, Pham and Manning, "Effective Approaches to Attention-based Neural Machine
Translation" (2015), cited as LUONG, or that of Bahdanau, Cho and Bengio, "Neural Machine
Translation by Jointly Learning to Align and Translate" (2015), cited as BAHDANAU. Without
attention, the decoder gets nothing but the encoder's final state, as in Sutskever, Vinyals and Le,
"Sequence to Sequence Learning with Neural Networks" (2014), cited as SUTSKEVER.

The recurrent layers are torch's own. Attention that is a product of queries and keys goes through
:class:`trifuse.models.transformer.SoftmaxAttention`, which :func:`trifuse.fuse` supports; targets
are found by :mod:`trifuse.models.decoding`, and the training loss is
:func:`trifuse.models.transformer.token_loss`.

Boolean masks are True where a token is real. In the shapes below B is the batch, S the length of
the source, T the length of the target, H the hidden size, L the layers, V the target's vocabulary
and N the targets being written, a multiple of B.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trifuse.models._tokens import real_lengths
from trifuse.models.recurrent import run_layer
from trifuse.models.transformer import SoftmaxAttention

__all__ = [
    "AdditiveAttention",
    "Attention",
    "DecodingState",
    "DotAttention",
    "MaxoutReadout",
    "MultiplicativeAttention",
    "Seq2Seq",
    "Seq2SeqConfig",
]

# Attention --------------------------------------------------------------------------------------


class Attention(nn.Module):
    """softmax(scores) · values over the source's real tokens. Subclasses define the scores.

    Every step of a target attends to the same source, so :meth:`project` computes once what depends
    on the source alone.
    """

    def project(self, memory: Tensor) -> Tensor:
        """The keys (B, S, H), computed from the encoder's output (B, S, H)."""
        return memory

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """The scores (B, T, S) of queries (B, T, H) and keys from :meth:`project`."""
        raise NotImplementedError

    def forward(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: (B, T, H).
            keys: (B, S, H), from :meth:`project`.
            values: (B, S, H).
            mask: bool (B, S), True where a token is real; at least one in each row.
            need_weights: also return the weights.

        Returns:
            The contexts (B, T, H), and the weights (B, T, S) or None.
        """
        scores = self.scores(query, keys)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -math.inf)
        weights = scores.softmax(-1)
        return weights @ values, weights if need_weights else None


class DotAttention(Attention):
    """score(q, k) = q · k (LUONG eq. 8, "dot"), or with ``scaled`` q · k / √H.

    The scaled score is from Vaswani et al., "Attention Is All You Need" (2017), eq. 1.
    """

    def __init__(self, hidden_size: int, scaled: bool = False) -> None:
        super().__init__()
        self.scale = hidden_size**-0.5 if scaled else 1.0
        self.attention = SoftmaxAttention()

    def extra_repr(self) -> str:
        return f"scale={self.scale:.4g}"

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        return (query * self.scale) @ keys.transpose(-1, -2)

    def forward(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`Attention.forward`, but without weights it runs :class:`SoftmaxAttention`.

        Second derivatives are then those of ``F.scaled_dot_product_attention``; of its kernels in
        torch only ``SDPBackend.MATH`` has any.
        """
        if need_weights:
            return super().forward(query, keys, values, mask, need_weights)
        query = query * (self.scale * math.sqrt(query.shape[-1]))  # the attention divides by √H
        heads = (x[:, None] for x in (query, keys, values))
        return self.attention(*heads, mask)[:, 0], None


class MultiplicativeAttention(DotAttention):
    """score(q, k) = qᵀ W k (LUONG eq. 8, "general"). W is applied to the keys, once per source."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)

    def project(self, memory: Tensor) -> Tensor:
        return self.key(memory)


class AdditiveAttention(Attention):
    """score(q, k) = v · tanh(W q + U k) (BAHDANAU A.1.2). U is applied once per source.

    The tanh of every query with every key is never held in full: see :func:`additive_scores`.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.score = nn.Linear(hidden_size, 1, bias=False)

    def project(self, memory: Tensor) -> Tensor:
        return self.key(memory)

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        query = self.query(query)
        return additive_scores(query, keys, self.score.weight[0].to(query.dtype))


def additive_scores(query: Tensor, key: Tensor, vector: Tensor) -> Tensor:
    """Σ_h vector[h] · tanh(query[b, i, h] + key[b, j, h]), (B, T, S).

    The tanh is computed for one block of queries at a time, and again in the backward. So only the
    inputs are kept, and the peak memory is a few blocks, or a few times the tanh of one query with
    all its keys if that is larger. A backward that is itself differentiated keeps the whole tanh.
    Forward-mode AD raises.

    Args:
        query: (B, T, H).
        key: (B, S, H).
        vector: (H,).
    """
    return _AdditiveScores.apply(query, key, vector)


_BLOCK = 1 << 18  # elements of a block's tanh: 1 MiB in fp32, which may fit in a core's cache


def _blocks(key: Tensor, *by_query: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors (B, T, ...) along T into blocks of queries."""
    queries = max(1, _BLOCK // max(1, key.numel()))
    return zip(*(x.split(queries, 1) for x in by_query), strict=True)


def _tanh(query: Tensor, key: Tensor) -> Tensor:
    """The tanh of every query with every key, (B, T, S, H)."""
    return (query[:, :, None] + key[:, None]).tanh()


class _AdditiveScores(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(query: Tensor, key: Tensor, vector: Tensor) -> Tensor:
        return torch.cat([_tanh(part, key) @ vector for (part,) in _blocks(key, query)], 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, vector = ctx.saved_tensors
        by_query, by_block = [], []
        for part, grad_part in _blocks(key, query, grad):
            tanh = _tanh(part, key)
            upstream = grad_part[..., None].to(tanh.dtype)
            inner = upstream * (1 - tanh.square())
            by_query.append(inner.sum(2) * vector)
            by_block.append((inner.sum(1) * vector, (upstream * tanh).sum((0, 1, 2))))
        grad_key, grad_vector = (
            functools.reduce(torch.add, x) for x in zip(*by_block, strict=True)
        )
        return torch.cat(by_query, 1), grad_key, grad_vector


# The model --------------------------------------------------------------------------------------

_CELLS: dict[str, type[nn.LSTM | nn.GRU | nn.RNN]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
}

_ATTENTIONS: dict[str, Callable[[int], Attention | None]] = {
    "none": lambda hidden_size: None,
    "dot": DotAttention,
    "scaled_dot": functools.partial(DotAttention, scaled=True),
    "additive": AdditiveAttention,
    "multiplicative": MultiplicativeAttention,
}


@dataclass
class Seq2SeqConfig:
    """The sizes and choices of a :class:`Seq2Seq`; the default sizes are LUONG's.

    Attributes:
        source_vocab_size, target_vocab_size: how many tokens there are.
        embedding_dim: features of both embeddings.
        hidden_size: H, of encoder and decoder. In a bidirectional encoder each direction has half,
            so that its output is as wide as the decoder's.
        num_layers: L, of encoder and decoder each.
        dropout: on the embeddings, between layers, and on the input of the output projection.
        cell: "lstm", "gru", or "rnn" with tanh.
        bidirectional: read the source in both directions. The decoder then starts from a learnt
            projection of the final states: in Bahdanau's order those of the backward direction,
            otherwise those of both directions. If False, the decoder starts from the final state
            itself.
        attention: "none", "dot", "scaled_dot", "additive" or "multiplicative".
        attention_order: "luong": the decoder steps, its new state is the query, and state and
            context give the output (LUONG 3). "bahdanau": its previous state is the query, the
            decoder's step reads the context, and the output is a :class:`MaxoutReadout`. Training
            then goes step by step. None: "bahdanau" for additive attention, "luong" for others.
        input_feeding: the decoder also reads its previous attentional vector (LUONG 3.3). Training
            then goes step by step.
        bias: biases in the attentional vector or the readout, and in the output projection.
            Neither paper has them.
        share_embedding: one embedding for source and target.
        tie_output: the output projection's weight is the target's embedding (Press and Wolf, "Using
            the Output Embedding to Improve Language Models", 2017).

    Raises:
        ValueError: ``cell``, ``attention`` or ``attention_order`` is none of these, ``hidden_size``
            is odd with ``bidirectional`` or in Bahdanau's order, an option goes without attention
            or with the other order, or sizes that must be the same to share weights are not.
    """

    source_vocab_size: int = 50_000
    target_vocab_size: int = 50_000
    embedding_dim: int = 1000
    hidden_size: int = 1000
    num_layers: int = 4
    dropout: float = 0.2
    cell: str = "lstm"
    bidirectional: bool = False
    attention: str = "multiplicative"
    input_feeding: bool = False
    share_embedding: bool = False
    tie_output: bool = False
    attention_order: str | None = None
    bias: bool = False

    @property
    def attends_first(self) -> bool:
        """Whether each step attends before the decoder's recurrence (BAHDANAU) or after (LUONG)."""
        if self.attention_order is None:
            return self.attention == "additive"
        return self.attention_order == "bahdanau"

    @property
    def output_size(self) -> int:
        """Features that the output projection reads: BAHDANAU has half as many as hidden units."""
        return self.hidden_size // 2 if self.attends_first else self.hidden_size

    def __post_init__(self) -> None:
        for name, known in (
            ("cell", (*_CELLS,)),
            ("attention", (*_ATTENTIONS,)),
            ("attention_order", ("luong", "bahdanau")),
        ):
            got = getattr(self, name)
            if got not in known and not (name == "attention_order" and got is None):
                raise ValueError(f"{name}: expected one of {', '.join(known)}; got {got!r}")
        if self.attention == "none":
            for name, default in (("attention_order", None), ("input_feeding", False)):
                if getattr(self, name) != default:
                    got = getattr(self, name)
                    raise ValueError(f"{name}: expected {default} without attention; got {got!r}")
        if self.input_feeding and self.attends_first:
            raise ValueError(
                "input_feeding: expected attention_order='luong'; in Bahdanau's order the decoder "
                "reads the context itself"
            )
        for wanted, why in (
            (self.bidirectional, "bidirectional"),
            (self.attends_first, "Bahdanau's order"),
        ):
            if wanted and self.hidden_size % 2:
                raise ValueError(
                    f"hidden_size: expected an even number with {why}; got {self.hidden_size}"
                )
        if self.share_embedding and self.source_vocab_size != self.target_vocab_size:
            raise ValueError(
                f"source_vocab_size: expected target_vocab_size={self.target_vocab_size} with "
                f"share_embedding; got {self.source_vocab_size}"
            )
        if self.tie_output and self.embedding_dim != self.output_size:
            size = "hidden_size / 2" if self.attends_first else "hidden_size"
            raise ValueError(
                f"embedding_dim: expected {size}={self.output_size} with tie_output; "
                f"got {self.embedding_dim}"
            )


@dataclass
class DecodingState:
    """The state that :meth:`Seq2Seq.step` continues from. A source's targets share its memory."""

    hidden: tuple[Tensor, ...]  # h, and c for an LSTM, (L, N, H)
    vector: Tensor | None  # (N, 1, H), the newest attentional vector, if it is fed back
    keys: Tensor | None  # (B, S, H), if there is attention
    values: Tensor  # (B, S, H)
    mask: Tensor | None  # bool (B, S)

    @property
    def targets(self) -> int:
        """N, the number of targets being written."""
        return self.hidden[0].shape[1]

    def reorder(self, rows: Tensor) -> None:
        """Keep the targets with these indices, each in a row of its own source."""
        self.hidden = tuple(x.index_select(1, rows) for x in self.hidden)
        if self.vector is not None:
            self.vector = self.vector.index_select(0, rows)


class Bridge(nn.Module):
    """Maps a bidirectional encoder's final states to the decoder's initial state: tanh(W x + b).

    Each layer has its own W and b. x is [→; ←], or with ``backward_only`` ←, the state after the
    source's first token (BAHDANAU A.2.2). An LSTM's c is unbounded, so it is mapped without the
    tanh.
    """

    def __init__(
        self, hidden_size: int, num_layers: int, has_cell_state: bool, backward_only: bool = False
    ) -> None:
        super().__init__()
        features = hidden_size // 2 if backward_only else hidden_size

        def projections() -> nn.ModuleList:
            return nn.ModuleList(nn.Linear(features, hidden_size) for _ in range(num_layers))

        self.backward_only = backward_only
        self.hidden = projections()
        self.cell = projections() if has_cell_state else None

    def forward(self, final: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """h, and c for an LSTM: from torch's layout (2 L, B, H / 2) to (L, B, H)."""
        directions = [x.unflatten(0, (-1, 2)).transpose(1, 2) for x in final]  # (L, B, 2, H / 2)
        given = [x[:, :, 1] if self.backward_only else x.flatten(2) for x in directions]
        first = [_each(self.hidden, given[0]).tanh()]
        if self.cell is not None:
            first.append(_each(self.cell, given[1]))
        return tuple(first)


def _each(projections: nn.ModuleList, layers: Tensor) -> Tensor:
    return torch.stack([project(x) for project, x in zip(projections, layers, strict=True)])


class MaxoutReadout(nn.Module):
    """Takes the larger of each two features: t_j = max(t̃_2j, t̃_2j+1), t̃ = W [s; e; c] (+ b).

    BAHDANAU A.2.2: s is the decoder's state (…, H) before the step, e the embedding (…, E) of the
    token that the step reads, c the context (…, H), and W is [U_o; V_o; C_o].

    Args:
        in_features: 2 H + E.
        out_features: the features of t, half those of t̃.
        bias: whether there is a b.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, 2 * out_features, bias=bias)

    def forward(self, state: Tensor, embedded: Tensor, context: Tensor) -> Tensor:
        pairs = self.linear(torch.cat((state, embedded, context), -1)).unflatten(-1, (-1, 2))
        return pairs.amax(-1)


class Seq2Seq(nn.Module):
    """An encoder, a decoder, and attention from the decoder's states to the source.

    The logits are a projection of LUONG's attentional vector, tanh(W [context; state]) (eq. 5); in
    Bahdanau's order of a :class:`MaxoutReadout`; without attention of the decoder's state.
    BAHDANAU's gated units apply the reset gate before the recurrent product; torch's GRU, which is
    the cell here, applies it after. ``trifuse.nn.GRU`` has both forms.

    Embeddings start normal with variance 1 / embedding_dim and are multiplied by √embedding_dim at
    the input, so that inputs start with variance 1 whether or not the output is tied to them.
    Recurrent matrices start orthogonal, gate by gate (Saxe, McClelland and Ganguli, "Exact
    solutions to the nonlinear dynamics of learning in deep linear neural networks", 2014). Other
    matrices start Xavier uniform, also gate by gate. Biases start at 0, except at 1 for an LSTM's
    forget gate (Jozefowicz, Zaremba and Sutskever, "An Empirical Exploration of Recurrent Network
    Architectures", 2015).

    Args:
        config: the sizes and choices.
    """

    max_target_length: int | None = None  # no limit for the searches

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        E, H, L = config.embedding_dim, config.hidden_size, config.num_layers
        directions = 2 if config.bidirectional else 1
        between = config.dropout if L > 1 else 0.0  # torch warns about a dropout without effect
        layers: dict[str, Any] = {"num_layers": L, "batch_first": True, "dropout": between}
        cell = _CELLS[config.cell]

        self.source_embedding = nn.Embedding(config.source_vocab_size, E)
        self.target_embedding = nn.Embedding(config.target_vocab_size, E)
        if config.share_embedding:
            self.target_embedding = self.source_embedding
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = cell(E, H // directions, bidirectional=config.bidirectional, **layers)
        self.bridge = None
        if config.bidirectional:
            self.bridge = Bridge(H, L, config.cell == "lstm", config.attends_first)
        reads_more = config.input_feeding or config.attends_first
        self.decoder = cell(E + H if reads_more else E, H, **layers)
        self.attention = _ATTENTIONS[config.attention](H)
        self.combine = self.readout = None
        if config.attends_first:
            self.readout = MaxoutReadout(2 * H + E, config.output_size, config.bias)
        elif self.attention is not None:
            self.combine = nn.Linear(2 * H, H, bias=config.bias)
        self.output = nn.Linear(config.output_size, config.target_vocab_size, bias=config.bias)
        if config.tie_output:
            self.output.weight = self.target_embedding.weight
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        gates = {"lstm": 4, "gru": 3, "rnn": 1}[self.config.cell]
        for name, parameter in self.named_parameters():
            if "embedding" in name:
                parameter.normal_(0.0, self.config.embedding_dim**-0.5)
            elif "weight_hh" in name or "weight_ih" in name:
                fill = nn.init.orthogonal_ if "hh" in name else nn.init.xavier_uniform_
                for gate in parameter.chunk(gates):
                    fill(gate)
            elif parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)
            else:
                parameter.zero_()
                if "bias_ih" in name and self.config.cell == "lstm":
                    parameter.chunk(gates)[1].fill_(1.0)

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) for the token that follows each position of the target.

        Args:
            source: integers (B, S).
            target: integers (B, T), starting with the token that begins every target. Padding at
                the end does not change earlier positions.
            source_mask: bool (B, S), True where a token is real: at least one in each row, all
                before the padding. The padding does not change the result.

        Raises:
            ValueError: source or target has no positions, their numbers of rows differ, or the mask
                is not as above.
        """
        return self.output(self._decode(target, self.start(source, source_mask))[0])

    def align(self, source: Tensor, target: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """How much each position of the target attends to each of the source, (B, T, S).

        Arguments as in :meth:`forward`.

        Raises:
            ValueError: as :meth:`forward`, or the model has no attention.
        """
        if self.attention is None:
            raise ValueError("align: expected a model with attention; attention is 'none'")
        weights = self._decode(target, self.start(source, source_mask), need_weights=True)[1]
        assert weights is not None
        return weights

    def start(self, source: Tensor, source_mask: Tensor | None = None) -> DecodingState:
        """Read a source, and compute the attention's keys. Errors as in :meth:`forward`."""
        _check_length("source", source)
        lengths = None
        if source_mask is not None:
            lengths = real_lengths("source_mask", source_mask, source)
            if (lengths == source.shape[1]).all():  # no padding, so no need to pay for packing
                lengths = source_mask = None
        memory, hidden = self._encode(source, lengths)
        vector = keys = None
        if self.config.input_feeding:
            vector = memory.new_zeros(len(memory), 1, memory.shape[-1])
        if self.attention is not None:
            keys = self.attention.project(memory)
        return DecodingState(hidden, vector, keys, memory, source_mask)

    def step(self, tokens: Tensor, state: DecodingState) -> Tensor:
        """Logits (N, n, V) after each of n further tokens.

        Args:
            tokens: integers (N, n). N is a multiple of the number of targets in ``state``; the
                targets of one source are adjacent.
            state: from :meth:`start`; it is updated to continue after the tokens.

        Raises:
            ValueError: there are no tokens, or N is not such a multiple.
        """
        begun = state.targets
        if len(tokens) != begun and begun and len(tokens) % begun == 0:
            rows = torch.arange(begun, device=tokens.device)
            state.reorder(rows.repeat_interleave(len(tokens) // begun))
        return self.output(self._decode(tokens, state)[0])

    def _encode(self, source: Tensor, lengths: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The memory (B, S, H), 0 where it is padded, and the decoder's initial hidden state."""
        x = self._embed(self.source_embedding, source)
        memory, final = run_layer(self.encoder, x, None, lengths)
        hidden = final if isinstance(final, tuple) else (final,)
        return memory, hidden if self.bridge is None else self.bridge(hidden)

    def _decode(
        self, tokens: Tensor, state: DecodingState, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The output projection's input (N, n, ·) for further tokens; weights or None.

        The weights are (B, N / B · n, S).
        """
        _check_length("target", tokens)
        if len(tokens) != (rows := state.targets):
            raise ValueError(
                f"target: expected {rows} rows, or in a step a multiple; got {len(tokens)}"
            )
        x = self._embed(self.target_embedding, tokens)
        advance = self._attend_then_recur if self.config.attends_first else self._recur_then_attend
        if not (self.config.attends_first or self.config.input_feeding):
            return advance(x, state, need_weights)
        # A step reads what the step before computed.
        steps = [advance(embedded, state, need_weights) for embedded in x.split(1, 1)]
        weights = [weight for _, weight in steps if weight is not None]
        return torch.cat([out for out, _ in steps], 1), torch.cat(weights, 1) if weights else None

    def _recur_then_attend(
        self, x: Tensor, state: DecodingState, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """LUONG's step for all of (N, n, E): the new states are the queries."""
        if state.vector is not None:
            x = torch.cat((x, state.vector), -1)
        vectors, weights = self._recur(x, state), None
        if self.combine is not None:
            context, weights = self._attend(vectors, state, need_weights)
            vectors = self.combine(torch.cat((context, vectors), -1)).tanh()
        vectors = self.dropout(vectors)
        if state.vector is not None:
            state.vector = vectors
        return vectors, weights

    def _attend_then_recur(
        self, x: Tensor, state: DecodingState, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """BAHDANAU's step for (N, 1, E): the state before the step is the query."""
        assert self.readout is not None
        before = state.hidden[0][-1][:, None]  # h of the last layer
        context, weights = self._attend(before, state, need_weights)
        self._recur(torch.cat((x, context), -1), state)
        return self.dropout(self.readout(before, x, context)), weights

    def _recur(self, x: Tensor, state: DecodingState) -> Tensor:
        """Run the decoder's layers over all of (N, n, ·); return the last one's outputs."""
        if self.config.cell == "lstm":
            out, state.hidden = self.decoder(x, state.hidden)
        else:
            out, hidden = self.decoder(x, state.hidden[0])
            state.hidden = (hidden,)
        return out

    def _attend(
        self, query: Tensor, state: DecodingState, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The contexts (N, n, H) of queries of that shape, and the weights or None."""
        assert self.attention is not None
        assert state.keys is not None
        # All targets of one source share its keys, so they become further queries of its row.
        B = len(state.values)
        targets = len(query) // B if B else 1
        rows = query.reshape(B, targets * query.shape[1], query.shape[-1])
        context, weights = self.attention(rows, state.keys, state.values, state.mask, need_weights)
        return context.view_as(query), weights

    def _embed(self, embedding: nn.Embedding, tokens: Tensor) -> Tensor:
        return self.dropout(embedding(tokens) * math.sqrt(self.config.embedding_dim))


def _check_length(name: str, tokens: Tensor) -> None:
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(
            f"{name}: expected integers (batch, length), at least one in each row; "
            f"got shape {tuple(tokens.shape)}"
        )
