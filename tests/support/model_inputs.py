"""Arguments for the forward of a model of transformers, for scan_transformers.py.

Arguments are made according to their names. Models of different kinds use one name for different
shapes, so there may be several candidates. The first with which a model runs is used.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

BATCH, LENGTH = 3, 12
LENGTHS = (LENGTH, 8, 5)
DECODER_LENGTH = 7
FRAMES = 4  # of a video
LARGEST_IMAGE = 256  # height or width; larger ones take too long
COMBINATIONS = 60  # the most combinations of candidates for each choice of arguments

Arguments = dict[str, Any]


def find(config: Any, *names: str, default: Any = None) -> Any:
    """Returns the first of these options that is set, here or in a nested configuration."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for part in getattr(config, "sub_configs", {}):
        inner = getattr(config, part, None)
        if inner is not None and (value := find(inner, *names)) is not None:
            return value
    return default


def number(config: Any, *names: str, default: int) -> int:
    """Returns the first of these options that is a positive number, or the default."""
    for name in names:
        value = find(config, name)
        if isinstance(value, (list, tuple)) and value:
            value = value[-1]
        if isinstance(value, int) and value > 0:
            return value
    return default


class _Makers:
    """The candidates for the arguments of one model, by name."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.generator = torch.Generator().manual_seed(1)
        self.channels = number(config, "num_channels", "in_channels", default=3)
        self.frames = number(config, "num_frames", default=FRAMES)
        self.mels = number(
            config, "num_mel_bins", "feature_size", "input_feat_per_channel", default=80
        )
        self.width = number(config, "hidden_size", "d_model", default=64)

    def __call__(self, name: str) -> list[Any]:
        """Returns the candidates, the most likely first; none for an unknown name."""
        make = _CANDIDATES.get(name)
        if make is not None:
            return list(make(self))
        return [self.ids()] if name.endswith("_input_ids") else []

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def ids(self, length: int = LENGTH, largest: int = 100) -> Tensor:
        largest = max(min(number(self.config, "vocab_size", default=100), largest), 4)
        return torch.randint(3, largest, (BATCH, length), generator=self.generator)

    def size(self, *names: str, default: int = 64) -> int:
        return number(self.config, *names, default=default)

    def boxes(self) -> Tensor:
        boxes = torch.randint(0, 50, (BATCH, LENGTH, 4), generator=self.generator)
        boxes[..., 2:] += boxes[..., :2]
        return boxes.double() / 100 if str(self.config.model_type).startswith("bros") else boxes

    def patches(self, *before: int) -> list[Tensor]:
        """Returns flattened patches of images, or of as many images as a video's patch has."""
        one = self.channels * self.size("patch_size", default=8) ** 2
        widths = dict.fromkeys([one * self.size("temporal_patch_size", default=1), one])
        return [self.noise(*before, width) for width in widths]

    def images(self, *before: int, channels: int | None = None) -> list[Tensor]:
        """Returns images of the configuration's size and of others."""
        image = find(self.config, "image_size", default=32)
        sizes = [(image, image) if isinstance(image, int) else tuple(image)[-2:]]
        sizes += [(64, 64), (32, 64), (128, 128)]
        sizes = [size for size in dict.fromkeys(sizes) if max(size) <= LARGEST_IMAGE]
        return [self.noise(*before, channels or self.channels, *size) for size in sizes]

    def series(self) -> list[Tensor]:
        """Returns time series, as long as the context plus the largest lag, or as the context."""
        lags = find(self.config, "lags_sequence", default=[0])
        context = self.size("context_length", "prediction_length", default=32)
        variables = self.size("num_input_channels", "input_size", default=1)
        return [
            self.noise(BATCH, context + max(lags)).abs(),
            self.noise(BATCH, context, variables),
        ]

    def times(self) -> int:
        """Returns the number of features of a point in time."""
        return int(find(self.config, "num_time_features", default=0))

    def lengths(self) -> list[int]:
        """Returns lengths of speech, in frames."""
        frames = 2 * self.size("max_source_positions", default=32)
        window = 2 * self.size("n_window", default=32)
        return list(dict.fromkeys([frames if frames <= 4000 else 64, window]))

    def sequences(self) -> list[Tensor]:
        """Returns vectors of the widths that a part of a speech codec may take."""
        names = ("hidden_size", "latent_dim", "codebook_dim", "upsample_latent_dim")
        shapes = [(1, 3200)]  # a waveform
        for width in dict.fromkeys(self.size(name, default=1) for name in names):
            shapes += [(8, width), (width, 8)]
        return [self.noise(BATCH, *shape) for shape in shapes]

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.long)


