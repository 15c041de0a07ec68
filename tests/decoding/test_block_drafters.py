"""DFLASH and DSPARK: blocks behind what was committed, and bases that they do not fit."""

from typing import Any

import pytest
import torch
from adapter_oracle import randomise
from conftest import Tiny, check_same, prompt, ragged
from method_variants import DFLASH_2, DOMINO, DSPINE, LILICORR, XPRESS
from replay import RECORDED
from running import as_if, drafting, proposals
from test_shrinking import staggered

import hf_spec
from hf_spec.adapters.loading import find_active
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.draft.policy import StepPolicy
from hf_spec.methods.registry import methods
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.predict import network
from hf_spec.predict.blocks import BlockNetwork, block_sequences

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
GEMMA4 = {
    "architecture": "gemma4_text", "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "attention_bias": False, "attention_k_eq_v": True,
    "rope_parameters": {
        "rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 10000.0
    },
}  # fmt: skip
CONFIGS = {
    "plain": ("dflash", {"num_layers": 2, "block_size": 5}),
    "anchor": ("dspark", {"num_layers": 1, "markov_rank": 4, "markov_head": "gated"}),
    "rnn": ("dspark", {"num_layers": 1, "markov_rank": 4, "markov_head": "rnn"}),
    "llama": ("dflash", {"architecture": "llama", "layers": [3, 1], "head": "own"}),
    "scaled": (
        "dflash",
        {
            "block_size": 4, "embedding_scale": 2.0, "logit_scale": 0.5, "logit_softcap": 3.0,
            "draft_vocab_size": 0,
        },
    ),
    "window": (
        "dflash", {"block_size": 4, "sliding_layers": [0], "sliding_window": 6},
    ),
    "window by query": (
        "dflash", {
            "block_size": 4, "sliding_layers": [0, 1], "sliding_window": 6,
            "sliding_window_from": "query", "sliding_window_non_causal": False,
        },
    ),
    "last window": (
        "dflash", {"num_layers": 2, "block_size": 4, "sliding_layers": [1], "sliding_window": 6},
    ),
    "gemma4": ("dspark", {"num_layers": 2, "markov_rank": 4, **GEMMA4}),
    "causal": ("dflash", {"block_size": 4, "causal": True}),
    "causal window": (
        "dflash", {
            "block_size": 4, "causal": True, "sliding_layers": [0], "sliding_window": 6,
            "sliding_window_from": "query",
        },
    ),
    "domino": ("dflash", {"num_layers": 1, "sample_from_anchor": True, **DOMINO}),
    "dspine": ("dflash", {"num_layers": 2, "block_size": 5, "draft_vocab_size": 40, **DSPINE}),
    "xpress": ("dflash", {"num_layers": 1, **XPRESS}),
    "selector": ("dflash", {"num_layers": 1, "block_size": 5, **DFLASH_2}),
    "lilicorr": ("dflash", {"num_layers": 1, "block_size": 5, "conv_kernel_size": 2, **LILICORR}),
}  # fmt: skip
#: Kinds whose drafted tokens change the predictions of those after them.
CONDITIONAL = [kind for kind, (_, fields) in CONFIGS.items() if fields.get("markov_rank")]


def adapt(model: Any, kind: str) -> str:
    """Give the model an adapter of random parameters; returns its strategy."""
    name, fields = CONFIGS[kind]
    model.add_adapter(methods()[name].adapter_config(**fields))
    randomise(model, name.upper(), std=0.25)
    return name


def sharpen(model: Any, name: str) -> None:
    """Make predictions far from uniform, so that trees are deep."""
    with torch.no_grad():
        find_active(model, name.upper()).norm.weight.mul_(20.0)


def check_blocks(
    model: Any, name: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, int]]:
    """Compares the call's tokens with plain generation's and each block with one behind the whole
    text; of each block, the batch's size and the slots of the last layer."""
    drafter, seen = methods()[name].drafter, []
    propose = drafter.propose

    def checked(self: Any, state: Any) -> Any:
        tree, predictor = propose(self, state), self.predictor
        for row, tokens in enumerate(state.tokens):
            if state.active[row] and state.max_depth:
                ids, place = torch.tensor([tokens]), torch.tensor([[len(tokens) - 2]])
                expected = block_sequences(predictor.network, ids, None, place)[0, 0]
                # The base's states of padded rows are rounded otherwise.
                found = predictor.hidden[row]
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
                slots = predictor.cache.layers[-1].views["keys"].shape[2]
                seen.append((state.batch_size, slots))
        return tree

    monkeypatch.setattr(drafter, "propose", checked)
    check_same(model, drafting(name), **given)
    return seen


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_block_stands_behind_all_committed_tokens(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch, kind: str, ahead: bool
) -> None:
    """After prompts of different lengths, plain steps, rejections, and rows that stop."""
    as_if(ahead, monkeypatch)
    model, steps = fresh("llama_tied"), [0]
    name = adapt(model, kind)
    monkeypatch.setattr(
        StepPolicy, "wants_draft", lambda *_: bool(steps.append(1)) or len(steps) % 3 == 0
    )
    seen = check_blocks(model, name, staggered(5), monkeypatch)
    assert len(seen) > 10 and len({batch for batch, _ in seen}) > 1


