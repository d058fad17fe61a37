"""Modules that make the cosines and sines of rotary embeddings from the positions of tokens.

In transformers 4.57, ModernBERT's attentions hold one each, and get the positions of their tokens.
Packed tokens come with their positions, so each is rotated as in its padded sequence.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from trifuse.recipes import code, sublayers

_FORWARD = code.normal("""
inv_freq_expanded = self.inv_freq[None, :, None].float().expand(
    position_ids.shape[0], -1, 1
).to(x.device)
position_ids_expanded = position_ids[:, None, :].float()
device_type = (
    x.device.type if isinstance(x.device.type, str) and x.device.type != "mps" else "cpu"
)
with torch.autocast(device_type=device_type, enabled=False):
    freqs = (inv_freq_expanded.float() @ position_ids_expanded.float()).transpose(1, 2)
    emb = torch.cat((freqs, freqs), dim=-1)
    cos = emb.cos() * self.attention_scaling
    sin = emb.sin() * self.attention_scaling
return (cos.to(dtype=x.dtype), sin.to(dtype=x.dtype))
""")
TRAIT = "rope_type"  # the attribute that selects how the frequencies are computed


def is_known(module: nn.Module) -> bool:
    """Whether a module of transformers maps positions, (B, L), to their cosines and sines."""
    cls: Any = sublayers.original(type(module))
    if not (cls.__name__.endswith("RotaryEmbedding") and sublayers.is_of_transformers(cls)):
        return False
    return code.body(cls.forward) == _FORWARD


def why_not(module: nn.Module) -> str | None:
    """Return why the result for a token depends on other tokens; None if it doesn't."""
    kind = getattr(module, TRAIT, None)
    if isinstance(kind, str) and not ("dynamic" in kind or kind == "longrope"):
        return None
    return "finds its frequencies by the largest position of the batch"
