"""The tagging comparison: what the tags are, what is scored, what is shown."""

from __future__ import annotations

import copy
import itertools
import json
import math

import pytest
import torch
from model_sizes import TINY_ELMO

pytest.importorskip("matplotlib")
pytest.importorskip("torchcrf")

import trifuse
from trifuse.benchmarks import elmo, source_code, tagging, transformer
from trifuse.benchmarks.source_code import TAGS, Function
from trifuse.models.elmo import BiLM, ElmoConfig
from trifuse.models.tagger import TaggerConfig

pytestmark = pytest.mark.usefixtures("ceilings_measured_once")

CODE = '''
import os.path
from sys import argv as arguments

LIMIT = 3


class Base:
    """Its method is a function of its own."""

    @staticmethod
    def read(path, *rest, limit=LIMIT, **others):  # a comment
        """Not words."""
        global LIMIT
        total, LIMIT = 0, limit
        with open(path) as file:
            for line in file:
                total += len(line.strip())
        try:
            import json
        except ImportError as error:
            raise Base(os.path.join(path, key=f"{total} {path}")) from error
        if (found := [x.size for x in rest if helper(x)]):
            class Inner(Base, metaclass=type): pass
        return json.dumps(arguments)


def helper(x):
    def inside(y):
        return lambda z: x + y + z + 1.5
    return inside


def short(): pass


def unknown(a, b):
    return never_bound_anywhere(a, b) + a + b
'''

READ = """
def read/function ( path/parameter , * rest/parameter , limit/parameter = LIMIT/global ,
    ** others/parameter ) : <line>
<indent> "" <line>
global LIMIT/global <line>
total/local , LIMIT/global = 0 , limit/parameter <line>
with open/builtin ( path/parameter ) as file/local : <line>
<indent> for line/local in file/local : <line>
<indent> total/local += len/builtin ( line/local . strip/method ( ) ) <line>
<dedent> <dedent> try : <line>
<indent> import json/imported <line>
<dedent> except ImportError/builtin as error/local : <line>
<indent> raise Base/class ( os/imported . path/attribute . join/method ( path/parameter ,
    key/keyword = "" ) ) from error/local <line>
<dedent> if ( found/local := [ x/local . size/attribute for x/local in rest/parameter
    if helper/function ( x/local ) ] ) : <line>
<indent> class Inner/class ( Base/class , metaclass/keyword = type/builtin ) : pass <line>
<dedent> return json/imported . dumps/method ( arguments/imported ) <line>
"""


def tagged(function: Function) -> list[str]:
    """The words, each with its tag after a slash unless that is "other"."""
    pairs = zip(*function, strict=True)
    return [f"{word}/{TAGS[tag]}" if tag else word for word, tag in pairs]


def test_names_have_the_tags_of_what_they_stand_for():
    read, helper = source_code.functions(CODE, longest=200)  # short and unknown are left out
    assert tagged(read) == READ.split()
    assert " ".join(tagged(helper)) == (
        "def helper/function ( x/parameter ) : <line> "
        "<indent> def inside/function ( y/parameter ) : <line> "
        "<indent> return lambda z/parameter : x/parameter + y/parameter + z/parameter + 0 <line> "
        "<dedent> return inside/function <line>"
    )
    assert [len(f.words) for f in source_code.functions(CODE)] == [len(helper.words)]


def write_library(root) -> None:
    for number in range(12):
        functions = [
            f"def f{number}_{n}(a, b):\n    return a + b + {'a.b + ' * n}b\n" for n in range(5)
        ]
        (root / f"module{number}.py").write_text("\n".join(functions))
    (root / "copy.py").write_text((root / "module3.py").read_text())
    (root / "broken.py").write_text("def f(:")
    (root / "latin.py").write_bytes("def f(a):\n    return 'é', a, a, a, a, a\n".encode("latin-1"))
    (root / "test").mkdir()
    (root / "test" / "module.py").write_text("def tested(a, b):\n    return a + b + a + b + a\n")


def test_no_file_and_no_function_is_in_two_parts(tmp_path):
    write_library(tmp_path)
    source = source_code.read(15, 5, 100, root=tmp_path)
    assert [len(part) for part in source] == [15, 5, 40]
    everything = [tuple(f.words) for part in source for f in part]
    assert len(set(everything)) == len(everything) == 60
    names = [{f.words[1].partition("_")[0] for f in part} for part in source]
    assert all(not a & b for a, b in itertools.combinations(names, 2))
    assert source_code.read(15, 5, 100, root=tmp_path) == source
    longest = max(len(f.words) for part in source for f in part)
    shorter = source_code.read(15, 5, 100, longest - 1, tmp_path)
    assert max(len(f.words) for part in shorter for f in part) < longest


