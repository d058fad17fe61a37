"""Other inference engines for BERT on a CPU, with the same weights, and the work that it takes.

ONNX Runtime and OpenVINO read an ONNX file, CTranslate2 a file that its own converter writes. Each
gets torch's thread count, one stream, and otherwise its own defaults.

With ``torch.int8`` an engine keeps its weights in 8 bits, as its own tools quantize them: ONNX
Runtime by ``quantize_dynamic``, OpenVINO by nncf's ``compress_weights``, and CTranslate2 while it
loads them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trifuse.benchmarks.terminal import console, print_missing
from trifuse.models.bert import BertConfig, BertModel

Reader = Callable[[Tensor, Tensor], Tensor]
"""From token ids (B, L) and the mask (B, L) of the real ones to hidden states (B, L, hidden_size).

An engine's result may be overwritten by its next call.
"""


class Engine(NamedTuple):
    name: str
    package: str  # its name on PyPI and in imports
    needs: tuple[str, ...]  # further packages that loading a model needs
    why_not: Callable[[torch.dtype], str]  # why it can't compute in a dtype on this CPU, or ""
    load: Callable[[Path, Path, torch.dtype], Reader]  # from the weights' and a scratch directory

    @property
    def installed(self) -> bool:
        return all(map(importlib.util.find_spec, (self.package, *self.needs)))

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.package)

    def serves(self, dtype: torch.dtype) -> bool:
        return self.installed and not self.why_not(dtype)


def layer_weights(config: BertConfig) -> int:
    """Numbers in the weights of all layers' linear layers."""
    hidden = config.hidden_size
    return config.num_hidden_layers * hidden * (4 * hidden + 2 * config.intermediate_size)


def flops(config: BertConfig, lengths: Sequence[int]) -> float:
    """Operations of a forward over sequences of these lengths, without their padding."""
    pairs = sum(length**2 for length in lengths)
    features = config.num_hidden_layers * config.hidden_size
    return 2 * layer_weights(config) * sum(lengths) + 4 * pairs * features


def load(directory: Path, dtype: torch.dtype, only: str | None = None) -> dict[str, Reader]:
    """Load the installed engines that support ``dtype``, by name.

    Args:
        directory: ``config.json``, the weights and the tokenizer of a BERT.
        dtype: float32, bfloat16 or int8.
        only: the name of the one to load. Default: all.
    """
    readers = {}
    with tempfile.TemporaryDirectory() as scratch:
        for engine in ENGINES:
            if only in (None, engine.name) and engine.serves(dtype):
                readers[engine.name] = engine.load(directory, Path(scratch), dtype)
    return readers