@pytest.mark.parametrize("kind", ["window by query", "last window"])
def test_windows_are_rings(fresh: Tiny, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Prompts come in parts, which are shorter than a ring, and rings than the text."""
    monkeypatch.setattr(network, "AT_ONCE", 20)
    model = fresh("llama_tied")
    model.config.max_position_embeddings = 256
    seen = check_blocks(model, adapt(model, kind), ragged((210, 150)), monkeypatch)
    assert len(seen) > 5 and {slots for _, slots in seen} == {128}


@pytest.mark.parametrize("kind", CONDITIONAL)
@torch.no_grad()
def test_a_node_is_as_likely_as_its_path(fresh: Tiny, kind: str) -> None:
    model, ids = fresh("llama_tied"), prompt()
    name = adapt(model, kind)
    sharpen(model, name)
    drafter = methods()[name].make_drafter(model, methods()[name].parse_options({}))
    with proposals(hf_spec.Drafter) as seen:
        model.generate(ids, **GREEDY, **drafting(name, num_draft_tokens=31))
    tree, place = seen[0][1], torch.tensor([ids.shape[1] - 1])
    assert tree.host is not None and tree.num_tokens > 31 and tree.max_depth > 2
    children = set()
    for node in range(1, tree.num_tokens):
        path = tree.tokens[0, tree.ancestors[0, node]]
        (logits,) = drafter.predictor.future_logits(torch.cat([ids, path[None]], 1), place)
        found = logits[0, : len(path) - 1].softmax(-1).gather(1, path[1:, None]).prod()
        torch.testing.assert_close(float(tree.host.probs[0, node]), float(found), rtol=1e-3, atol=0)
        children.add((len(path), int(path[-1])))
    assert len(children) < tree.num_tokens - 1, "no token has several parents"


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("kind", "size", "rows"),
    [("rnn", 63, 3), ("domino", 31, 1), ("dspine", 63, 1), ("xpress", 31, 3), ("lilicorr", 31, 3)],
)
def test_recorded_trees(shallow: Tiny, kind: str, size: int, rows: int) -> None:
    """Those of eager steps, node by node, until there are fewer tokens to come than distances."""
    model, given = shallow("llama_tied"), ragged((9, 5, 12)[:rows])
    name, texts, trees = adapt(model, kind), [], []
    sharpen(model, name)
    spec = drafting(name, num_draft_tokens=size)
    for way in ({}, spec, {**spec, **RECORDED}):
        with proposals(hf_spec.Drafter) as seen:
            texts.append(model.generate(**given, **GREEDY, **way).tolist())
        # Recorded batches may be filled up with copies of a row.
        drafts = [(tree.tokens[:rows], tree.parents[:rows]) for _, tree in seen[:6]]
        trees.append([(tokens.tolist(), parents.tolist()) for tokens, parents in drafts])
    assert texts[0] == texts[1] == texts[2]
    assert trees[1] == trees[2] and all(len(tokens[0]) > size for tokens, _ in trees[2])


def test_a_prefix_without_features(fresh: Tiny) -> None:
    """A cache that a plain call has filled: the block's context begins with the new tokens."""
    model = fresh("llama")
    name = adapt(model, "plain")
    first = model.generate(prompt(), **GREEDY, return_dict_in_generate=True)
    more = torch.cat([first.sequences, prompt(4, seed=3)], dim=1)
    check_same(model, {**drafting(name), CACHE: first[CACHE]}, more)
    assert hf_spec.last_stats(model).num_drafted_tokens > 0


def test_predictions_of_finished_sequences_are_those_of_decoding(fresh: Tiny) -> None:
    model = fresh("llama")
    for kind in ("plain", "causal", *CONDITIONAL):
        name = adapt(model, kind)
        method = methods()[name]
        drafter = method.make_drafter(model, method.parse_options({"tree": "chain"}))
        with torch.no_grad(), proposals(hf_spec.Drafter) as seen:
            model.generate(prompt(), **GREEDY, **drafting(name, tree="chain"))
            full = torch.cat([prompt(), seen[0][1].tokens], dim=1)
            (logits,) = drafter.predictor.future_logits(full, torch.tensor([prompt().shape[1] - 1]))
        assert torch.equal(logits.argmax(-1), seen[0][1].tokens[:, 1:]), kind
        model.delete_adapter("default")


@pytest.mark.parametrize("architecture", ["gemma3", "llama"])
@pytest.mark.parametrize(("kind", "scale"), [("plain", 1.0), ("scaled", 2.0)])
def test_embeddings_are_those_of_the_weights(
    fresh: Tiny, architecture: str, kind: str, scale: float
) -> None:
    """Released drafters take the base's embeddings as its weights are, which Gemma scales; some
    scale them by a factor of their own."""
    model, seen = fresh(architecture), []
    adapt(model, kind)
    network = BlockNetwork(model, find_active(model, "DFLASH"))
    network.adapter.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    block_sequences(network, prompt(), None, torch.tensor([[5]]))
    rows = network.blocks(prompt()[:, 6])
    torch.testing.assert_close(seen[0], scale * model.get_input_embeddings().weight[rows])


@pytest.mark.parametrize("architecture", ["cohere2", "gemma2", "llama"])
@torch.no_grad()
def test_logits_are_shaped_as_the_drafter_says(fresh: Tiny, architecture: str) -> None:
    """Not as the base shapes its own: Gemma 2 caps them. In training likewise."""
    model = fresh(architecture)
    name = adapt(model, "scaled")
    method, head = methods()[name], model.get_output_embeddings().weight
    drafter = method.make_drafter(model, method.parse_options({}))
    ids, anchors = prompt(9), torch.tensor([[2, 5]])
    states = block_sequences(drafter.predictor.network, ids, None, anchors)
    expected = 3.0 * torch.tanh(0.5 * states @ head.T / 3.0)
    torch.testing.assert_close(drafter.predictor.logits(states[0]), expected[0])
    batch = TrainingBatch(ids, ids, anchors)
    found = method.objective(model, find_active(model, name.upper()), batch)
    torch.testing.assert_close(found["logits"], expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": [1, 9]}, "layers=.1, 9.: the model has 3 layers"),
        ({"layers": [2, 2]}, "layers=.*each layer once"),
        ({"mask_token_id": 61}, "mask_token_id=61: the model has the tokens 0 to 60"),
        ({"sliding_layers": [0]}, "need a sliding_window"),
        ({"sliding_layers": [2], "sliding_window": 4}, "sliding_layers=2"),
        ({"confidence_head": "markov"}, "needs a Markov head"),
        (
            {**DSPINE, "sample_from_anchor": True},
            "sample_from_anchor=True with markov_head='dspine'",
        ),
        ({**LILICORR, "sample_from_anchor": True}, "True with markov_head='lilicorr'"),
        ({**LILICORR, "lattice_heads": 4}, "lattice_heads=4: must divide markov_width=6"),
        ({**LILICORR, "lattice_mlp_ratio": 0.1}, "lattice_mlp_ratio=0.1: makes MLPs of width 0.6"),
        ({"markov_rank": 33, "markov_head": "dspine"}, "markov_rank=33.*hidden_size"),
        ({"draft_vocab_size": 62}, "draft_vocab_size=62"),
        ({"hidden_size": 16}, "hidden_size=16: LlamaForCausalLM has 32"),
        ({"architecture": "bert"}, "architecture='bert'.*llama, qwen3, gemma4_text"),
        ({**GEMMA4, "attention_k_eq_v": 1}, "attention_k_eq_v=1: must be True"),
        ({**GEMMA4, "hidden_act": "x"}, "hidden_act='x'"),
        ({**GEMMA4, "conv_kernel_size": 2}, "conv_kernel_size=2: .*of gemma4_text"),
        ({"conv_kernel_size": 2, "conv_group_size": 7}, "conv_group_size=7: 32 features"),
    ],
)
def test_configs_that_do_not_fit(fresh: Tiny, fields: dict[str, Any], message: str) -> None:
    model = fresh("llama")
    with pytest.raises(ValueError, match=message):
        model.add_adapter(hf_spec.DFlashConfig(**fields))
    assert not hasattr(model, "spec_modules")


def test_embeddings_of_another_size_than_the_states(fresh: Tiny) -> None:
    model = fresh("opt")
    model.model.decoder.embed_tokens = torch.nn.Embedding(61, 16)
    with pytest.raises(ValueError, match="input embeddings of 16, states of 32.*one size"):
        model.add_adapter(hf_spec.DFlashConfig())
