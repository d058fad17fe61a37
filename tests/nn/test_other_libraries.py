"""Fused models in other libraries: trained, adapted, wrapped, sharded and quantized by them.

Each test is skipped where its library isn't installed.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from model_sizes import GROUPED_QUERIES, PADDED_SIZES, SIZES
from torch import Tensor, nn

import trifuse

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("torch_multiplies")

B, L, LAYERS, LABELS = 4, 10, 2, 3
KEEP = torch.arange(L) < torch.tensor([L, 6, 3, 7])[:, None]
TOKENS = int(KEEP.sum())


def encoder() -> Any:
    torch.manual_seed(0)
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.RobertaConfig(**PADDED_SIZES, **without_dropout, num_labels=LABELS)
    return transformers.RobertaForSequenceClassification(config)


def decoder() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **GROUPED_QUERIES, pad_token_id=0)
    return transformers.LlamaForCausalLM(config)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 97, (B, L), generator=generator).masked_fill(~KEEP, 0)
    labels = torch.randint(0, LABELS, (B,), generator=generator)
    return {"input_ids": ids, "attention_mask": KEEP.long(), "labels": labels}


def close(got: Tensor, wanted: Tensor, rtol: float = 1e-5, atol: float = 5e-6) -> None:
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)


def fused() -> Any:
    model = encoder()
    report = trifuse.fuse(model, unpad=True)
    assert report.unpadded == ["roberta", "roberta.encoder"]
    return model


def same_parameters(ours: nn.Module, theirs: nn.Module) -> None:
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        close(parameter, wanted[name], rtol=1e-4, atol=1e-5)


class Texts(torch.utils.data.Dataset):
    """The batch three times, a text at a time."""

    def __len__(self) -> int:
        return 3 * B

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index % B] for name, value in batch().items()}


# transformers' Trainer, and accelerate ------------------------------------------------------------


def train_with_trainer(model: Any, directory: Path, **options: Any) -> list[float]:
    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=B,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no"} | options,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Texts())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "gradient checkpoints"])
def test_trainer(tmp_path, packed, checkpoints):
    """The same losses and weights; its saved model is transformers' own."""
    pytest.importorskip("accelerate")
    options = {"gradient_checkpointing": checkpoints, "save_strategy": "steps", "save_steps": 3}
    theirs, ours = encoder(), fused()
    wanted = train_with_trainer(theirs, tmp_path / "theirs", **options)
    assert not packed
    losses = train_with_trainer(ours, tmp_path / "ours", **options)
    assert len(losses) == 3
    assert losses == pytest.approx(wanted, rel=1e-4)
    assert packed
    assert max(packed) < B * L
    same_parameters(ours, theirs)
    loaded = type(theirs).from_pretrained(tmp_path / "ours" / "checkpoint-3")
    assert type(loaded) is type(theirs)
    same_parameters(loaded, ours)


def test_accelerate(packed):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of other tests
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = fused()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(Texts(), B, num_workers=1)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for texts in loader:
        loss = wrapped(**texts).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert packed == [TOKENS] * LAYERS * 3
    bare = accelerator.unwrap_model(wrapped)
    assert bare is model
    assert all(parameter.dtype == torch.float32 for parameter in bare.parameters())


def test_accelerate_hooks_of_a_model_on_several_devices(packed):
    """Its hooks replace each module's forward; the stack then computes padding, and is right."""
    accelerate = pytest.importorskip("accelerate")
    model, given = fused().eval(), batch()
    wanted = model(**given).logits
    dispatched = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with torch.no_grad():
        close(dispatched(**given).logits, wanted)


# peft ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["fused first", "adapted first"])
def test_peft(tmp_path, packed, order):
    """LoRA on a fused model, or a model with LoRA that is fused; saved, loaded and merged."""
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(target_modules=["query", "value", "dense"], r=4, lora_dropout=0.0)

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        with_adapters = peft.get_peft_model(model, options)
        for name, parameter in with_adapters.named_parameters():
            if "lora_B" in name:  # zeros at first
                nn.init.normal_(parameter, std=0.1)
        return with_adapters

    theirs = adapted(encoder()).eval()
    if order == "fused first":
        ours = adapted(fused()).eval()
    else:
        ours = adapted(encoder()).eval()
        assert trifuse.fuse(ours, unpad=True).unpadded
    given = batch()
    wanted = theirs(**given)
    got = ours(**given)
    close(got.logits, wanted.logits)
    wanted.loss.backward()
    got.loss.backward()
    grads = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert grads.keys() == found.keys()
    assert any("lora_A" in name for name in grads)
    for name, grad in found.items():
        close(grad, grads[name], rtol=1e-4, atol=1e-5)
    assert packed == [TOKENS] * LAYERS

    ours.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(encoder(), tmp_path).eval()
    close(loaded(**given).logits, wanted.logits)
    close(ours.merge_and_unload()(**given).logits, wanted.logits)


