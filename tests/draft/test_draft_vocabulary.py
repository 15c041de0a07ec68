"""Predictions of a part of the vocabulary: which tokens, and what drafts and errors become."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_oracle import Opaque, randomise
from conftest import VOCAB, Tiny, check_same, prompt, ragged
from running import drafting
from safetensors.torch import save_file

import hf_spec
from hf_spec.adapters.config import VOCABULARY, PredictingConfig
from hf_spec.adapters.loading import find_active
from hf_spec.methods.registry import get_method, methods
from hf_spec.predict.markov import HEAD, DraftVocabulary, common_tokens
from hf_spec.predict.table import Predictions
from hf_spec.target.hidden_states import model_logits, output_logits

#: Methods that predict all distances at once by the model's output embeddings.
PREDICTING = [
    name
    for name, one in methods().items()
    if issubclass(one.adapter_config or object, PredictingConfig)
]
#: Not the first ones, and none behind another.
TOKENS = torch.tensor([3, 4, 9, 20, 33, 34, 58])


def test_the_commonest_tokens() -> None:
    answers = [[5, 5, 5, 2], [7, 7, 2], [0]]
    assert common_tokens(answers, 1, 9).tolist() == [5]
    assert common_tokens(answers, 3, 9).tolist() == [2, 5, 7]
    assert common_tokens(answers, 4, 9).tolist() == [0, 2, 5, 7]
    assert common_tokens(answers, 6, 9).tolist() == [0, 1, 2, 3, 5, 7]  # unseen ones by their ids
    assert common_tokens([[]], 2, 9).tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gpt2", "phi", "gemma2", "opaque"])
def test_logits_are_columns_of_the_models(fresh: Tiny, kind: str) -> None:
    """Also with a bias (phi), a soft cap (gemma2) and numbers that cannot be seen."""
    model: Any = fresh("llama" if kind == "opaque" else kind)
    if kind == "opaque":
        model.lm_head = Opaque(model.lm_head)
    if kind == "gemma2":
        model.config.final_logit_softcapping = 2.0
    if kind == "phi":
        model.lm_head.bias.data = torch.randn(VOCAB)
    part = DraftVocabulary(TOKENS, model)
    states = torch.randn(2, 3, model.config.hidden_size)
    with torch.no_grad():
        for logits in (output_logits, model_logits):
            fewer = logits(model, states, head=part)
            # fp32 with other reduction orders.
            torch.testing.assert_close(fewer, logits(model, states)[..., TOKENS])
        whole = part.of_all(fewer)
    assert torch.equal(whole[..., TOKENS], fewer)
    others = torch.ones(VOCAB, dtype=torch.bool)
    others[TOKENS] = False
    assert (whole[..., others] == -torch.inf).all()


def test_rows_of_inference_mode_are_trained_with(fresh: Tiny) -> None:
    model, states = fresh("llama"), torch.randn(2, 32, requires_grad=True)
    with torch.inference_mode():
        made = DraftVocabulary(TOKENS, model).weight
    part = DraftVocabulary(TOKENS, model)
    assert part.weight is made
    part(states).sum().backward()


@pytest.mark.parametrize("tokens", [None, TOKENS], ids=["all", "some"])
def test_own_output_embeddings_stay_where_they_are(
    tiny: Tiny, tokens: torch.Tensor | None
) -> None:  # fmt: skip
    """As recorded steps are for places in memory."""
    own = torch.randn(VOCAB if tokens is None else len(tokens), 32)
    weights = {HEAD: own} if tokens is None else {HEAD: own, VOCABULARY: tokens}
    before, after = (DraftVocabulary.of(weights, tiny("llama")) for _ in range(2))
    assert before is not None and after is not None
    assert after.tokens is before.tokens and after.weight is before.weight
    assert after.weight.data_ptr() == own.data_ptr()


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", PREDICTING)
def test_only_these_are_drafted(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch, name: str, do_sample: bool
) -> None:
    """And the output is that of plain decoding, whatever is drafted."""
    model: Any = fresh("llama")
    model.add_adapter(get_method(name).adapter_config(markov_rank=2, draft_vocab_size=len(TOKENS)))
    type_name = get_method(name).adapter_config.type_name
    randomise(model, type_name)
    find_active(model, type_name).tensors()[VOCABULARY].copy_(TOKENS)
    drafted, init = set(), Predictions.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        drafted.update(self.tokens.flatten().tolist())

    monkeypatch.setattr(Predictions, "__init__", noted)
    if do_sample:
        torch.manual_seed(1)
        model.generate(**ragged(), max_new_tokens=16, do_sample=True, **drafting(name))
    else:
        check_same(model, drafting(name), **ragged())
    assert drafted == {*TOKENS.tolist()}
    assert hf_spec.last_stats(model).num_drafted_tokens > 0


def test_a_vocabulary_of_another_model(fresh: Tiny) -> None:
    model: Any = fresh("llama")
    model.add_adapter(hf_spec.MedusaConfig(draft_vocab_size=3))
    tokens = find_active(model, "MEDUSA").tensors()[VOCABULARY]
    tokens.copy_(torch.tensor([1, 2, VOCAB]))
    message = f"predicts tokens 1 to {VOCAB}; the model has {VOCAB}. If its vocabulary was reduced"
    with pytest.raises(ValueError, match=message):
        model.generate(prompt(5), max_new_tokens=3, **drafting("medusa"))


def test_what_does_not_fit(fresh: Tiny) -> None:
    for config, message in (
        (
            hf_spec.MedusaConfig(draft_vocab_size=VOCAB + 1),
            f"from 0 to {VOCAB}. The model has no more",
        ),
        (hf_spec.MedusaConfig(draft_vocab_size=9, projection="own"), "a matrix of its own"),
        (hf_spec.PPDConfig(draft_vocab_size=9, head="vocabulary"), "a matrix of its own"),
    ):
        model = fresh("llama")
        with pytest.raises(ValueError, match=message):
            model.add_adapter(config)
        assert find_active(model, config.type_name) is None


def test_a_quarter_of_the_tokens_unless_a_config_says_otherwise(
    fresh: Tiny, tmp_path: Path
) -> None:
    """What is saved says so, and configs of before are read as they were written."""
    model: Any = fresh("llama")
    model.add_adapter(hf_spec.MedusaConfig(num_heads=2))
    size = VOCAB // 4
    assert find_active(model, "MEDUSA").tensors()[VOCABULARY].tolist() == [*range(size)]
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    saved = json.loads(file.read_text())
    assert (saved["draft_vocab_size"], saved["markov_rank"]) == (size, 128)
    assert {one.name for one in dataclasses.fields(hf_spec.MedusaConfig)} <= saved.keys()
    again: Any = fresh("llama")
    again.load_adapter(tmp_path)
    check_same(again, drafting("medusa"), **ragged())
    for fields in ({"draft_vocab_size": 0, "markov_rank": 0}, {"markov_rank": 0}):
        kept = {name: value for name, value in saved.items() if name != "draft_vocab_size"}
        file.write_text(json.dumps({**kept, **fields}))
        weights = {"weights": torch.zeros(2, 1, 32, 32), "biases": torch.zeros(2, 1, 32)}
        prefix = "base_model.model.spec_modules.type_medusa.medusa_"
        stored = {f"{prefix}{name}": one for name, one in weights.items()}
        save_file(stored, tmp_path / "adapter_model.safetensors")
        old: Any = fresh("llama")
        old.load_adapter(tmp_path)
        assert VOCABULARY not in find_active(old, "MEDUSA").tensors()


def test_ranks_beyond_the_drafted_tokens_are_refused(fresh: Tiny) -> None:
    model: Any = fresh("llama")
    model.add_adapter(hf_spec.MedusaConfig(draft_vocab_size=3))
    trees = {count: drafting("medusa", tree=[[rank] for rank in range(count)]) for count in (3, 4)}
    with pytest.raises(ValueError, match="rank 3: ranks count from 0, and the adapter predicts 3"):
        model.generate(prompt(5), max_new_tokens=3, **trees[4])
    check_same(model, trees[3], prompt(5))