@pytest.fixture(scope="module")
def source() -> source_code.Source:
    return source_code.read(60, 40, 200, 32)


@pytest.fixture(scope="module")
def bilm() -> BiLM:
    torch.manual_seed(0)
    return BiLM(ElmoConfig(**TINY_ELMO)).eval()


def test_the_standard_library_has_every_tag(source):
    assert [len(part) for part in source] == [60, 40, 200]
    seen = {tag for part in source for function in part for tag in function.tags}
    assert seen == set(range(len(TAGS)))
    for function in source.train:
        assert len(function.words) == len(function.tags)
        assert source_code.SHORTEST <= len(function.words) <= 32


def test_scores_by_hand():
    parameter, local, attribute = map(TAGS.index, ("parameter", "local", "attribute"))
    right = [0, parameter, parameter, local, local, local, 0]
    found = [0, parameter, local, local, local, attribute, local]
    scores = tagging.Scores.of(found, right)
    assert scores.accuracy == pytest.approx(3 / 5)
    assert scores.by_tag[parameter] == pytest.approx(2 * 1 / (2 + 1))
    assert scores.by_tag[local] == pytest.approx(2 * 2 / (3 + 4))
    assert scores.f1 == pytest.approx((2 / 3 + 4 / 7) / 2)  # no name is an attribute


def test_guesses_come_from_the_training_functions():
    parameter, local = map(TAGS.index, ("parameter", "local"))
    train = [Function(["def", "a", "b", "b"], [0, parameter, local, local])]
    test = [Function(["def", "a", "b", "new"], [0, parameter, parameter, local])]
    guesses = tagging.baselines(source_code.Source(train, test, []))
    assert guesses["the commonest tag"].accuracy == pytest.approx(1 / 3)
    assert guesses["each word's commonest tag"].accuracy == pytest.approx(2 / 3)


def model(variant: tagging.Variant, bilm: BiLM, tags: int = 3) -> tagging.TagModel:
    torch.manual_seed(0)
    config = TaggerConfig(
        20,
        tags,
        embedding_dim=6,
        char_embedding_dim=4,
        filters=((2, 3),),
        max_characters_per_token=8,
        hidden_size=7,
        dropout=0.0,
    )
    return tagging.TagModel(config, variant, copy.deepcopy(bilm))


def batch(tags: int = 3) -> transformer.Batch:
    functions = [
        Function(["a", "=", "b", ".", "c"], [1, 0, 2, 0, 2]),
        Function(["d", "(", "a", ")"], [2, 0, 1, 0]),
    ]
    return tagging.encode(functions, {"a": 4, "b": 5, "(": 6}, 8)


@pytest.mark.parametrize("variant", tagging.VARIANTS, ids=lambda variant: variant.name)
def test_losses_are_those_of_the_formula(variant, bilm):
    tagger = model(variant, bilm).double().eval()
    char_ids, word_ids, tags = batch()
    scores, mask = tagger.scores(char_ids, word_ids)
    loss = total = 0.0
    for row, length in enumerate(mask.sum(1).tolist()):
        emissions, right = scores[row, :length].tolist(), tags[row, :length].tolist()
        sums = {
            path: sequence_score(tagger.crf, emissions, path)
            for path in itertools.product(range(3), repeat=length)
        }
        highest = max(sums.values())
        loss += highest + math.log(sum(math.exp(each - highest) for each in sums.values()))
        loss -= sums[tuple(right)]
        total += length
        assert tagger.tag(char_ids, word_ids)[row] == list(max(sums, key=sums.get))
    assert tagger.loss(char_ids, word_ids, tags).item() == pytest.approx(loss / total, rel=1e-10)


def sequence_score(crf, emissions: list[list[float]], path: tuple[int, ...]) -> float:
    """The sum of a path's emissions, and with a CRF of its transitions, its start and its end."""
    total = math.fsum(row[tag] for row, tag in zip(emissions, path, strict=True))
    if crf is not None:
        total += crf.start_transitions[path[0]].item() + crf.end_transitions[path[-1]].item()
        total += math.fsum(crf.transitions[a, b].item() for a, b in itertools.pairwise(path))
    return total


