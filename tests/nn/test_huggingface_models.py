"""Models that compute attention themselves, and fused models in other processes."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from model_sizes import GPT_SIZES, GROUPED_QUERIES, SIZES, TRANSLATION_SIZES
from torch import Tensor, nn
from transformers_versions import is_4

import trifuse

transformers = pytest.importorskip("transformers")

from transformers import PreTrainedModel  # noqa: E402
from transformers.masking_utils import create_causal_mask  # noqa: E402

from trifuse import huggingface, written_out  # noqa: E402
from trifuse.recipes.attention_interface import why_not  # noqa: E402

PADDED_SIZES = SIZES | {"pad_token_id": 1}
BARTS = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
ONE_LAYER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}

# By model: the options of a small configuration.
COMPUTE_THEMSELVES = {
    "Bloom": {"vocab_size": 97, "hidden_size": 32, "n_layer": 1, "n_head": 4},
    "MPNet": PADDED_SIZES,
    "ConvBert": PADDED_SIZES | {"embedding_size": 32},
    "MegatronBert": PADDED_SIZES,
    "RemBert": PADDED_SIZES | {"input_embedding_size": 32},
    "RoFormer": PADDED_SIZES | {"embedding_size": 32},
    "SqueezeBert": PADDED_SIZES | {"embedding_size": 32},
    "Luke": PADDED_SIZES | {"entity_vocab_size": 20, "entity_emb_size": 32},
    "IBert": PADDED_SIZES,
    "BigBird": PADDED_SIZES | {"attention_type": "original_full"},
    "CodeGen": GPT_SIZES | {"rotary_dim": 4},
    "GPTNeoXJapanese": ONE_LAYER | {"vocab_size": 97},
    "XGLM": {"vocab_size": 97, "d_model": 32, "num_layers": 1, "attention_heads": 4, "ffn_dim": 48},
    "LED": BARTS | {"attention_window": 4},
    "Mpt": {"vocab_size": 97, "d_model": 32, "n_layers": 1, "n_heads": 4},
}
HAVE_TABLES = {
    "Falcon": ONE_LAYER | {"vocab_size": 97},
    "GPTJ": GPT_SIZES | {"rotary_dim": 4},
    "SamVision": ONE_LAYER | {"image_size": 32, "patch_size": 8, "global_attn_indexes": [0]},
    "GPTNeo": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_layers": 1,
        "num_heads": 4,
        "attention_types": [[["global"], 1]],
        "max_position_embeddings": 64,
    },
}
IDS = torch.randint(5, 97, (2, 8), generator=torch.Generator().manual_seed(0))
PADDED = (torch.arange(8) < torch.tensor([8, 5])[:, None]).long()

pytestmark = pytest.mark.usefixtures("torch_multiplies")


def make(name: str, options: dict, implementation: str) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**options)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return getattr(transformers, f"{name}Model")(config).eval()


def takes_any_attention(name: str) -> bool:
    """What the class declares; some models declare it only in newer versions of transformers."""
    return getattr(transformers, f"{name}Model")._supports_attention_backend


@pytest.mark.parametrize("name", HAVE_TABLES)
def test_tables_of_classes_get_ours(name):
    """So a model made with the name runs fused, with the masks of "eager"."""
    huggingface.register()
    ours, eager = (make(name, HAVE_TABLES[name], which) for which in ("trifuse", "eager"))
    if name == "SamVision":
        given = [{"pixel_values": torch.randn(2, 3, 32, 32)}]
    else:
        given = [{"input_ids": IDS, "attention_mask": mask} for mask in (None, PADDED)]
    for each in given:
        mask = each.get("attention_mask")
        real = ... if mask is None else mask.bool()
        before = written_out.attended()
        got = ours(**each)[0][real]
        # SAM's form isn't known: it computes as it is written.
        fused = written_out.attended() > before or takes_any_attention(name)
        assert fused == (name != "SamVision")
        torch.testing.assert_close(got, eager(**each)[0][real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", COMPUTE_THEMSELVES)
def test_what_computes_its_attention_is_refused_when_made_or_is_right(name):
    huggingface.register()
    options = COMPUTE_THEMSELVES[name]
    if takes_any_attention(name):
        ours, eager = (make(name, options, which).double() for which in ("trifuse", "eager"))
        got, wanted = (m(input_ids=IDS, attention_mask=PADDED)[0] for m in (ours, eager))
        torch.testing.assert_close(got[PADDED.bool()], wanted[PADDED.bool()])
    else:
        with pytest.raises(ValueError, match=f'{name}\\w*Model .*"trifuse".*Load it with'):
            make(name, options, "trifuse")


@pytest.mark.parametrize("name", COMPUTE_THEMSELVES)
def test_what_computes_its_attention_is_refused_when_it_makes_a_mask(name):
    """The name "trifuse" may be set where transformers doesn't check it."""
    if takes_any_attention(name):
        pytest.skip(f"{name} takes any attention in transformers {transformers.__version__}")
    model = make(name, COMPUTE_THEMSELVES[name], "eager")
    wanted = model(input_ids=IDS, attention_mask=PADDED)[0]
    report = trifuse.fuse(model)
    assert not any("attn_implementation" in swapped.before for swapped in report.swapped)
    fused = model(input_ids=IDS, attention_mask=PADDED)[0]
    torch.testing.assert_close(fused[PADDED.bool()], wanted[PADDED.bool()])
    report.revert()
    assert torch.equal(model(input_ids=IDS, attention_mask=PADDED)[0], wanted)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.config._attn_implementation_internal = "trifuse"
    for mask in (None, PADDED):
        with pytest.raises(ValueError, match="computes attention itself"):
            model(input_ids=IDS, attention_mask=mask)