# A grid of patches: one image of 4×4 and one of 2×4, 24 patches in all; or 4×4 for every text.
GRID = ((1, 4, 4), (1, 2, 4))
PATCHES = sum(t * h * w for t, h, w in GRID)
SIDE = 4

_CANDIDATES: dict[str, Callable[[_Makers], Iterable[Any]]] = {
    "input_ids": lambda m: [m.ids()],
    "decoder_input_ids": lambda m: [m.ids(DECODER_LENGTH)],
    "token_type_ids": lambda m: [torch.zeros(BATCH, LENGTH, dtype=torch.long)],
    "lang_ids": lambda m: [torch.zeros(BATCH, dtype=torch.long)],
    "bbox": lambda m: [m.boxes()],
    "inputs_embeds": lambda m: [m.noise(BATCH, LENGTH, m.width)],
    "inputs": lambda m: [m.noise(BATCH, LENGTH, m.width)],
    "noise_embeds": lambda m: [m.noise(BATCH, DECODER_LENGTH, m.width)],
    "query_embeds": lambda m: [m.noise(BATCH, LENGTH, m.width)],
    "encoder_hidden_states": lambda m: [
        m.noise(BATCH, LENGTH, m.size("encoder_hidden_size", "hidden_size"))
    ],
    "context_hidden_states": lambda m: [m.noise(BATCH, LENGTH, m.width)],
    "action_embeds": lambda m: [m.noise(BATCH, m.size("chunk_size", default=8), m.width)],
    # Images and videos
    "pixel_values": lambda m: [
        *m.images(BATCH),
        *m.patches(PATCHES),
        *m.patches(BATCH, SIDE**2),
        *m.images(BATCH, m.frames),
        *m.images(BATCH, 2),
        *m.images(BATCH, channels=1),
    ],
    "pixel_values_videos": lambda m: m.images(BATCH, m.frames),
    "prompt_pixel_values": lambda m: m.images(BATCH),
    "prompt_masks": lambda m: m.images(BATCH),
    "pixel_attention_mask": lambda m: [torch.ones(BATCH, SIDE**2, dtype=torch.long)],
    "spatial_shapes": lambda m: [torch.tensor([[SIDE, SIDE]] * BATCH)],
    "tgt_sizes": lambda m: [torch.tensor([[SIDE, SIDE]] * BATCH)],
    "pixel_position_ids": lambda m: [
        torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).expand(BATCH, -1, -1)
    ],
    "grid_thw": lambda m: [torch.tensor(GRID)],
    "image_grid_thw": lambda m: [torch.tensor(GRID)],
    "merge_sizes": lambda m: [torch.tensor([m.size("merge_size", default=1)] * len(GRID))],
    "visual_feats": lambda m: [m.noise(BATCH, 6, m.size("visual_feat_dim"))],
    "visual_pos": lambda m: [m.noise(BATCH, 6, m.size("visual_pos_dim", default=4))],
    "input_points": lambda m: [m.noise(BATCH, 1, 2, 2).abs()],
    "task_inputs": lambda m: [m.ids(m.size("task_seq_len", default=LENGTH))],
    "qformer_input_ids": lambda m: [m.ids()],
    # Speech
    "input_features": lambda m: [
        *(
            m.noise(BATCH, *shape)
            for mels in dict.fromkeys([m.mels, 80, 128, 160, 320])
            for n in m.lengths()
            for shape in ((mels, n), (n, mels))
        ),
        *(m.noise(BATCH, n, m.size(*_FEATURES)) for n in m.lengths()),
        m.noise(BATCH, 1, m.size("spec_size", default=64), m.mels),
    ],
    "input_features_mask": lambda m: [m.ones(BATCH, n) for n in m.lengths()],
    "input_values": lambda m: [
        m.noise(BATCH, 3200),
        m.noise(BATCH, 1, 3200),
        m.noise(BATCH, m.size("max_length"), m.mels),
    ],
    "decoder_input_values": lambda m: [m.noise(BATCH, DECODER_LENGTH, m.mels)],
    "audio_mel": lambda m: [m.noise(BATCH, 64, m.size("input_feat_size", default=80))],
    "audio_mel_mask": lambda m: [torch.zeros(BATCH, 64, dtype=torch.bool)],
    "latents": lambda m: m.sequences(),
    "hidden_states": lambda m: [*m.patches(PATCHES), *m.sequences()],
    # Series
    "past_values": lambda m: m.series(),
    "past_time_features": lambda m: [m.noise(*x.shape[:2], m.times()) for x in m.series()],
    "past_observed_mask": lambda m: [torch.ones_like(x) for x in m.series()],
    "past_values_padding": lambda m: [m.ones(*x.shape[:2]) * 0 for x in m.series()],
    "future_values": lambda m: [m.noise(BATCH, m.size("prediction_length"))],
    "future_time_features": lambda m: [m.noise(BATCH, m.size("prediction_length"), m.times())],
    "freq": lambda m: [torch.zeros(BATCH, 1, dtype=torch.long)],
    "states": lambda m: [m.noise(BATCH, LENGTH, m.size("state_dim"))],
    "actions": lambda m: [m.noise(BATCH, LENGTH, m.size("act_dim"))],
    "rewards": lambda m: [m.noise(BATCH, LENGTH, 1)],
    "returns_to_go": lambda m: [m.noise(BATCH, LENGTH, 1)],
    "timesteps": lambda m: [torch.arange(LENGTH).expand(BATCH, -1)],
}
_FEATURES = ("input_dim", "input_size", "feature_projection_input_dim", "hidden_size")

