"""BERT in plain ``torch.nn``: the eager baseline, with Hugging Face's parameter names.

Devlin, Chang, Lee and Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for
Language Understanding" (2018). Modules are named as in Hugging Face checkpoints, so that
``from_pretrained`` loads them by name. Only torch is imported here (and safetensors where a
checkpoint is read).

The softmax attention is a separate module, :class:`SoftmaxAttention`, which holds no parameters.
:func:`trifuse.fuse` swaps this module.

In the shapes below B is the batch, L the length, H the heads, E the head dimension, and hidden_size
is H · E.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "BertConfig",
    "BertForMaskedLM",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertHeadOutput",
    "BertModel",
    "BertModelOutput",
    "BertPreTrainingOutput",
    "BertQuestionAnsweringOutput",
    "SoftmaxAttention",
]


class _GELUTanh(nn.GELU):
    def __init__(self) -> None:
        super().__init__(approximate="tanh")


_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_new": _GELUTanh,
    "gelu_pytorch_tanh": _GELUTanh,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}


@dataclass
class BertConfig:
    """The sizes and rates of a BERT; the fields are named as in Hugging Face's ``config.json``.

    ``attn_implementation`` is "eager" (the formula, one step at a time) or "sdpa"
    (``torch.nn.functional.scaled_dot_product_attention``). The defaults are BERT-base.

    Raises:
        ValueError: ``hidden_size`` is not a multiple of ``num_attention_heads``, or
            ``hidden_act`` or ``attn_implementation`` is unknown.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    classifier_dropout: float | None = None
    num_labels: int = 2
    attn_implementation: str = "eager"

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size: expected a multiple of num_attention_heads="
                f"{self.num_attention_heads}; got {self.hidden_size}"
            )
        if self.hidden_act not in _ACTIVATIONS:
            known = " or ".join(f'"{name}"' for name in _ACTIVATIONS)
            raise ValueError(f"hidden_act: expected {known}; got {self.hidden_act!r}")
        if self.attn_implementation not in ("eager", "sdpa"):
            raise ValueError(
                f'attn_implementation: expected "eager" or "sdpa"; got {self.attn_implementation!r}'
            )

    @classmethod
    def from_json(cls, path: str | Path, **overrides: Any) -> BertConfig:
        """Read Hugging Face's ``config.json``, ignoring fields that do not shape an encoder.

        Raises:
            ValueError: the file describes a model that this class does not implement.
        """
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        for field, wanted in (
            ("model_type", "bert"),
            ("position_embedding_type", "absolute"),
            ("is_decoder", False),
        ):
            if (got := stored.get(field, wanted)) != wanted:
                raise ValueError(f"{path}: {field}: expected {wanted!r}; got {got!r}")
        if "num_labels" not in stored and "id2label" in stored:
            stored["num_labels"] = len(stored["id2label"])
        fields = {field.name for field in dataclasses.fields(cls)}
        known = {name: value for name, value in stored.items() if name in fields}
        return cls(**(known | overrides))


class BertModelOutput(NamedTuple):
    """The output of :class:`BertModel`."""

    last_hidden_state: Tensor  # (B, L, hidden_size)
    pooler_output: Tensor | None  # (B, hidden_size)
    # The embeddings, then each layer's result, (B, L, hidden_size) each; the last one is
    # last_hidden_state.
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None  # each layer's weights, (B, H, L, L)


class BertPreTrainingOutput(NamedTuple):
    """The output of :class:`BertForPreTraining`."""

    prediction_logits: Tensor  # (B, L, vocab_size)
    seq_relationship_logits: Tensor  # (B, 2)


class BertQuestionAnsweringOutput(NamedTuple):
    """The output of :class:`BertForQuestionAnswering`."""

    start_logits: Tensor  # (B, L)
    end_logits: Tensor  # (B, L)


class BertHeadOutput(NamedTuple):
    """The output of a BERT with a head, with hidden states or attention weights."""

    result: Any  # what the head returns otherwise
    # As in BertModelOutput.
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None