class Asking(nn.Module):
    """Remote code that takes its attention from transformers' registry."""

    is_causal = True

    def forward(self, hidden_states, attention_mask):
        interface = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
        attend = interface.get_interface("trifuse", None)
        x = hidden_states[:, None]
        return attend(self, x, x, x, attention_mask)[0][:, :, 0]


class Computing(nn.Module):
    """Remote code that computes attention itself."""

    def forward(self, hidden_states, attention_mask):
        x = hidden_states[:, None]
        scores = x @ x.transpose(-1, -2) / x.shape[-1] ** 0.5
        return ((scores + attention_mask).softmax(-1) @ x)[:, 0]


class ComputingInstead(Asking):
    """Computes attention itself, though its base class takes it from the registry."""

    forward = Computing.forward


class OneConfig(transformers.PretrainedConfig):
    model_type = "one_of_its_own"


def remote(*attentions: type[nn.Module]) -> type[PreTrainedModel]:
    """Returns the class of a model that chains these attentions."""

    class Remote(PreTrainedModel):
        config_class = type("RemoteConfig", (OneConfig,), {})
        _supports_sdpa = True

        def forward(self, hidden_states):
            mask = create_causal_mask(self.config, hidden_states, None, None)
            for layer in self.layers:
                hidden_states = layer(hidden_states, mask)
            return hidden_states

    # why_not finds the classes by their names in the code of __init__, which must contain them.
    names = ", ".join(layer.__name__ for layer in attentions)
    scope = {layer.__name__: layer for layer in attentions} | {"nn": nn, "Base": PreTrainedModel}
    code = f"""
def __init__(self, config):
    Base.__init__(self, config)
    self.layers = nn.ModuleList(layer() for layer in [{names}])
    self.post_init()
"""
    exec(code, scope)
    Remote.__init__ = scope["__init__"]
    return Remote


@pytest.mark.parametrize("attention", [Computing, ComputingInstead])
def test_code_from_elsewhere_that_computes_its_attention(attention):
    model = remote(attention)
    assert "computes attention itself" in why_not(model)
    huggingface.register()
    with pytest.raises(ValueError, match=attention.__name__):
        model(model.config_class(attn_implementation="trifuse"))


