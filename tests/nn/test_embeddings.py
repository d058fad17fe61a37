"""BERT's embeddings in one call: the bits of their parts, and when the parts run."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_cases import ALL, failing, for_each_allocation, in_process, unless_out_of_memory
from torch import Tensor, nn

import trifuse
from trifuse import backends
from trifuse.models import bert
from trifuse.nn import embeddings
from trifuse.ops._linear_choice import is_available

pytestmark = pytest.mark.skipif(not is_available(torch.float32), reason="no C++ extension")

B, L, D, WORDS = 3, 10, 64, 97
FAMILIES = ["Bert", "Electra", "Roberta", "XLMRoberta", "Camembert", "RemBert"]


@pytest.fixture
def served(monkeypatch) -> list[bool]:
    """For each call, whether it ran as one."""
    found: list[bool] = []
    run = embeddings.run

    def watched(*args: Any) -> Tensor | None:
        out = run(*args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(embeddings, "run", watched)
    return found


def by_parts(function: Callable[[], Tensor]) -> Tensor:
    """Returns the result of a call whose embeddings call their parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embeddings, "run", lambda *args: None)
        return function()


def of_transformers(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The embeddings of a fused model."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": D, "intermediate_size": 96, "type_vocab_size": 2}
    config = getattr(transformers, f"{family}Config")(
        **sizes,
        embedding_size=D,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=40,
        pad_token_id=1,
    )
    model = getattr(transformers, f"{family}Model")(config).eval().to(dtype)
    for parameter in model.embeddings.parameters():
        nn.init.normal_(parameter)
    trifuse.fuse(model, freeze=True)
    return model.embeddings