class BertEmbeddings(nn.Module):
    """Word, position and token type embeddings, added and normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Embed (B, L) tokens; arguments and errors as in :meth:`BertModel.forward`."""
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids: expected shape (B, L); got {tuple(input_ids.shape)}")
        length, limit = input_ids.shape[1], self.position_embeddings.num_embeddings
        if length > limit:
            raise ValueError(f"input_ids: expected at most {limit} positions; got {length}")
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        # The order of the two additions is that of transformers, for the same rounding.
        embeddings = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        embeddings = embeddings + self.position_embeddings(position_ids)
        return self.dropout(self._normalised(embeddings))

    def _normalised(self, x: Tensor) -> Tensor:
        return self.LayerNorm(x)


class SoftmaxAttention(nn.Module):
    """dropout(softmax(Q Kᵀ / √E + mask)) V, from projected heads. Holds no parameters.

    Args:
        dropout_p: probability of dropping an attention weight while training.
        implementation: "eager" or "sdpa", as in :class:`BertConfig`.
    """

    def __init__(self, dropout_p: float = 0.0, implementation: str = "eager") -> None:
        super().__init__()
        self.dropout_p = dropout_p
        self.implementation = implementation

    def extra_repr(self) -> str:
        return f"dropout_p={self.dropout_p}, implementation={self.implementation!r}"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend.

        Args:
            query: (B, H, Lq, E).
            key, value: (B, H, Lk, E).
            mask: bool (B, Lk), True where a key takes part; or broadcastable to (B, H, Lq, Lk),
                boolean as well, or floating and added to the scores. In the eager formula a row
                with every key masked weighs all keys equally, as in transformers.

        Returns:
            (B, H, Lq, E).
        """
        dropout_p = self.dropout_p if self.training else 0.0
        if self.implementation == "sdpa":
            mask = _over_heads(mask)
            return F.scaled_dot_product_attention(query, key, value, mask, dropout_p)
        weights = F.dropout(attention_weights(query, key, mask), dropout_p, self.training)
        return torch.matmul(weights, value)


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(Q Kᵀ / √E + mask) (B, H, Lq, Lk); the arguments are :class:`SoftmaxAttention`'s."""
    mask = _over_heads(mask)
    scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1)


def _over_heads(mask: Tensor | None) -> Tensor | None:
    """Return a mask (B, Lk) as (B, 1, 1, Lk), and others as they are."""
    return mask if mask is None or mask.dim() != 2 else mask[:, None, None, :]


class BertSelfAttention(nn.Module):
    """Multi-head self-attention up to, not including, the output projection."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.attention = SoftmaxAttention(
            config.attention_probs_dropout_prob, config.attn_implementation
        )

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from (B, L, hidden_size) to itself; ``mask`` as in :class:`SoftmaxAttention`."""
        query, key, value = (
            self._heads(project, hidden_states) for project in (self.query, self.key, self.value)
        )
        return self.attention(query, key, value, mask).transpose(1, 2).flatten(-2)

    def weights(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        """The attention's weights (B, H, L, L), before dropout. Arguments as in :meth:`forward`."""
        query, key = (self._heads(project, hidden_states) for project in (self.query, self.key))
        return attention_weights(query, key, mask)

    def _heads(self, project: nn.Module, hidden_states: Tensor) -> Tensor:
        return project(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)


class BertSelfOutput(nn.Module):
    """Project, drop, add the residual, normalise."""

    def __init__(self, in_features: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        """From (B, L, in_features) and a residual (B, L, hidden_size) to (B, L, hidden_size)."""
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + residual)


class BertAttention(nn.Module):
    """Self-attention with its output projection and residual."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertSelfOutput(config.hidden_size, config)

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        """As :meth:`BertSelfAttention.forward`."""
        return self.output(self.self(hidden_states, mask), hidden_states)


class BertIntermediate(nn.Module):
    """The widening half of the feed-forward network."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = _ACTIVATIONS[config.hidden_act]()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """From (B, L, hidden_size) to (B, L, intermediate_size)."""
        return self.intermediate_act_fn(self.dense(hidden_states))


class BertLayer(nn.Module):
    """One encoder layer, normalised after each residual."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertSelfOutput(config.intermediate_size, config)

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        """As :meth:`BertSelfAttention.forward`."""
        attended = self.attention(hidden_states, mask)
        return self.output(self.intermediate(attended), attended)


class BertEncoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        outputs: list[Tensor] | None = None,
    ) -> Tensor:
        """As :meth:`BertSelfAttention.forward`, through all layers.

        Each layer's result is appended to ``outputs``.
        """
        for layer in self.layer:
            hidden_states = layer(hidden_states, mask)
            if outputs is not None:
                outputs.append(hidden_states)
        return hidden_states