def test_code_from_elsewhere_that_asks():
    assert why_not(remote(Asking)) is None


def test_a_model_with_both_kinds_is_right():
    """Both get the additive mask, even where one of them could do without a mask."""
    huggingface.register()
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    both = remote(Asking, Computing)
    assert why_not(both) is None
    got = both(both.config_class(attn_implementation="trifuse"))(x)
    wanted = x
    causal = torch.zeros(5, 5).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -1e30)
    for _ in range(2):
        wanted = Computing()(wanted, causal)
    torch.testing.assert_close(got, wanted)


def test_layers_that_call_themselves_causal_and_get_no_mask():
    """In a model without support for "sdpa", no mask means no masking, as under "eager"."""

    class CallsItselfCausal(Asking):
        def __init__(self, config):
            super().__init__()
            self.config = config

        def forward(self, hidden_states, attention_mask):
            return super().forward(hidden_states, None)

    model = remote(CallsItselfCausal)
    model._supports_sdpa = False
    config = model.config_class()
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    wanted = Computing()(x, torch.zeros(5, 5))
    torch.testing.assert_close(CallsItselfCausal(config)(x, None), wanted)


def test_a_causal_mask_for_layers_that_can_be_bidirectional():
    options = PADDED_SIZES | {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "use_bidirectional_attention": True,
    }
    wanted = make("Gemma", options, "eager")(IDS)[0]
    got = make("Gemma", options, "trifuse")(IDS)[0]
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("positions", [range(5), range(3, 8), range(7, 8), range(2, 5)])
@pytest.mark.parametrize("padded", [False, True])
def test_masks_are_asked_for_by_positions_or_by_lengths(positions, padded):
    """Versions of transformers differ in how they pass the positions of the queries."""
    first, length = positions[0], len(positions)
    kv_length = max(positions[-1] + 1, 5)
    keep = torch.ones(2, kv_length, dtype=torch.bool)
    keep[1, :2] = not padded
    both = {"batch_size": 2, "kv_length": kv_length, "attention_mask": keep}
    by_lengths = huggingface.attention_mask(q_length=length, q_offset=first, **both)
    by_positions = huggingface.attention_mask(cache_position=torch.tensor(positions), **both)
    assert type(by_lengths) is type(by_positions)
    if by_lengths is not None:
        assert by_lengths.dtype == by_positions.dtype
        assert torch.equal(by_lengths, by_positions)


def eager_attention_forward(
    module, query, key, value, attention_mask, scaling, sinks=None, **kwargs
):
    """Has the signature of transformers' functions of this name."""
    del module, query, key, value, attention_mask, scaling, sinks, kwargs


class HasFormula(nn.Module):
    """Its code names the function that it would call under "eager"."""

    is_causal = False

    def forward(self):
        return eager_attention_forward