def print_left_out(dtypes: Sequence[torch.dtype], only: str | None = None) -> None:
    """Print which engines are missing, and which of the dtypes the others don't compute in."""
    for engine in ENGINES:
        if only not in (None, engine.name):
            continue
        if not engine.installed:
            print_missing(engine.name)
            continue
        for dtype in dict.fromkeys(dtypes):
            if why := engine.why_not(dtype):
                line = f"{engine.name} is left out in {_name(dtype)}: {why}"
                console.print(line, style="dim", markup=False, soft_wrap=True)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide progress bars and warnings while transformers loads a model."""
    theirs = importlib.import_module("transformers.utils.logging")
    verbosity, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(verbosity)
        if bars:
            theirs.enable_progress_bar()


class _HiddenStates(nn.Module):
    """A BERT that returns its last hidden states and nothing else."""

    def __init__(self, model: BertModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(input_ids, mask).last_hidden_state


def _export(directory: Path, scratch: Path) -> Path:
    """Write the model as ONNX, once for the engines that read it.

    The model uses the eager attention formula and the tracing exporter: both engines run this
    fastest of all that torch can export.
    """
    path = scratch / "bert.onnx"
    if path.exists():
        return path
    model = _HiddenStates(BertModel.from_pretrained(directory)).eval()
    example = torch.ones(2, 8, dtype=torch.long)
    free = {0: "batch", 1: "length"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing is deprecated, and freezes checks of shapes
        torch.onnx.export(
            model,
            (example, example.bool()),
            str(path),
            dynamo=False,
            input_names=["input_ids", "mask"],
            output_names=["hidden_states"],
            dynamic_axes={"input_ids": free, "mask": free, "hidden_states": free},
        )
    return path


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _why_not_onnxruntime(dtype: torch.dtype) -> str:
    if dtype == torch.bfloat16:
        return "it has no product of bfloat16 for CPUs"
    return "" if dtype in (torch.float32, torch.int8) else f"{_name(dtype)} was not tried"


def _quantize(exported: Path) -> Path:
    """Write the model with weights of 8 bits; scales of each channel halve the error at no cost."""
    path = exported.with_name("bert-int8.onnx")
    quantization = importlib.import_module("onnxruntime.quantization")
    # It warns of a further pass over the graph, which this one doesn't need.
    logging.disable(logging.WARNING)
    try:
        quantization.quantize_dynamic(str(exported), str(path), per_channel=True)
    finally:
        logging.disable(logging.NOTSET)
    return path


def _load_onnxruntime(directory: Path, scratch: Path, dtype: torch.dtype) -> Reader:
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    path = _export(directory, scratch)
    if dtype == torch.int8:
        path = _quantize(path)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def read(input_ids: Tensor, mask: Tensor) -> Tensor:
        inputs = {"input_ids": input_ids.numpy(), "mask": mask.numpy()}
        return torch.from_numpy(session.run(None, inputs)[0])

    return read


def _why_not_openvino(dtype: torch.dtype) -> str:
    if dtype == torch.int8 and importlib.util.find_spec("nncf") is None:
        return "nncf, which compresses its weights, is not installed"
    served = dtype in (torch.float32, torch.bfloat16, torch.int8)
    return "" if served else f"{_name(dtype)} was not tried"


def _load_openvino(directory: Path, scratch: Path, dtype: torch.dtype) -> Reader:
    openvino = importlib.import_module("openvino")
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }
    core = openvino.Core()
    exported = core.read_model(str(_export(directory, scratch)))
    if dtype == torch.int8:
        exported = importlib.import_module("nncf").compress_weights(exported)
    else:
        hints = {torch.float32: "f32", torch.bfloat16: "bf16"}
        settings["INFERENCE_PRECISION_HINT"] = hints[dtype]
    model = core.compile_model(exported, "CPU", settings)
    request = model.create_infer_request()

    def read(input_ids: Tensor, mask: Tensor) -> Tensor:
        inputs = {"input_ids": input_ids.numpy(), "mask": mask.numpy()}
        results = request.infer(inputs, share_inputs=True, share_outputs=True)
        return torch.from_numpy(results[0])

    return read


def _why_not_ctranslate2(dtype: torch.dtype) -> str:
    ctranslate2 = importlib.import_module("ctranslate2")
    types = ctranslate2.get_supported_compute_types("cpu")
    return "" if _name(dtype) in types else f"on this CPU it offers {', '.join(sorted(types))}"


def load_ctranslate2(kind: str, directory: Path, scratch: Path, dtype: torch.dtype) -> Any:
    """Convert a model of transformers once, and return CTranslate2's object that runs it.

    Args:
        kind: "Encoder" or "Generator".
        directory: the weights and the tokenizer.
        scratch: where the converted model is kept.
        dtype: what it computes in.
    """
    ctranslate2 = importlib.import_module("ctranslate2")
    converted = scratch / "ctranslate2"
    if not converted.exists():
        with quiet_transformers():
            ctranslate2.converters.TransformersConverter(str(directory)).convert(str(converted))
    return getattr(ctranslate2, kind)(
        str(converted),
        device="cpu",
        inter_threads=1,
        intra_threads=torch.get_num_threads(),
        compute_type=_name(dtype),
    )


def _load_ctranslate2(directory: Path, scratch: Path, dtype: torch.dtype) -> Reader:
    ctranslate2 = importlib.import_module("ctranslate2")
    numpy = importlib.import_module("numpy")
    encoder = load_ctranslate2("Encoder", directory, scratch, dtype)

    def read(input_ids: Tensor, mask: Tensor) -> Tensor:
        ids, lengths = (
            ctranslate2.StorageView.from_array(tensor.int().numpy())
            for tensor in (input_ids, mask.sum(1))
        )
        hidden_states: Any = encoder.forward_batch(ids, lengths).last_hidden_state
        return torch.from_numpy(numpy.asarray(hidden_states))

    return read


ENGINES = (
    Engine("ONNX Runtime", "onnxruntime", ("onnx",), _why_not_onnxruntime, _load_onnxruntime),
    Engine("OpenVINO", "openvino", ("onnx",), _why_not_openvino, _load_openvino),
    Engine(
        "CTranslate2", "ctranslate2", ("transformers",), _why_not_ctranslate2, _load_ctranslate2
    ),
)