def test_peft_of_a_decoder(packed):
    """Training with a prompt's padding, and generation with the adapters."""
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(task_type="CAUSAL_LM", r=4)
    torch.manual_seed(1)
    model = peft.get_peft_model(decoder(), options).eval()
    ids, mask = batch()["input_ids"], KEEP.long()
    left = {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}
    wanted = model.generate(**left, max_new_tokens=4, do_sample=False)
    trifuse.fuse(model, unpad=True)
    assert torch.equal(model.generate(**left, max_new_tokens=4, do_sample=False), wanted)
    assert packed == [TOKENS] * LAYERS
    packed.clear()
    labels = ids.masked_fill(~KEEP, -100)
    model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    assert packed == [TOKENS] * LAYERS


# Lightning ----------------------------------------------------------------------------------------


def test_lightning(tmp_path, packed):
    """The same weights after training; a checkpoint loads into a model that isn't fused."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, texts: dict[str, Tensor], index: int) -> Tensor:
            return self.model(**texts).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    def train(model: nn.Module) -> Any:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(Module(model), torch.utils.data.DataLoader(Texts(), B))
        return trainer

    theirs, ours = encoder(), fused()
    train(theirs)
    trainer = train(ours)
    assert packed == [TOKENS] * LAYERS * 3
    same_parameters(ours, theirs)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    plain = Module(encoder())
    plain.load_state_dict(state)
    same_parameters(plain.model, ours)


# torchao ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["fused first", "quantized first"])
def test_torchao(packed, order):
    """Weights in int8: its tensors stay in charge of their products."""
    quantization = pytest.importorskip("torchao.quantization")
    config = quantization.Int8WeightOnlyConfig()
    theirs, given = encoder().eval(), batch()
    quantization.quantize_(theirs, config)
    if order == "fused first":
        ours = fused().eval()
        quantization.quantize_(ours, config)
    else:
        ours = encoder().eval()
        quantization.quantize_(ours, config)
        trifuse.fuse(ours, unpad=True)
    weights = [type(module.weight) for module in ours.modules() if isinstance(module, nn.Linear)]
    assert any(issubclass(kind, Tensor) and kind is not nn.Parameter for kind in weights)
    with torch.no_grad():
        close(ours(**given).logits, theirs(**given).logits, rtol=1e-4, atol=1e-5)
    assert packed == [TOKENS] * LAYERS


# FSDP2 --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_process")
def test_fsdp2(packed):
    """Each layer sharded by itself: results, gradients and an optimizer's step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    theirs, ours, given = encoder(), fused(), batch()
    mesh = init_device_mesh("cpu", (1,))
    for layer in ours.roberta.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    for model in (theirs, ours):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(**given).loss.backward()
        optimizer.step()
    assert packed == [TOKENS] * LAYERS
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        close(parameter.full_tensor(), wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("one_process")
def test_fsdp2_of_layers_that_return_attention_weights():
    """It waits for a gradient of each result of a layer. The weights get none."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=LAYERS, n_head=4)
    theirs = transformers.BloomModel(config)
    ours = copy.deepcopy(theirs)
    trifuse.fuse(ours)
    mesh = init_device_mesh("cpu", (1,))
    for layer in ours.h:
        fully_shard(layer, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    for model in (theirs, ours):
        model(batch()["input_ids"]).last_hidden_state.sin().sum().backward()
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        close(parameter.grad.full_tensor(), wanted[name].grad, rtol=1e-4, atol=1e-4)


# Workers of a DataLoader --------------------------------------------------------------------------


class Encoded(torch.utils.data.Dataset):
    """The batch's hidden states, twice, computed where an item is loaded."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        given = {name: value for name, value in batch().items() if name != "labels"}
        with torch.no_grad():
            return self.model(**given)[0]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_worker_of_a_data_loader_holds_a_fused_model(start):
    """It computes what this process does, without padding, whose states are 0 then."""
    theirs, ours = encoder().eval().roberta, fused().eval().roberta
    wanted, here = Encoded(theirs)[0], Encoded(ours)[0]
    options = {"batch_size": None, "num_workers": 1, "multiprocessing_context": start}
    states = list(torch.utils.data.DataLoader(Encoded(ours), timeout=300, **options))
    assert len(states) == 2
    for each in states:
        assert each[~KEEP].eq(0).all()
        close(each[KEEP], wanted[KEEP])
        close(each, here)


# Copies -------------------------------------------------------------------------------------------


def test_a_model_with_gradient_checkpoints_and_a_frozen_part(packed):
    """As fine-tuning does by hand: half of the layers train, by checkpoints."""
    theirs, ours, given = encoder().train(), fused().train(), batch()
    for model in (theirs, ours):
        model.gradient_checkpointing_enable()
        model.roberta.embeddings.requires_grad_(False)
        model.roberta.encoder.layer[0].requires_grad_(False)
        model(**given).loss.backward()
    assert set(packed) == {TOKENS}
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-5)
        else:
            assert parameter.grad is None
    again = copy.deepcopy(ours).eval()
    assert torch.equal(again(**given).logits, ours.eval()(**given).logits)
