"""Classifiers on top of language models, in plain ``torch.nn``.

A language model is trained on texts without labels, then fine-tuned with a linear layer over the
hidden state of each text's last token: Radford, Narasimhan, Salimans and Sutskever, "Improving
Language Understanding by Generative Pre-Training" (2018), cited as GPT, for the Transformer; Dai
and Le, "Semi-supervised Sequence Learning" (2015), for recurrent models. Only torch is imported
here.

In the shapes below B is the batch, L the length of a text and V the vocabulary.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trifuse.models._tokens import at_last_token, class_indices, real_lengths
from trifuse.models.recurrent import RecurrentLanguageModel
from trifuse.models.transformer import LanguageModel, token_loss

__all__ = [
    "ClassifierOutput",
    "LanguageModelForSequenceClassification",
    "classification_loss",
]


class ClassifierOutput(NamedTuple):
    """The output of :class:`LanguageModelForSequenceClassification` with ``output_lm_logits``."""

    logits: Tensor  # (B, num_labels)
    lm_logits: Tensor  # (B, L, V), the language model's


class LanguageModelForSequenceClassification(nn.Module):
    """A language model with one linear layer over the hidden state of each text's last token.

    The linear layer starts normal with standard deviation 0.02, its bias at 0. GPT appends a
    special token to each text; its hidden state then represents the text.

    Args:
        language_model: trained or untrained. It becomes a part of this model and is not copied.
        num_labels: how many classes.
        classifier_dropout: the dropout probability of the hidden state; GPT's is 0.1.

    Raises:
        ValueError: ``num_labels`` is below 1.
    """

    def __init__(
        self,
        language_model: LanguageModel | RecurrentLanguageModel,
        num_labels: int = 2,
        classifier_dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if num_labels < 1:
            raise ValueError(f"num_labels: expected at least 1; got {num_labels}")
        self.language_model = language_model
        self.dropout = nn.Dropout(classifier_dropout)
        weight = language_model.output.weight
        self.classifier = nn.Linear(
            weight.shape[1], num_labels, device=weight.device, dtype=weight.dtype
        )
        nn.init.normal_(self.classifier.weight, 0.0, 0.02)
        nn.init.zeros_(self.classifier.bias)

    @overload
    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        *,
        output_lm_logits: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, *, output_lm_logits: bool
    ) -> Tensor | ClassifierOutput: ...

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, *, output_lm_logits: bool = False
    ) -> Tensor | ClassifierOutput:
        """Logits (B, num_labels).

        Args:
            tokens: integers (B, L), L at least 1.
            mask: bool (B, L), True where a token is real: at least one in each row, all before the
                padding, which changes nothing.
            output_lm_logits: return a :class:`ClassifierOutput`. Otherwise the projection to the
                vocabulary isn't computed.

        Raises:
            ValueError: the language model cannot read the tokens, there are none, or the mask is
                not as above. While compiling, the mask's rows are not checked.
        """
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise ValueError(
                f"tokens: expected (B, L) with L at least 1; got {tuple(tokens.shape)}"
            )
        lengths = None if mask is None else real_lengths("mask", mask, tokens)
        features = self.language_model.features(tokens, mask)
        last = features[:, -1] if lengths is None else at_last_token(features, lengths)
        logits = self.classifier(self.dropout(last))
        if not output_lm_logits:
            return logits
        return ClassifierOutput(logits, self.language_model.output(features))


def classification_loss(
    model: LanguageModelForSequenceClassification,
    tokens: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    lm_weight: float = 0.0,
) -> Tensor:
    """The mean cross-entropy of the labels, with that of the texts as an auxiliary objective.

    L = L_labels + λ L_texts (GPT, eq. 5), each a mean in nats: of texts, and of tokens after the
    first. L_texts is 0 if no text has a second token.

    Args:
        model: in either mode.
        tokens, mask: as in :meth:`LanguageModelForSequenceClassification.forward`.
        labels: integers (B,).
        lm_weight: λ. GPT's is 0.5.

    Raises:
        ValueError: as the model does, or ``lm_weight`` is below 0.
    """
    if not lm_weight >= 0:
        raise ValueError(f"lm_weight: expected at least 0; got {lm_weight}")
    labels = class_indices(labels)
    if lm_weight == 0:
        return F.cross_entropy(model(tokens, mask), labels)
    output = model(tokens, mask, output_lm_logits=True)
    after = (torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask)[:, 1:]
    texts = token_loss(output.lm_logits[:, :-1], tokens[:, 1:], after)
    texts = texts.where(after.any(), 0)  # the mean of no tokens is NaN
    return F.cross_entropy(output.logits, labels) + lm_weight * texts