# Optional arguments that belong together. Those that the model has are given.
_TOGETHER: tuple[tuple[str, ...], ...] = (
    ("input_ids", "decoder_input_ids", "bbox"),
    ("input_ids", "bbox"),
    ("input_ids", "decoder_input_ids", "bbox", "pixel_values"),
    ("input_ids", "decoder_input_ids", "pixel_values"),
    ("input_ids", "pixel_values", "pixel_attention_mask", "spatial_shapes"),
    ("pixel_values", "grid_thw"),
    ("pixel_values", "tgt_sizes"),
    ("pixel_values", "input_points"),
    ("hidden_states", "grid_thw"),
    ("input_ids", "pixel_values_videos"),
    ("pixel_values_videos",),
    ("input_ids", "input_features"),
    ("decoder_input_ids", "input_features", "input_features_mask"),
    ("input_features", "input_features_mask"),
    ("input_ids", "input_values"),
    ("decoder_input_ids", "input_values"),
    ("decoder_input_values", "input_values"),
    ("input_values",),
    ("input_ids", "visual_feats", "visual_pos"),
    ("input_ids", "lang_ids"),
    ("future_values", "future_time_features"),
    ("states", "actions", "rewards", "returns_to_go", "timesteps"),
    ("encoder_hidden_states",),
    ("inputs_embeds",),
    ("encoder_hidden_states", "inputs_embeds"),
    (),
)


def inputs(model: Any) -> Iterator[Arguments]:
    """Yields candidate arguments of the model; the first with which it runs are used."""
    parameters = inspect.signature(model.forward).parameters
    named = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in named if p.default is p.empty]
    make = _Makers(model.config)
    seen = set()
    for together in _TOGETHER:
        optional = [name for name in together if name in parameters]
        names = list(dict.fromkeys([*optional, *required]))
        if not names or frozenset(names) in seen:
            continue
        seen.add(frozenset(names))
        candidates = [make(name) for name in names]
        if all(candidates):
            for values in itertools.islice(itertools.product(*candidates), COMBINATIONS):
                yield dict(zip(names, values, strict=True))