def our_own(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = bert.BertConfig(
        vocab_size=WORDS,
        hidden_size=D,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=40,
    )
    model = bert.BertModel(config).eval().to(dtype)
    trifuse.fuse(model, freeze=True)
    return model.embeddings


def ids() -> Tensor:
    """Words, with padding at the end of two sequences."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(2, WORDS, (B, L), generator=generator)
    return words.where(torch.arange(L) < torch.tensor([L, 6, 3])[:, None], 1)


# The same bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, None])
def test_has_the_bits_of_its_parts(served, family, dtype):
    module = our_own(dtype) if family is None else of_transformers(family, dtype)
    words = ids()
    types = torch.randint(2, (B, L))
    positions = torch.randint(40, (B, L))
    one_by_one = {"position_ids": positions.flatten()[:, None]}
    cases: list[tuple[Tensor, dict[str, Tensor]]] = [
        (words, {}),
        (words[:1, :3], {}),
        (words.mT.contiguous().mT, {"token_type_ids": types}),
        (words, {"token_type_ids": types, "position_ids": positions}),
        (words, {"position_ids": positions[:1]}),
        (words.flatten()[:, None], one_by_one),  # as packed tokens come
        (words[:, :0], {}),
    ]
    for given, options in cases:
        with torch.no_grad():
            actual = module(given, **options)
            expected = by_parts(lambda g=given, o=options: module(g, **o))
        assert torch.equal(actual, expected)
    assert served == [True] * len(cases)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "RemBert"])
def test_tokens_after_others(served, family):
    module = of_transformers(family)
    with torch.no_grad():
        actual = module(ids(), cache_length=4)
        expected = by_parts(lambda: module(ids(), cache_length=4))
    assert torch.equal(actual, expected)
    assert served == [True]
    with pytest.raises(TypeError, match="unexpected keyword"):
        module(ids(), another=4)


def test_a_whole_model(served):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=D, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    words = ids()
    mask = words != 1
    with torch.no_grad():
        expected = model(words, mask).last_hidden_state
        report = trifuse.fuse(model, freeze=True)
        assert "embeddings" in {swapped.path for swapped in report.swapped}
        actual = model(words, mask).last_hidden_state
        assert served == [True]
        report.revert()
        assert torch.equal(model(words, mask).last_hidden_state, expected)
    torch.testing.assert_close(actual[mask], expected[mask], rtol=1e-4, atol=1e-4)
    assert served == [True]


# When the parts run -------------------------------------------------------------------------------


def trains(module: Any) -> None:
    module.dropout.train()


def has_a_hook(module: Any) -> None:
    module.LayerNorm.register_forward_hook(lambda module, args, out: out + 1)


def limits_its_norms(module: Any) -> None:
    module.word_embeddings.max_norm = 1.0


def has_another_module(module: Any) -> None:
    module.dropout = nn.Linear(D, D).eval()


def has_segments_of_its_own(module: Any) -> None:
    module.token_type_ids.fill_(1)


@pytest.mark.parametrize(
    "change", [trains, has_a_hook, limits_its_norms, has_another_module, has_segments_of_its_own]
)
@pytest.mark.parametrize("before", [True, False])
def test_the_parts_run_if_something_changed(served, change, before):
    """Whether it changes before the first call or after one."""
    module = of_transformers("Bert")
    with torch.no_grad():
        expected = module(ids())
        if not before:
            embeddings._plans.clear()
        change(module)
        torch.manual_seed(2)
        actual = module(ids())
        torch.manual_seed(2)
        assert torch.equal(actual, by_parts(lambda: module(ids())))
    assert not torch.equal(actual, expected)
    assert served == [True, False]


def test_a_new_module_is_served_again(served):
    module: Any = of_transformers("Bert")
    with torch.no_grad():
        before = module(ids())
        module.position_embeddings = nn.Embedding(40, D).eval()
        actual = module(ids())
        assert torch.equal(actual, by_parts(lambda: module(ids())))
    assert not torch.equal(actual, before)
    assert served == [True] * 2


@pytest.mark.parametrize("family", [*FAMILIES, None])
def test_a_sentence_has_its_bits_in_any_batch(family):
    dtype = torch.bfloat16
    module = our_own(dtype) if family is None else of_transformers(family, dtype)
    with torch.no_grad():
        for run in (lambda words: module(words), lambda words: by_parts(lambda: module(words))):
            batch = run(ids())
            for b in range(B):
                assert torch.equal(run(ids()[b : b + 1])[0], batch[b])


def test_the_parts_run_for_gradients(served):
    module = of_transformers("Bert")
    module(ids()).sum().backward()
    assert module.get_parameter("word_embeddings.weight").grad is not None
    assert served == [False]


def test_sees_new_weights(served):
    module: Any = of_transformers("Bert")
    with torch.no_grad():
        before = module(ids())
        module.position_embeddings.weight.mul_(2)
        twice = module(ids())
        module.LayerNorm.weight = nn.Parameter(torch.zeros(D))
        zero = module(ids())
    assert served == [True] * 3
    assert not torch.equal(twice, before)
    assert torch.equal(zero, module.LayerNorm.bias.expand(zero.shape))


def test_takes_embeddings_instead_of_words(served):
    module = of_transformers("Bert")
    with torch.no_grad():
        embedded = module.get_submodule("word_embeddings")(ids())
        torch.testing.assert_close(module(inputs_embeds=embedded), module(ids()))
    assert served == [True]


@pytest.mark.parametrize("wrong", [WORDS, -1])
def test_words_that_are_not_in_the_table(wrong):
    module = of_transformers("Bert")
    words = ids()
    words[1, 2] = wrong
    with torch.no_grad(), pytest.raises(IndexError, match="index out of range"):
        module(words)


def test_copies_and_pickles():
    module = of_transformers("Roberta")
    with torch.no_grad():
        expected = module(ids())
        assert torch.equal(copy.deepcopy(module)(ids()), expected)
        assert torch.equal(pickle.loads(pickle.dumps(module))(ids()), expected)


def test_compiles():
    module = of_transformers("Bert")
    with torch.no_grad():
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids()), module(ids()))


# The op -------------------------------------------------------------------------------------------


def tables(count: int, features: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(5 + k, features, generator=generator).to(dtype) for k in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("features", [1, 63, 64, 200])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_sum_is_torchs(cpp_kernel, dtype, features, count):
    each = tables(count, features, dtype)
    shapes = [(7, 33), (1, 33), (7, 1), (1, 1)]
    chosen = [torch.randint(5, shape) for shape in shapes[:count]]
    expected = each[0][chosen[0]]
    for table, rows in zip(each[1:], chosen[1:], strict=True):
        expected = expected + table[rows]
    assert torch.equal(torch.ops.trifuse.embedding_sum(chosen, each), expected)
    wide = [torch.cat((table, table), 1)[:, :features] for table in each]
    assert torch.equal(torch.ops.trifuse.embedding_sum(chosen, wide), expected)


def test_no_tokens_and_no_features():
    none = torch.zeros(2, 0, dtype=torch.long)
    assert torch.ops.trifuse.embedding_sum([none], tables(1, 8, torch.float32)).shape == (2, 0, 8)
    zeros = torch.zeros(2, 3, dtype=torch.long)
    assert torch.ops.trifuse.embedding_sum([zeros], [torch.ones(4, 0)]).shape == (2, 3, 0)
    many = torch.zeros(1, dtype=torch.long).expand(1, 1 << 40)
    assert torch.ops.trifuse.embedding_sum([many], [torch.ones(4, 0)]).shape == (1, 1 << 40, 0)


@pytest.mark.parametrize(
    ("rows", "each", "error", "message"),
    [
        ([torch.ones(1, 1).long()] * 5, [torch.ones(2, 2)] * 5, ValueError, "expected 1 to 4"),
        ([torch.ones(1, 1).long()], [torch.ones(2, 2)] * 2, ValueError, "ids for each"),
        ([torch.ones(1).long()], [torch.ones(2, 2)], ValueError, "expected 2 dimensions"),
        ([torch.ones(1, 1).int()], [torch.ones(2, 2)], TypeError, "ids: expected Long"),
        ([torch.ones(1, 1).long()], [torch.ones(2, 2).int()], TypeError, "no kernel for Int"),
        ([torch.ones(1, 1).long()], [torch.ones(2, 2, 2)], ValueError, "expected 2 dimensions"),
        ([torch.ones(1, 1).long()], [torch.ones(3, 2).mT], ValueError, "contiguous rows"),
        (
            [torch.ones(2, 3).long(), torch.ones(2, 2).long()],
            [torch.ones(2, 2)] * 2,
            ValueError,
            "broadcast",
        ),
        (
            [torch.ones(1, 1).long()] * 2,
            [torch.ones(2, 2), torch.ones(2, 2).double()],
            TypeError,
            "tables: expected Float",
        ),
        ([torch.full((1, 1), 2)], [torch.ones(2, 2)], IndexError, "from 0 to 1; got 2"),
        ([torch.full((1, 1), -1)], [torch.ones(2, 2)], IndexError, "from 0 to 1; got -1"),
    ],
)
def test_arguments_that_do_not_fit(rows, each, error, message):
    with pytest.raises(error, match=message):
        torch.ops.trifuse.embedding_sum(rows, each)


def each_allocation_fails() -> None:
    rows, each = [torch.ones(40, 200, dtype=torch.long)], tables(1, D, torch.float32)
    run = torch.ops.trifuse.embedding_sum
    expected = run(rows, each)

    def attempt(number: int) -> int:
        with failing(number, ALL):
            result = unless_out_of_memory(lambda: run(rows, each))
        made: int = backends._C.counted_allocations()
        assert (result is None) == (number <= made)
        assert torch.equal(run(rows, each), expected)
        return made

    assert for_each_allocation(attempt) >= 1


def test_each_allocation_fails():
    in_process(each_allocation_fails)