def test_arguments_that_change_the_result_are_refused():
    x = torch.randn(1, 2, 5, 8)
    wanted, _ = huggingface.attention_forward(HasFormula(), x, x, x, None)
    for layer, name, value in [
        (HasFormula(), "sinks", torch.zeros(2)),
        (Asking(), "temperature", 2.0),
        (HasFormula(), "cu_seq_lens_q", torch.tensor([0, 2, 5])),
    ]:
        with pytest.raises(ValueError, match=f"does not support {name}.*{type(layer).__name__}"):
            huggingface.attention_forward(layer, x, x, x, None, **{name: value})
    harmless = {
        "position_ids": torch.arange(5),
        "cache_position": torch.arange(5),
        "use_cache": True,
        "sliding_window": 4,
        "output_hidden_states": True,
        "sinks": None,
        "softcap": None,
        "s_aux": None,
        "output_attentions": False,
        "cu_seq_lens_q": torch.tensor([0, 5]),
        "nobody_takes_this": 1,
    }
    got, _ = huggingface.attention_forward(HasFormula(), x, x, x, None, **harmless)
    assert torch.equal(got, wanted)
    capped, _ = huggingface.attention_forward(HasFormula(), x, x, x, None, softcap=0.1)
    assert not torch.equal(capped, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sinks_come_as_s_aux(dtype):
    """In the dtype of the layer's other tensors, or in one of their own."""
    x = torch.randn(1, 2, 5, 8, dtype=dtype)
    for own in (torch.float32, torch.bfloat16, torch.float64):
        sinks = torch.tensor([0.5, -2.0], dtype=own)
        got, _ = huggingface.attention_forward(HasFormula(), x, x, x, None, s_aux=sinks)
        column = sinks.double()[:, None, None].expand(1, 2, 5, 1)
        scores = torch.cat([x.double() @ x.double().mT * 8**-0.5, column], -1)
        wanted = scores.softmax(-1)[..., :-1] @ x.double()
        rtol = {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, 3e-2)
        torch.testing.assert_close(got.transpose(1, 2).double(), wanted, rtol=rtol, atol=rtol)


def test_sinks_of_the_layer_are_served_only_as_s_aux():
    options = PADDED_SIZES | {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    }
    layer = make("GptOss", options, "eager").layers[0].self_attn
    x = torch.randn(1, 4, 5, 8)
    for kwargs in ({}, {"sinks": layer.sinks}, {"another": layer.sinks}):
        with pytest.raises(ValueError, match="does not support s"):
            huggingface.attention_forward(layer, x, x, x, None, **kwargs)
    got, _ = huggingface.attention_forward(layer, x, x, x, None, s_aux=layer.sinks)
    # It is marked as causal for FlashAttention, which it supports, so no mask means a causal one.
    wanted = trifuse.scaled_dot_product_attention(x, x, x, is_causal=True, sinks=layer.sinks)
    torch.testing.assert_close(got, wanted.transpose(1, 2))


def test_the_check_leaves_other_names_alone():
    huggingface.register()
    before = PreTrainedModel.get_correct_attn_implementation
    huggingface.register()
    assert PreTrainedModel.get_correct_attn_implementation is before
    model = make("MPNet", PADDED_SIZES, "eager")
    assert model.get_correct_attn_implementation("eager") == "eager"
    with pytest.raises(ValueError, match="not supported"):
        model.get_correct_attn_implementation("nonsense")


# Other processes --------------------------------------------------------------------------------


# Runs code from its input, a line each, in forks of this process. It has imported what takes most
# of the time, but neither trifuse nor transformers.
SERVE = """
import contextlib, gc, importlib, json, os, sys, traceback
import torch, torch._dynamo
for name in ("accelerate", "scipy.optimize"):  # transformers imports them if they are installed
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
assert not {"transformers", "trifuse"} & set(sys.modules)
gc.freeze()
for line in sys.stdin:
    code, out, err, *arguments = json.loads(line)
    child = os.fork()
    if not child:
        for number, path in (1, out), (2, err):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        sys.argv[1:] = arguments
        failed = 1
        try:
            exec(code, {"__name__": "__main__"})
            failed = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(failed)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Returns a function that runs code in a fresh process and returns what it prints."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE],
        env=os.environ | {"TRIFUSE_LINEAR": "torch"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(code: str, *arguments: object) -> str:
        assert server.stdin is not None
        assert server.stdout is not None
        folder = tmp_path_factory.mktemp("run")
        out, err = folder / "out", folder / "err"
        print(json.dumps([code, *map(str, (out, err, *arguments))]), file=server.stdin, flush=True)
        status = server.stdout.readline().strip()
        assert status == "0", err.read_text() if err.exists() else "the server has ended"
        return out.read_text()

    yield run
    server.communicate()


def llama(implementation: str = "sdpa") -> nn.Module:
    options = PADDED_SIZES | GROUPED_QUERIES
    return make("Llama", options, implementation)


LOAD = """
import sys
{first}
import torch
model, ids, wanted = torch.load(sys.argv[1], weights_only=False)
assert model.config._attn_implementation == sys.argv[2]
torch.testing.assert_close(model(ids)[0], wanted)
"""


@pytest.mark.parametrize(
    "first",
    [
        "",
        "import trifuse",
        "import trifuse, transformers",
        "import transformers, trifuse",
        "import trifuse, transformers.models.llama.modeling_llama",
        "import transformers.modeling_utils, trifuse",
    ],
)
def test_a_fused_model_is_loaded_in_a_new_process(run, tmp_path, first):
    model = llama()
    trifuse.fuse(model)
    path = tmp_path / "model.pt"
    torch.save((model, IDS, model(IDS)[0].detach()), path)
    run(LOAD.format(first=first), path, "trifuse")


def writes_its_softmax_out(
    self: Any, hidden_states: Tensor, attention_mask: Any = None, *_: Any, **__: Any
) -> Any:
    shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
    query = self.query(hidden_states).view(shape).transpose(1, 2)
    key = self.key(hidden_states).view(shape).transpose(1, 2)
    value = self.value(hidden_states).view(shape).transpose(1, 2)
    scores = query @ key.mT * self.attention_head_size**-0.5
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).reshape(hidden_states.shape), weights


def test_an_attention_replaced_in_a_class_that_was_examined_before(monkeypatch):
    """It adds a mask to its scores, and gets the one that it has with "eager"."""
    from transformers.models.bert.modeling_bert import BertSelfAttention

    def build() -> Any:
        torch.manual_seed(0)
        config = transformers.BertConfig(**PADDED_SIZES, attn_implementation="eager")
        return transformers.BertModel(config).eval()

    keep = torch.arange(IDS.shape[1]) < torch.tensor([[8], [3]])
    given = {"input_ids": IDS, "attention_mask": keep.long()}
    first = build()
    trifuse.fuse(first)
    first(**given)
    model = build()
    monkeypatch.setattr(BertSelfAttention, "forward", writes_its_softmax_out)
    wanted = model(**given).last_hidden_state
    trifuse.fuse(model)
    got = model(**given).last_hidden_state
    torch.testing.assert_close(got[keep], wanted[keep], rtol=1e-5, atol=1e-5)


MADE = """
import json, sys
{first}
made = {{}}
for name, options in eval(sys.argv[1]).items():
    config = getattr(transformers, name + "Config")(**options, attn_implementation="trifuse")
    try:
        model = getattr(transformers, name + "Model")(config)
    except ValueError as error:
        made[name] = str(error)
    else:
        modules = [type(m) for m in model.modules()]
        made[name] = [m.__module__ for m in modules if "ttention" in m.__name__][-1]
print(json.dumps(made))
"""


@pytest.mark.parametrize("first", ["import trifuse, transformers", "import transformers, trifuse"])
def test_models_made_with_the_name_after_import_alone(run, first):
    """Tables of classes offer ours; a model that computes attention itself is refused."""
    names = ("Falcon", "GPTNeo", "SamVision")
    options = {name: HAVE_TABLES[name] for name in names} | {"Mpt": COMPUTE_THEMSELVES["Mpt"]}
    made = json.loads(run(MADE.format(first=first), options).splitlines()[-1])
    for name in names:
        assert made[name] == "trifuse.recipes" or takes_any_attention(name)
    if not takes_any_attention("Mpt") and not is_4():  # 4.57's computes as with eager
        assert "trifuse.fuse(model)" in made["Mpt"]


def test_a_model_made_with_the_name_is_loaded_in_a_new_process(run, tmp_path):
    huggingface.register()
    model = llama("trifuse")
    path = tmp_path / "model.pt"
    torch.save((model, IDS, model(IDS)[0].detach()), path)
    run(LOAD.format(first="import trifuse"), path, "trifuse")


def test_a_part_of_a_fused_model_and_one_that_was_reverted(run, tmp_path):
    model = transformers.BertForMaskedLM(transformers.BertConfig(**PADDED_SIZES)).eval()
    report = trifuse.fuse(model, unpad=True)
    path = tmp_path / "model.pt"
    torch.save((model.bert, IDS, model.bert(IDS)[0].detach()), path)
    run(LOAD.format(first=""), path, "trifuse")
    report.revert()
    torch.save((model.bert, IDS, model.bert(IDS)[0].detach()), path)
    run(LOAD.format(first="") + "assert 'trifuse' not in sys.modules", path, "sdpa")


def _forward(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids)[0]


def test_a_fused_model_in_a_spawned_process():
    model = llama()
    trifuse.fuse(model)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        got = pool.submit(_forward, model, IDS).result()
    torch.testing.assert_close(got, _forward(model, IDS))


def test_a_copy_of_a_fused_model():
    model = llama()
    report = trifuse.fuse(model)
    other = copy.deepcopy(model)
    torch.testing.assert_close(other(IDS)[0], model(IDS)[0])
    report.revert()
    assert other.config._attn_implementation == "trifuse"
    assert not any("trifuse" in name for module in model.modules() for name in vars(module))


def test_a_saved_configuration_does_not_say_it(run, tmp_path):
    model = llama()
    wanted = model(IDS)[0]
    trifuse.fuse(model)
    model.save_pretrained(tmp_path)
    assert "trifuse" not in Path(tmp_path, "config.json").read_text()
    code = (
        "import sys, transformers\n"
        "model = transformers.AutoModel.from_pretrained(sys.argv[1])\n"
        "print(model.config._attn_implementation, 'trifuse' in sys.modules)"
    )
    assert run(code, tmp_path).split() == ["sdpa", "False"]
    again = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="trifuse").eval()
    torch.testing.assert_close(again(IDS)[0], wanted, rtol=1e-5, atol=5e-6)


def test_importing_trifuse_changes_one_method_of_transformers(run):
    """It does as before for all names but ours, and imports nothing for them."""
    code = """
import transformers, transformers.modeling_utils as m
methods = dict(vars(m.PreTrainedModel))
import sys, trifuse
now = dict(vars(m.PreTrainedModel))
checked = now.pop('get_correct_attn_implementation')
assert checked.__wrapped__ is methods.pop('get_correct_attn_implementation')
assert now == methods
assert 'trifuse' in m.AttentionInterface()
transformers.BertModel(transformers.BertConfig(hidden_size=12, num_hidden_layers=1, vocab_size=9))
assert 'trifuse.huggingface' not in sys.modules
"""
    run(code)
    run(
        "import trifuse, sys\n"
        "assert 'transformers' not in sys.modules\n"
        "import transformers.modeling_utils\n"
        "assert 'trifuse' in transformers.AttentionInterface()\n"
        "assert 'transformers.modeling_utils' not in trifuse._imports._FINDER.actions"
    )


@pytest.mark.parametrize("padded", [False, True])
def test_fuse_takes_models_that_declare_no_sdpa_and_compute_no_more(padded):
    """Speech2Text: the code of its attention is a softmax of masked scores."""
    config = transformers.Speech2TextConfig(
        **TRANSLATION_SIZES, input_feat_per_channel=8, conv_channels=8, max_source_positions=64
    )
    torch.manual_seed(0)
    model = transformers.Speech2TextModel(config).eval()
    assert not model._supports_sdpa
    frames = torch.arange(24) < torch.tensor([24, 13 if padded else 24])[:, None]
    given = {
        "input_features": torch.randn(2, 24, 8),
        "attention_mask": frames.long(),
        "decoder_input_ids": IDS,
    }
    wanted = model(**given).last_hidden_state
    report = trifuse.fuse(model, unpad=True)
    assert not report.left
    torch.testing.assert_close(model(**given).last_hidden_state, wanted, rtol=1e-4, atol=1e-5)
