"""Fixtures of several files here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import transformers_versions

from trifuse.nn import packing


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
