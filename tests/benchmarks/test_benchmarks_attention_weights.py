"""The picture of attention weights."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from trifuse.benchmarks import attention_weights, demo


def test_shares_of_known_heads():
    """One head looks at the word itself, one at the previous, one at the next, one evenly."""
    L = 6
    heads = [torch.eye(L), torch.eye(L).roll(-1, 1), torch.eye(L).roll(1, 1), torch.ones(L, L) / L]
    figures = attention_weights.shares(torch.stack(heads))
    even = [1 / L] * 5
    expected = [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0.25, 0, 0],  # the first of four words looks at [CLS]
        [0, 0, 1, 0, 0.25, 0],
        [*even, math.log(L)],
    ]
    torch.testing.assert_close(figures, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("layer", [[], ["--layer", "6"]])
def test_picture_and_table(layer, tmp_path, capsys):
    try:
        demo.model_directory()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    picture = tmp_path / "new folder/heads.png"
    assert attention_weights.main(["It rains.", *layer, "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert f"layer {layer[-1] if layer else 3} of 6" in printed
    assert "[CLS]" in printed
    assert attention_weights.main(["It rains.", "--layer", "7"]) == 2
    assert "--layer: expected 1 to 6; got 7" in capsys.readouterr().out