class BertPooler(nn.Module):
    """A projection of the first token's hidden state."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """From (B, L, hidden_size) to (B, hidden_size)."""
        return self.activation(self.dense(hidden_states[:, 0]))


class BertPredictionHeadTransform(nn.Module):
    """The layers between the encoder and the projection to the vocabulary."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_act_fn = _ACTIVATIONS[config.hidden_act]()
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """From (B, L, hidden_size) to the same shape."""
        return self.LayerNorm(self.transform_act_fn(self.dense(hidden_states)))


class BertLMPredictionHead(nn.Module):
    """Masked-token logits. The decoder's weight is the word embedding's; its bias has two names."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = self.decoder.bias

    def forward(self, hidden_states: Tensor) -> Tensor:
        """From (B, L, hidden_size) to logits (B, L, vocab_size)."""
        return self.decoder(self.transform(hidden_states))


class BertPreTrainingHeads(nn.Module):
    """Masked-token prediction and next-sentence prediction."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, hidden_states: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, L, vocab_size), and (B, 2) from the pooled (B, hidden_size)."""
        return self.predictions(hidden_states), self.seq_relationship(pooled)


class BertOnlyMLMHead(nn.Module):
    """Masked-token prediction alone."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """From (B, L, hidden_size) to logits (B, L, vocab_size)."""
        return self.predictions(hidden_states)


class BertOnlyNSPHead(nn.Module):
    """Next-sentence prediction alone."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, pooled: Tensor) -> Tensor:
        """From (B, hidden_size) to logits (B, 2)."""
        return self.seq_relationship(pooled)


_Model = TypeVar("_Model", bound="BertPreTrainedModel")


