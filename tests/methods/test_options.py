"""Options of all strategies: what is refused, and what is chosen where they leave it open."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import hf_spec
from hf_spec.core.shapes import TokenTree
from hf_spec.decoding.strategy import resolve
from hf_spec.draft.drafter import Drafter
from hf_spec.draft.options import DraftOptions, changed, key_of
from hf_spec.draft.predictor import Predictor
from hf_spec.methods.registry import get_method, methods
from hf_spec.predict.table import chain_tree, drafted_depth, static_tree
from hf_spec.tools.bench.contenders import contenders, parse_names

#: Options that methods have no use for.
UNUSED = {
    "plain": "tree num_draft_tokens max_depth lookup lookup_history acceptance",
    "prompt_lookup": "tree lookup",
    "layer_skip": "tree max_depth",
}
FIXED = {"draft_exit": "fixed"}
ONLINE = {"tree": "online"}
BITA = {"prune": True, "drafter": "bita"}
#: Strategy, options, and what the error says. The contract test has values of the wrong type.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # names
    ("medusa", {"candidates": 8}, "'medusa' has no option 'candidates'; .* num_draft_tokens"),
    ("medusa", {"num_draft_token": 3}, r"'num_draft_token' \(did you mean 'num_draft_tokens'\?\)"),
    ("medusa", {"tree": "adaptiv"}, r"tree='adaptiv' \(did you mean 'adaptive'\?\): choose"),
    ("medusa", {"drafting": "alway"}, r"='alway' \(did you mean 'always'\?\): choose one of auto"),
    ("layer_skip", {"skip": [1]}, "'layer_skip' has no option 'skip' .*skip_attention"),
    ("prompt_lookup", {"ngram": 2}, "no option 'ngram' .*; its options are acceptance, drafting"),
    *((strategy, {name: 1}, f"{strategy!r} has no option {name!r}")
      for strategy, names in UNUSED.items() for name in names.split()),
    # tree
    ("medusa", {"tree": "round"}, "tree='round': choose one of adaptive, sparse, chain, or give"),
    ("medusa", {"tree": [[0, 0]]}, r"^tree: path \[0, 0\]: its parent \[0\] is missing. Add it"),
    ("bita", {"tree": [[0], [0]]}, r"^tree: path \[0\] is given twice"),
    ("ppd", {"tree": [[0], ["a"]]}, r"^tree: path \['a'\]: ranks are whole numbers, 'a' is not"),
    ("token_recycling", {"tree": [[-1]]}, r"^tree: path \[-1\]: ranks count from 0"),
    ("space", {"tree": [[rank] for rank in range(1025)]}, "^tree: more than 1024 draft tokens: l"),
    ("propd", {"tree": "round"}, "choose one of adaptive, sparse, chain, online, or give"),
    ("bita", {"tree": "round"}, "one of adaptive, efficient, full, chain, straightforward, or"),
    ("ppd", {"tree": "full"}, "tree='full': choose one of adaptive, static, chain, dynamic, or"),
    ("space", ONLINE, "tree='online': choose one of adaptive, chain, or give"),
    ("eagle3", {"tree": [[0]]}, r"tree=\[\[0\]\]: choose one of adaptive, chain\."),
    ("mtp", {"tree": "full"}, r"tree='full': choose one of adaptive, chain\."),
    # size
    ("bita", {"num_draft_tokens": 0}, "=0: must be a whole number from 1 to 1024. Or give 'auto'"),
    ("bita", {"num_draft_tokens": np.int64(3)}, "to 1024. Its type is int64: give an int"),
    ("bita", {"max_depth": True}, "max_depth=True: must be .*Its type is bool: give an int"),
    ("ppd", {"tree": "static", "num_draft_tokens": 3}, "=3 with tree='static'.*tree='adaptive'"),
    ("propd", {**ONLINE, "num_draft_tokens": 3}, "num_draft_tokens=3 with tree="),
    ("ppd", {"tree": "dynamic", "max_depth": 2}, "max_depth=2 with tree='dynamic'"),
    ("bita", {"tree": "efficient", "top_k": 10**7}, "top_k=10000000: must be a whole .* to 1024"),
    ("bita", {"top_k": 2}, "top_k=2 with tree=.*: it belongs to tree='efficient' or 'full'"),
    ("prompt_lookup", {"num_draft_tokens": 0}, "num_draft_tokens=0: must be a whole number from 1"),
    ("layer_skip", {"num_draft_tokens": "all"}, "num_draft_tokens='all': must be .*Or give 'auto'"),
    ("prompt_lookup", {"max_nodes": 0}, "num_draft_tokens=0: must be a whole number from 1"),
    ("layer_skip", {"max_draft": 3, "num_draft_tokens": 3}, "'max_draft' is the former name of "),
    ("medusa", {"max_draft": 3}, "'medusa' has no option 'max_draft'"),
    # lookup, acceptance
    ("bita", {"tree": "straightforward", "lookup": True}, "lookup=True with .*tree='chain'"),
    ("prompt_lookup", {"acceptance": "rejection"}, "='rejection': .*Use acceptance='match'"),
    ("propd", {"acceptance": "rejection"}, "='rejection': draft tokens of 'propd' are not sampled"),
    ("space", {"acceptance": "rejection", "num_draft_tokens": 3}, "tree='adaptive', whose"),
    ("medusa", {"typical_epsilon": 0.0}, r"typical_epsilon=0.0: must be a number in \(0.0, 1.0\]"),
    ("medusa", {"typical_delta": 0.5}, "typical_delta=0.5 with acceptance='match'.*='typical'"),
    # prompt_lookup
    ("prompt_lookup", {"min_ngram": 3, "max_ngram": 2}, "min_ngram=3 is above max_ngram=2: lower"),
    ("prompt_lookup", {"min_probability": 1.5}, r"min_probability=1.5: must be a number in \[0.0"),
    # layer_skip
    ("layer_skip", {"threshold": 1.2}, r"threshold=1.2: must be a number in \[0.0, 1.0\]"),
    ("layer_skip", {**FIXED, "threshold": 0.5}, "threshold=0.5 with draft_exit='fixed'"),
    ("layer_skip", {**FIXED, "beta2": 0.5}, "beta2=0.5 with draft_exit='fixed'"),
    ("layer_skip", {"skip_mlp": np.array([1, 2])}, "must name each layer once, by an int"),
    ("layer_skip", {"skip_attention": 3}, "skip_attention=3: must be a list of layers"),
    ("layer_skip", {"skip_mlp": [1, -1]}, r"skip_mlp=\[1, -1\]: must name each layer once"),
    # propd
    ("propd", {"prune_top_k": 9}, "prune_top_k=9 with prune=False.*prune=True. Give that"),
    ("propd", {"drafter": "medusa"}, "drafter='medusa' with prune=False.*prune=True. Give that"),
    ("propd", {**ONLINE, "hit_alpha": 2}, "hit_alpha=2: must be a number in .0.0, 1.0"),
    ("propd", {**ONLINE, "hit_ranks": 0}, "hit_ranks=0: must be a whole number from 1"),
    ("propd", {"hit_ranks": 8}, "belongs to tree='online'. Give that, or leave hit_ranks out."),
    ("propd", {**BITA, "drafter": "propd"}, "drafter='propd': give 'heads', or the name of"),
    ("propd", {**BITA, "drafter": "medusas"}, "strategy='medusas' .did you mean 'medusa'"),
    ("propd", {**BITA, "drafter": "layer_skip"}, "drafter='layer_skip' runs the model to draft"),
    ("propd", {"drafter_kwargs": {"tree": "chain"}}, "with the adapter's own heads"),
    ("propd", {**BITA, "tree": "chain"}, "tree='chain' with drafter='bita'"),
    ("propd", {**BITA, "drafter_kwargs": {"depth": 1}}, "'bita' has no option 'depth'"),
    ("propd", {**BITA, "drafter_kwargs": {"lookup": True}}, "'lookup' is an option of"),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "options", "message"), REFUSED)
def test_refused(strategy: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_spec.SpecConfig(strategy, options)


@pytest.mark.parametrize(
    ("strategy", "former", "unset"),
    [("prompt_lookup", "max_nodes", 15), ("layer_skip", "max_draft", 12)],
)
def test_the_size_of_a_draft_has_one_name(strategy: str, former: str, unset: int) -> None:
    """Saved configurations may have the former ones."""

    def most(**given: Any) -> int:
        options: Any = get_method(strategy).parse_options(given)
        return int(options.max_nodes if strategy == "prompt_lookup" else options.most)

    assert most() == most(num_draft_tokens="auto") == unset
    assert most(num_draft_tokens=5) == most(**{former: 5}) == 5
    (contender,) = contenders(parse_names(strategy), {strategy: {former: 5}})
    assert contender.kwargs["assistant_kwargs"] == {"num_draft_tokens": 5}


@pytest.mark.parametrize(
    ("strategy", "options", "depth", "paths"),
    [
        ("medusa", {"tree": "chain"}, 3, TokenTree.chain(3).paths),  # BPD
        ("medusa", {"tree": [[0], [1], [1, 0]]}, 2, ((0,), (1,), (1, 0))),
        ("medusa", {"tree": "sparse"}, 1, ((0,), (1,), (2,), (3,), (4,))),
        ("medusa", {"tree": "sparse", "max_depth": 1}, 4, ((0,), (1,), (2,), (3,), (4,))),
        ("bita", {"tree": "chain"}, 3, TokenTree.chain(3).paths),
        ("bita", {"tree": "straightforward"}, 3, TokenTree.chain(3).paths),
        ("bita", {"tree": "efficient", "top_k": 2, "max_depth": 1}, 3, ((0,), (1,))),
        ("bita", {"tree": [[0], [1], [1, 0]]}, 3, ((0,), (1,), (1, 0))),
        ("space", {"tree": "chain"}, 2, TokenTree.chain(2).paths),
        ("ppd", {"tree": "static", "max_depth": 1}, 3, ((0,), (1,), (2,), (3,), (4,))),
    ],
)
def test_static_trees(
    strategy: str, options: dict[str, Any], depth: int, paths: tuple[tuple[int, ...], ...]
) -> None:
    assert tree_of(strategy, depth, **options).paths == paths


@pytest.mark.parametrize("tree", ["chain", [[0], [1]]])
def test_a_predictor_that_names_static_trees_has_them(tree: Any) -> None:
    """Else they would grow by probabilities without a word."""

    class Names(Predictor):
        trees = {"chain": chain_tree, "own": None}
        depth = 2

    def drafter(tree: Any) -> Drafter:
        options, model = DraftOptions(tree=tree), cast(Any, None)
        return Drafter(model, options, Names(model, options))

    with pytest.raises(ValueError) as error:
        drafter(tree)
    assert str(error.value) == (
        f"tree={tree!r}: Names names such trees in `trees`, but its `static` is None, so that they "
        "would grow by probabilities. Give tree='adaptive', or define `static` there."
    )
    for other in ("adaptive", "own"):
        assert drafter(other).predictor is not None


def tree_of(strategy: str, distances: int, **given: Any) -> TokenTree:
    method = get_method(strategy)
    options = method.parse_options(given)
    return static_tree(options, method.declares.trees, drafted_depth(options, distances))


def test_the_papers_trees() -> None:
    efficient = tree_of("bita", 4, tree="efficient", top_k=3)
    assert len(efficient) == 1 + 4 * 3  # figure 5: four mask tokens, top three
    # Only the likeliest of a level has children.
    assert {path[:-1] for path in efficient.paths} == {(), (0,), (0, 0), (0, 0, 0)}
    assert tree_of("bita", 3, tree="full", top_k=2).num_draft_tokens == 2 + 4 + 8
    sparse = tree_of("medusa", 4, tree="sparse")
    assert sparse.max_depth == 4 and sparse.num_draft_tokens == 15
    with pytest.raises(ValueError, match="^tree='full' with top_k=1000: more than 1024"):
        tree_of("bita", 8, tree="full", top_k=1000)  # it would have 10**24: it is never made


@pytest.mark.parametrize(
    ("options", "do_sample", "timed"),
    [
        ({}, False, True),
        ({}, True, True),  # draft tokens are not sampled
        ({"acceptance": "typical"}, False, False),
        ({"acceptance": "rejection"}, True, False),
        ({"acceptance": "rejection"}, False, True),  # greedy: no random numbers
    ],
)
def test_time_counts_where_the_output_cannot_depend_on_it(
    options: dict[str, Any], do_sample: bool, timed: bool
) -> None:
    def resolved(chooses: bool, **more: Any) -> tuple[bool, bool]:
        drafter: Any = SimpleNamespace(policy_chooses=chooses)
        return resolve(DraftOptions(**options, **more), drafter, do_sample)

    assert resolved(True) == (timed, timed) and resolved(False) == (timed, False)
    assert resolved(True, drafting="always") == (False, False)
    for chosen in (True, False):
        assert resolved(True, lookup=chosen) == resolved(False, lookup=chosen) == (timed, chosen)


def test_options_that_ask_for_the_same_have_one_key() -> None:
    parse = get_method("medusa").parse_options
    assert parse({}) == parse({"tree": "adaptive", "lookup": "auto"})
    assert key_of(parse({"tree": [[0], [1]]})) == key_of(parse({"tree": ((0,), (1,))}))
    assert changed(parse({"tree": ((0,), (1,)), "max_depth": None})) == {"tree": [[0], [1]]}
    keys = {key_of(parse(one)) for one in ({}, {"lookup": False}, {"tree": "chain"})}
    assert len(keys) == 3
    assert changed(get_method("propd").parse_options({**BITA, "drafter_kwargs": {}})) == BITA


@pytest.mark.parametrize("name", methods())
def test_defaults_are_valid(name: str) -> None:
    assert changed(get_method(name).parse_options(None)) == {}


def test_plain_is_another_contender_than_generate() -> None:
    names = parse_names("plain,generate,prompt_lookup")
    assert [one.name for one in contenders(names)] == ["plain", "prompt_lookup"]