def test_the_vectors_are_those_of_the_language_model(bilm):
    char_ids, word_ids, _ = batch()
    layers, mask = bilm(char_ids)
    for vectors, place in (("ELMo", 0), ("TagLM", 1)):
        tagger = model(tagging.Variant(vectors, False), bilm).eval()
        context = layers[-1]
        if vectors == "ELMo":
            (mix,) = tagger.elmo.mixes
            mix.weights.data.copy_(torch.tensor([1.0, -1.0, 0.5]))
            mix.gamma.data.fill_(0.7)
            weights = torch.tensor([1.0, -1.0, 0.5]).softmax(0)
            context = 0.7 * (weights[:, None, None, None] * layers).sum(0)
        expected = tagger.tagger(word_ids, char_ids, {place: context})
        scores, real = tagger.scores(char_ids, word_ids)
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(real, mask)


def test_training_leaves_the_language_model_alone(source, bilm):
    before = {name: value.clone() for name, value in bilm.state_dict().items()}
    (task,) = (each for each in tagging.tasks(source, bilm) if each.name == "ELMo, softmax")
    trained = transformer.train(task, 3, device="cpu", fused=True, dropout=0.3).model
    for name, value in trained.elmo.bilm.state_dict().items():
        assert torch.equal(value, before[name])
    assert trained.elmo.mixes[0].weights.all()  # they start at 0


def test_taggers_learn_alike_eager_and_fused(source, bilm):
    (task,) = (each for each in tagging.tasks(source, bilm) if each.name == "ELMo, CRF")
    runs = {
        name: transformer.train(task, 12, device="cpu", **how)
        for name, how in {
            "eager": {"fused": False},
            "fused": {"fused": True},
            "exact": {"fused": False, "dtype": torch.float64},
        }.items()
    }
    curves = transformer.Curves(task.name, **runs)
    assert curves.furthest("fused", "exact") <= max(2 * curves.furthest("eager", "exact"), 1e-5)
    assert curves.fused.losses[-1] < 0.8 * curves.fused.losses[0]
    found = tagging.score(curves.fused.model, task, "cpu")
    assert found == tagging.score(curves.eager.model, task, "cpu")


@pytest.fixture
def small(monkeypatch, bilm):
    """A tiny language model, and no change to the number of threads."""
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(elmo, "small", lambda: bilm.config)


def test_command_says_that_quick_learns_nothing(small, tmp_path, capsys):
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    cases = ["--cases", "no vectors, CRF", "ELMo, softmax", "--device", "cpu"]
    arguments = ["--quick", *cases, "--json", str(figures), "--plot", str(picture)]
    assert tagging.main(arguments) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert printed.count("stopped early") == 4
    assert "0.0%" not in printed
    content = json.loads(figures.read_text())
    assert content["quick"] is True
    assert content["functions"] == {"train": 60, "test": 40, "unlabelled": 200}
    assert [each["task"] for each in content["learnt"]] == ["no vectors, CRF", "ELMo, softmax"]
    for each in content["learnt"]:
        assert len(each["losses"]["fused"]) == 2
        assert each["fused_from_eager"] < 1e-4
        assert each["words_per_second"]["fused"] > 0
    assert content["learnt"][0]["mix"] is None
    assert sum(content["learnt"][1]["mix"]) == pytest.approx(1)


def test_command_shows_scores_and_spread(small, tmp_path, capsys, monkeypatch, source):
    monkeypatch.setattr(source_code, "read", lambda *_: source)
    monkeypatch.setattr(tagging, "token_rates", lambda *_: {"eager": 1.0, "fused": 2.0})
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    arguments = ["--pretraining-steps", "1", "--steps", "2", "--curve-steps", "1", "--seeds", "2"]
    arguments += ["--cases", "ELMo, softmax", "--device", "cpu"]
    arguments += ["--json", str(figures), "--plot", str(picture)]
    assert tagging.main(arguments) == 0
    printed = capsys.readouterr().out
    content = json.loads(figures.read_text())
    (learnt,) = content["learnt"]
    assert len(learnt["accuracy"]) == len(learnt["f1"]) == 2
    mean = sum(learnt["accuracy"]) / 2
    assert f"{mean:.1%} ± " in printed
    assert "stopped early" not in printed
    assert "weights of the layers in the mix" in printed
    assert content["perplexity"]["untrained"]["forward"] > 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_options_are_checked(capsys):
    with pytest.raises(SystemExit):
        tagging.main(["--seeds", "1"])
    assert "--seeds: expected at least 2" in capsys.readouterr().err


def test_fused_models_leave_padding_out_where_they_can():
    config = transformer.LanguageModelConfig(10, 8, 2, 1, 16, max_length=8)
    language_model = transformer.LanguageModel(config)
    transformer.fuse(language_model)
    assert isinstance(language_model, trifuse.nn.UnpaddedLanguageModel)