class BertPreTrainedModel(nn.Module):
    """Initialisation, loading and saving, shared by the models below."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config

    @torch.no_grad()
    def _initialise(self, part: nn.Module) -> None:
        for module in part.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.normal_(0.0, self.config.initializer_range)
            if isinstance(module, nn.Linear):
                module.bias.zero_()
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()

    @classmethod
    def from_pretrained(cls: type[_Model], directory: str | Path, **overrides: Any) -> _Model:
        """Build from a directory that holds ``config.json`` and safetensors, in evaluation mode.

        Names match with or without the ``bert.`` prefix, and ``gamma`` and ``beta`` are read as a
        LayerNorm's weight and bias. A ``UserWarning`` lists parameters that only the checkpoint
        has, and parameters of the pooler and the heads that only the model has (they keep their
        random initialisation).

        Args:
            directory: where ``config.json`` lies, beside ``model.safetensors`` or the shards that
                ``model.safetensors.index.json`` names.
            **overrides: fields of :class:`BertConfig` that replace the stored ones.

        Raises:
            FileNotFoundError: there is no configuration or no safetensors file.
            ValueError: a parameter of the embeddings or the encoder is missing, a shape differs, or
                two names of a tied parameter have different values.
        """
        directory = Path(directory)
        model = cls(BertConfig.from_json(directory / "config.json", **overrides))
        model._load(_read_safetensors(directory), directory)
        return model.eval()

    def save_pretrained(self, directory: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, which transformers reads as well.

        Tied parameters are written once.

        Args:
            directory: made if it does not exist; files of these names are overwritten.
        """
        from safetensors.torch import save_file

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        config = dataclasses.asdict(self.config)
        del config["attn_implementation"]  # chosen where a model is loaded
        config |= {"model_type": "bert", "architectures": [type(self).__name__]}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        # Not the parameters alone: a frozen layer has its weight in the state only.
        once = {name for name, _ in self.named_parameters()}
        again = {name for name, _ in self.named_parameters(remove_duplicate=False)} - once
        tensors = {
            name: value.contiguous()
            for name, value in self.state_dict().items()
            if name not in again
        }
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    def _load(self, checkpoint: dict[str, Tensor], directory: Path) -> None:
        parameters = dict(self.named_parameters(remove_duplicate=False))
        loaded: dict[int, str] = {}  # by id, so that one name of a tied parameter is enough
        unexpected = []
        for stored, value in checkpoint.items():
            if stored.endswith(("position_ids", "token_type_ids")):
                continue  # constants that old checkpoints carry along
            name = self._own_name(stored)
            parameter = parameters.get(name)
            if parameter is None:
                unexpected.append(stored)
                continue
            if parameter.shape != value.shape:
                raise ValueError(
                    f"{directory}: {stored}: expected shape {tuple(parameter.shape)}; "
                    f"got {tuple(value.shape)}"
                )
            if (other := loaded.get(id(parameter))) is None:
                with torch.no_grad():
                    parameter.copy_(value)
                loaded[id(parameter)] = stored
            elif not torch.allclose(checkpoint[other], value, rtol=0, atol=0, equal_nan=True):
                raise ValueError(
                    f"{directory}: {stored}: expected the values of {other}, to which "
                    f"{type(self).__name__} ties it; got others"
                )
        missing = [name for name, value in self.named_parameters() if id(value) not in loaded]
        if body := [name for name in missing if "embeddings." in name or "encoder." in name]:
            raise ValueError(f"{directory}: expected a BERT checkpoint; it lacks {_listed(body)}")
        if missing:
            warnings.warn(
                f"{directory}: not in the checkpoint, randomly initialised: {_listed(missing)}",
                stacklevel=3,
            )
        if unexpected:
            warnings.warn(
                f"{directory}: in the checkpoint, not in {type(self).__name__}: "
                f"{_listed(unexpected)}",
                stacklevel=3,
            )

    def _own_name(self, stored: str) -> str:
        """The name that a checkpoint's parameter has in this model."""
        if stored.endswith("LayerNorm.gamma"):
            stored = stored.removesuffix("gamma") + "weight"
        elif stored.endswith("LayerNorm.beta"):
            stored = stored.removesuffix("beta") + "bias"
        stored = stored.removeprefix("bert.")
        has_prefix = not isinstance(self, BertModel)
        is_head = stored.startswith(("cls.", "classifier.", "qa_outputs."))
        return f"bert.{stored}" if has_prefix and not is_head else stored


class BertModel(BertPreTrainedModel):
    """Embeddings, encoder and pooler.

    Args:
        config: the sizes.
        add_pooling_layer: False if the pooled output isn't needed.
    """

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self._initialise(self)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> BertModelOutput:
        """Encode.

        Args:
            input_ids: integers (B, L).
            attention_mask: (B, L), 1 or True where a token is real; or (B, 1 or H, 1 or L, L),
                boolean or floating and added to the scores.
            token_type_ids: integers (B, L). Default: all 0.
            position_ids: integers (L,) or (B, L). Default: 0, 1, …
            output_hidden_states: also return the embeddings and every layer's result.
            output_attentions: also return every layer's attention weights, before dropout. They
                are computed from the layer's input beside the attention itself, which may be fused.

        Raises:
            ValueError: ``input_ids`` is not (B, L) or has more positions than
                ``config.max_position_embeddings``, or a mask is neither of the two.
        """
        mask = attention_mask
        if mask is not None and mask.dim() == 2:
            if mask.shape != input_ids.shape:
                raise ValueError(
                    f"attention_mask: expected shape {tuple(input_ids.shape)}, as input_ids; "
                    f"got {tuple(mask.shape)}"
                )
            mask = mask.bool()
        elif mask is not None and mask.dim() != 4:
            raise ValueError(f"attention_mask: expected 2 or 4 dimensions; got {mask.dim()}")
        elif mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(
                "attention_mask: expected bool or a floating dtype with 4 dimensions; "
                f"got {mask.dtype}"
            )
        embedded = self.embeddings(input_ids, token_type_ids, position_ids)
        outputs = [embedded] if output_hidden_states or output_attentions else None
        last = self.encoder(embedded, mask, outputs)
        return self._output(last, mask, outputs, output_hidden_states, output_attentions)

    def _output(
        self,
        last: Tensor,
        mask: Tensor | None,
        hidden_states: list[Tensor] | None,
        output_hidden_states: bool,
        output_attentions: bool,
    ) -> BertModelOutput:
        attentions = None
        if output_attentions and hidden_states is not None:
            attentions = tuple(
                cast(BertLayer, layer).attention.self.weights(x, mask)
                for layer, x in zip(self.encoder.layer, hidden_states[:-1], strict=True)
            )
        return BertModelOutput(
            last,
            None if self.pooler is None else self.pooler(last),
            tuple(hidden_states) if output_hidden_states and hidden_states else None,
            attentions,
        )


