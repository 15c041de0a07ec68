"""Prompts with images or sounds: the same tokens and logits as plain generation.

A run takes one model type of each kind and two strategies; all of them: ``--every-architecture``.
"""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from conftest import prompt
from multimodal import AUDIO, HEAR, IMAGE, KINDS, SIZE, VIDEO, VIDEOS, prompts
from multimodal import build as built
from replay import RECORDED, Replay
from running import CAPTURED, drafting
from test_every_architecture import OPTIONS, adapted, check_refusal
from torch import Tensor
from torch.nn.functional import pad
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from hf_spec import last_stats
from hf_spec.methods.registry import methods
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.target import captures

#: A mask over the image, one position more, three positions and a recurrent state, sounds.
ALWAYS = ("gemma3", "paligemma", "qwen2_vl", "qwen3_5", "qwen2_audio", "smolvlm")
#: Strategies that no type refuses.
NAMES = ("prompt_lookup", "medusa")
GREEDY = {
    "max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True,
    "output_logits": True,
}  # fmt: skip
#: Of each row, images and length.
BATCHES = ([(1, 8)], [(1, 8), (2, 5), (1, 11)])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_type" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-architecture")
        # Older versions of Transformers know fewer.
        types = [one for one in KINDS if one in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES]
        metafunc.parametrize("model_type", types if every else ALWAYS)
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", list(methods()) if every else NAMES)


@cache
def given(model_type: str, size: int) -> dict[str, Tensor]:
    return prompts(model_type, BATCHES[size])


@cache
def plain(model_type: str, size: int) -> Any:
    return built(model_type).generate(**given(model_type, size), **GREEDY)


def test_exact(model_type: str, name: str) -> None:
    model, drafted = built(model_type), 0
    for size in range(len(BATCHES)):
        call, wanted = given(model_type, size), plain(model_type, size)
        try:
            with adapted(model, name):
                found = model.generate(**call, **GREEDY, **drafting(name, **OPTIONS.get(name, {})))
        except ValueError as error:
            assert name not in NAMES
            return check_refusal(error, model)
        assert found.sequences.tolist() == wanted.sequences.tolist()
        for ours, theirs in zip(found.logits, wanted.logits):
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-4  # fp32, in other orders
        drafted += found.spec_stats.num_drafted_tokens
    assert bool(drafted) == methods()[name].drafter.drafts


def check_seen(kind: str, call: dict[str, Any], seen: str) -> None:
    """Tokens are those of plain generation, and depend on what is seen."""
    wanted = tokens(kind, call)
    assert tokens(kind, {**call, seen: -call[seen]}) != wanted
    for name in NAMES:
        with adapted(built(kind), name):
            assert tokens(kind, call, **drafting(name)) == wanted


@pytest.mark.parametrize("kind", VIDEOS)
def test_videos(kind: str) -> None:
    for rows in BATCHES:
        check_seen(kind, prompts(kind, rows, videos=True), "pixel_values_videos")


def test_a_prompt_with_as_many_tokens_as_a_sound_has_frames() -> None:
    """The mask of the frames has no value per token."""
    call = prompts("qwen2_audio", [(1, 28)])
    assert call["feature_attention_mask"].shape == call["input_ids"].shape
    check_seen("qwen2_audio", call, "input_features")


