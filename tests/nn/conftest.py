"""Fixtures of several files here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import transformers_versions
from torch import Tensor

from trifuse.nn import encoder_layer, packing
from trifuse.ops import _linear_choice
from trifuse.recipes import models


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    transformers_versions.mark(items)


@pytest.fixture
def packed(monkeypatch) -> list[int]:
    """The number of tokens in each attention that ran packed."""
    seen: list[int] = []
    attend = packing.attend

    def spy(query, *args, **named):
        seen.append(query.shape[2])
        return attend(query, *args, **named)

    monkeypatch.setattr(packing, "attend", spy)
    return seen


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    distributed = pytest.importorskip("torch.distributed")
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("torch was built without gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def our_product(monkeypatch) -> None:
    """On any CPU, linear layers run on our product."""
    monkeypatch.setenv("TRIFUSE_LINEAR", "cpp")
    monkeypatch.setattr(_linear_choice, "_made", {})


@pytest.fixture
def layers_call_parts(monkeypatch) -> None:
    """No layer runs as one op, so that tests see the operators in it."""
    monkeypatch.setattr(encoder_layer, "run", lambda *args, **kwargs: None)
    monkeypatch.setattr(encoder_layer, "run_all", lambda *args, **kwargs: None)
    monkeypatch.setattr(models, "in_one_call", lambda *args: None)


@pytest.fixture
def served(monkeypatch) -> list[bool]:
    """For each call of a layer that can be one op, whether the op served it."""
    found: list[bool] = []
    run = encoder_layer.run

    def watched(*args: Any, **kwargs: Any) -> Tensor | None:
        out = run(*args, **kwargs)
        found.append(out is not None)
        return out

    monkeypatch.setattr(encoder_layer, "run", watched)
    return found