_Output = TypeVar("_Output")


class _BertWithHead(BertPreTrainedModel, Generic[_Output]):
    """A :class:`BertModel`, and a subclass's head over its results."""

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> _Output | BertHeadOutput:
        """Run the BERT and the head. Arguments and errors as in :meth:`BertModel.forward`.

        Returns:
            The head's result; with ``output_hidden_states`` or ``output_attentions`` a
            :class:`BertHeadOutput`.
        """
        output = self.bert(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        result = self._head(output.last_hidden_state, output.pooler_output)
        if output_hidden_states or output_attentions:
            return BertHeadOutput(result, output.hidden_states, output.attentions)
        return result

    def _head(self, hidden_states: Tensor, pooled: Tensor) -> _Output:
        """Compute the result from (B, L, hidden_size) and, with a pooler, (B, hidden_size)."""
        raise NotImplementedError


class BertForPreTraining(_BertWithHead[BertPreTrainingOutput]):
    """BERT with the masked-token (decoder tied to the word embedding) and next-sentence heads.

    Returns the logits for every token and for the pair.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.cls = BertPreTrainingHeads(config)
        self._initialise(self.cls)
        self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def _head(self, hidden_states: Tensor, pooled: Tensor) -> BertPreTrainingOutput:
        return BertPreTrainingOutput(*self.cls(hidden_states, pooled))


class BertForMaskedLM(_BertWithHead[Tensor]):
    """BERT with the masked-token head; its decoder is tied to the word embedding.

    Returns logits (B, L, vocab_size).
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.cls = BertOnlyMLMHead(config)
        self._initialise(self.cls)
        self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def _head(self, hidden_states: Tensor, pooled: Tensor) -> Tensor:
        return self.cls(hidden_states)


class BertForNextSentencePrediction(_BertWithHead[Tensor]):
    """BERT with the next-sentence head.

    Returns logits (B, 2); class 0 means that the second sentence follows the first.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.cls = BertOnlyNSPHead(config)
        self._initialise(self.cls)

    def _head(self, hidden_states: Tensor, pooled: Tensor) -> Tensor:
        return self.cls(pooled)


class BertForSequenceClassification(_BertWithHead[Tensor]):
    """BERT with one linear layer over the pooled output. Returns logits (B, num_labels)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.dropout = _classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self._initialise(self.classifier)

    def _head(self, hidden_states: Tensor, pooled: Tensor) -> Tensor:
        return self.classifier(self.dropout(pooled))


class BertForTokenClassification(_BertWithHead[Tensor]):
    """BERT with one linear layer over each token. Returns logits (B, L, num_labels)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.dropout = _classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self._initialise(self.classifier)

    def _head(self, hidden_states: Tensor, pooled: Tensor) -> Tensor:
        return self.classifier(self.dropout(hidden_states))


class BertForQuestionAnswering(_BertWithHead[BertQuestionAnsweringOutput]):
    """BERT with two scores for each token: that it starts the answer, and that it ends it.

    Returns both logits, (B, L) each. ``config.num_labels`` plays no part.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self._initialise(self.qa_outputs)

    def _head(self, hidden_states: Tensor, pooled: Tensor) -> BertQuestionAnsweringOutput:
        return BertQuestionAnsweringOutput(*self.qa_outputs(hidden_states).unbind(-1))


def _classifier_dropout(config: BertConfig) -> nn.Dropout:
    dropout_p = config.classifier_dropout
    return nn.Dropout(config.hidden_dropout_prob if dropout_p is None else dropout_p)


def _read_safetensors(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        shards = ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        tensors |= load_file(directory / shard)
    return tensors


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
