"""A small biLM in the layout of the published weights, and its vectors in NumPy's float64.

Nothing here uses torch or trifuse. The names and shapes of the datasets are those of the published
files. TensorFlow wrote them, so a product is x W, a convolution's weight is (1, width, D, filters),
and the gates of an LSTM are in the order i, g, f, o.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

# Rows of char_embed. The first 256 are bytes.
BEGIN_SENTENCE, END_SENTENCE, BEGIN_WORD, END_WORD, PADDING, CHARACTERS = range(256, 262)

OPTIONS: dict[str, Any] = {
    "lstm": {
        "cell_clip": 0.8,
        "use_skip_connections": False,
        "n_layers": 2,
        "proj_clip": 0.5,
        "projection_dim": 6,
        "dim": 10,
    },
    "char_cnn": {
        "embedding": {"dim": 3},
        "filters": [[1, 4], [2, 5], [3, 6]],
        "n_highway": 2,
        "n_characters": 262,
        "max_characters_per_token": 9,
        "activation": "relu",
    },
}

Array = Any  # float64 or float32; see the functions


def shapes(options: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of each dataset."""
    cnn, lstm = options["char_cnn"], options["lstm"]
    characters, words = cnn["embedding"]["dim"], lstm["projection_dim"]
    filters = sum(count for _, count in cnn["filters"])
    yield "char_embed", (CHARACTERS, characters)
    for n, (width, count) in enumerate(cnn["filters"]):
        yield f"CNN/W_cnn_{n}", (1, width, characters, count)
        yield f"CNN/b_cnn_{n}", (count,)
    for n in range(cnn["n_highway"]):
        for name in ("carry", "transform"):
            yield f"CNN_high_{n}/W_{name}", (filters, filters)
            yield f"CNN_high_{n}/b_{name}", (filters,)
    yield "CNN_proj/W_proj", (filters, words)
    yield "CNN_proj/b_proj", (words,)
    for direction in range(2):
        for depth in range(lstm["n_layers"]):
            cell = f"RNN_{direction}/RNN/MultiRNNCell/Cell{depth}/LSTMCell"
            yield f"{cell}/W_0", (2 * words, 4 * lstm["dim"])
            yield f"{cell}/B", (4 * lstm["dim"],)
            yield f"{cell}/W_P_0", (lstm["dim"], words)


def write(folder: Path, options: Mapping[str, Any] = OPTIONS) -> tuple[Path, Path]:
    """Write options and random float32 weights; return the paths of both files.

    The weights are large enough for the clips to matter.
    """
    random = np.random.default_rng(0)
    paths = folder / "options.json", folder / "weights.hdf5"
    paths[0].write_text(json.dumps(options))
    with h5py.File(paths[1], "w") as file:
        for name, shape in shapes(options):
            file[name] = random.normal(scale=0.6, size=shape).astype(np.float32)
    return paths


class Vectors:
    """The top layer's vectors of a written model; the state is carried from call to call.

    Args:
        options: the path of the options.
        weights: the path of the weights.
    """

    def __init__(self, options: Path, weights: Path) -> None:
        self.options = json.loads(options.read_text())
        with h5py.File(weights) as file:
            self.weights = {
                name: file[name][()].astype(np.float64) for name, _ in shapes(self.options)
            }
        self.states: dict[tuple[int, int, int], tuple[Array, Array]] = {}

    def __call__(self, sentences: Sequence[Sequence[str]]) -> list[Array]:
        """For each sentence, float64 (2, tokens, projection_dim): forward, backward."""
        return [self._sentence(row, words) for row, words in enumerate(sentences)]

    def _sentence(self, row: int, words: Sequence[str]) -> Array:
        spelt = [[BEGIN_SENTENCE], *(list(word.encode()) for word in words), [END_SENTENCE]]
        embedded = [self._word(codes) for codes in spelt]
        forward = self._direction(0, row, embedded)
        backward = self._direction(1, row, embedded[::-1])[::-1]
        return np.stack([forward[1:-1], backward[1:-1]])

    def _word(self, codes: list[int]) -> Array:
        cnn, weights = self.options["char_cnn"], self.weights
        size = cnn["max_characters_per_token"]
        framed = [BEGIN_WORD, *codes[: size - 2], END_WORD]
        framed += [PADDING] * (size - len(framed))
        x = weights["char_embed"][framed]
        maxima = []
        for n, (width, _) in enumerate(cnn["filters"]):
            windows = np.stack([x[start : start + width] for start in range(size - width + 1)])
            found = np.einsum("twd,wdn->tn", windows, weights[f"CNN/W_cnn_{n}"][0])
            maxima.append((found + weights[f"CNN/b_cnn_{n}"]).max(0))
        word = np.concatenate(maxima)
        word = np.tanh(word) if cnn["activation"] == "tanh" else np.maximum(word, 0)
        for n in range(cnn["n_highway"]):
            carry, transform = (
                word @ weights[f"CNN_high_{n}/W_{name}"] + weights[f"CNN_high_{n}/b_{name}"]
                for name in ("carry", "transform")
            )
            gate = sigmoid(carry)
            word = gate * np.maximum(transform, 0) + (1 - gate) * word
        return word @ weights["CNN_proj/W_proj"] + weights["CNN_proj/b_proj"]

    def _direction(self, direction: int, row: int, inputs: list[Array]) -> list[Array]:
        options = self.options["lstm"]
        for depth in range(options["n_layers"]):
            outputs = self._layer(direction, depth, row, inputs)
            if depth > 0 and options["use_skip_connections"]:
                outputs = [x + y for x, y in zip(inputs, outputs, strict=True)]
            inputs = outputs
        return inputs

    def _layer(self, direction: int, depth: int, row: int, inputs: list[Array]) -> list[Array]:
        options = self.options["lstm"]
        cell = f"RNN_{direction}/RNN/MultiRNNCell/Cell{depth}/LSTMCell"
        W, B, P = (self.weights[f"{cell}/{name}"] for name in ("W_0", "B", "W_P_0"))
        fresh = np.zeros(options["projection_dim"]), np.zeros(options["dim"])
        h, c = self.states.get((direction, depth, row), fresh)
        outputs = []
        for x in inputs:
            i, g, f, o = np.split(np.concatenate([x, h]) @ W + B, 4)
            c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(g)  # TensorFlow's forget bias is 1
            c = c.clip(-options["cell_clip"], options["cell_clip"])
            h = (sigmoid(o) * np.tanh(c)) @ P
            h = h.clip(-options["proj_clip"], options["proj_clip"])
            outputs.append(h)
        self.states[direction, depth, row] = h, c
        return outputs


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))