def image(rows: int = 1) -> Tensor:
    return torch.randn(rows, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def test_an_image_before_the_text() -> None:
    """GIT puts it there itself, without placeholders."""
    for rows in (1, 2):
        ids = prompt(9, rows).clamp(max=57)
        check_seen("git", {"input_ids": ids, "pixel_values": image(rows)}, "pixel_values")


def test_refused_with_an_image() -> None:
    model = built("kosmos-2")
    seen = torch.full((1, model.config.latent_query_num), IMAGE)
    ids = torch.cat([prompt(2), seen, prompt(7)], dim=1)
    call = {"input_ids": ids, "image_embeds_position_mask": ids == IMAGE, "pixel_values": image()}
    assert tokens("kosmos-2", call)
    with pytest.raises(ValueError, match="Kosmos2TextForCausalLM drops position_ids and counts"):
        tokens("kosmos-2", call, **drafting("prompt_lookup"))


def test_what_is_seen_matters(model_type: str) -> None:
    """Otherwise the other tests would show nothing."""
    call = given(model_type, 0)
    call = {name: -one if one.is_floating_point() else one for name, one in call.items()}
    other = built(model_type).generate(**call, **GREEDY).logits[0]
    assert not torch.allclose(other, plain(model_type, 0).logits[0], atol=1e-2)


def tokens(model_type: str, call: dict[str, Any], **options: Any) -> list[list[int]]:
    greedy = {"max_new_tokens": 12, "do_sample": False}
    return built(model_type).generate(**call, **greedy, **options).tolist()


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_vl", "qwen3_5"])
@pytest.mark.parametrize("size", [0, 1], ids=["one", "batch"])
def test_the_next_turn(kind: str, size: int) -> None:
    """With the ``TreeCache`` of the turn with the image, positions go on from there."""
    model, call = built(kind), given(kind, size)
    spec = drafting("prompt_lookup")
    first = model.generate(
        **call, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, **spec
    )
    more = torch.cat([first.sequences, prompt(5, batch=len(first.sequences))], dim=1)
    wider = [0, more.shape[1] - call["input_ids"].shape[1]]
    turn = {"input_ids": more, "attention_mask": pad(call["attention_mask"], wider, value=1)}
    types = {name: pad(call[name], wider) for name in call if name.endswith("type_ids")}
    wanted = tokens(kind, {**call, **turn, **types})
    for again, message in (
        (call, f"departs from what {CACHE} holds within.*Leave"),
        ({**call, **turn, **types}, f"an image or .* TreeCache as {CACHE}.*Leave"),
    ):
        with pytest.raises(ValueError, match=message):
            tokens(kind, {**again, CACHE: copy.deepcopy(first[CACHE])}, **spec)
    assert tokens(kind, {**turn, **types, CACHE: first[CACHE]}, **spec) == wanted


def test_a_next_turn_of_another_kind_than_what_is_generated() -> None:
    """Tokens of PaliGemma's prompts attend in both directions, which those in a cache cannot."""
    model, call = built("paligemma"), given("paligemma", 0)
    spec = {**drafting("prompt_lookup"), "max_new_tokens": 6, "return_dict_in_generate": True}
    first = model.generate(**call, **spec)
    more = torch.cat([first.sequences, prompt(5)], dim=1)
    types = pad(call["token_type_ids"], [0, more.shape[1] - call["token_type_ids"].shape[1]])
    turn = {"input_ids": more, "token_type_ids": types, CACHE: first[CACHE]}
    with pytest.raises(ValueError, match=r"\(token_type_ids\) with a TreeCache.*kind that is gen"):
        model.generate(**turn, **spec)
    suffix = types.clone()
    suffix[:, call["input_ids"].shape[1] :] = 1
    wanted = tokens("paligemma", {**call, "input_ids": more, "token_type_ids": suffix,
                                  "attention_mask": torch.ones_like(more)})  # fmt: skip
    found = tokens("paligemma", {**turn, "token_type_ids": suffix}, **drafting("prompt_lookup"))
    assert found == wanted


@pytest.mark.parametrize(
    ("name", "mode"), [("ppd", {}), ("space", {}), ("space", RECORDED)],
    ids=["ppd", "space", "recorded"],
)  # fmt: skip
def test_placeholders_in_the_answer(
    name: str, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4 gives them the embedding and the layers' inputs of padding: also where probes, which
    have no ids, are in the same forward."""
    monkeypatch.setitem(captures.RECORDERS, "cpu", Replay)
    call, only = given("gemma4", 1), {"suppress_tokens": [*range(HEAR)]}
    wanted = tokens("gemma4", call, **only)
    answers = {token for row in wanted for token in row[call["input_ids"].shape[1] :]}
    assert answers & {IMAGE, VIDEO, AUDIO} and min(answers) >= HEAR
    with adapted(built("gemma4"), name):
        assert tokens("gemma4", call, **only, **drafting(name), **mode) == wanted


def test_compiled_steps() -> None:
    """Positions on several axes are inputs of the code."""
    call = given("qwen2_vl", 1)
    spec = drafting("prompt_lookup") | CAPTURED
    assert tokens("qwen2_vl", call, **spec) == tokens("qwen2_vl", call)
    assert not last_stats(built("qwen2_vl")).details["compiled"]["refused"]


def test_a_prompt_that_ends_with_an_image() -> None:
    """Each axis then goes on from its own last position."""
    call = {**given("qwen2_vl", 0)}
    end = int((call["input_ids"][0] == IMAGE).nonzero().max()) + 1
    call |= {
        name: call[name][:, :end] for name in ("input_ids", "attention_mask", "mm_token_type_ids")
    }
    assert tokens("qwen2_vl", call, **drafting("prompt_lookup")) == tokens("qwen2_vl", call)
