"""exact="strict": tokens, logits and caches have the bits of plain generation's."""

from typing import Any

import peft
import pytest
import torch
from conftest import EOS, prompt, ragged, shared
from running import drafting
from test_compiled import CAPTURED, OPTIONS, adapt, generate
from transformers import DynamicCache

import hf_spec
from hf_spec.methods.registry import methods
from modeling_patches import bitwise
from modeling_patches.cache_name import CACHE

pytestmark = pytest.mark.instructions

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def strict(name: str, **options: Any) -> dict[str, Any]:
    return drafting(name, **{**OPTIONS.get(name, {}), "exact": "strict", **options})


def of_type(model: Any, dtype: torch.dtype) -> Any:
    return model.to(dtype).eval()


def prompts(rows: int, length: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def bits(one: Any, other: Any) -> bool:
    """Whether two outputs have the same tokens, logits and, if they have one, DynamicCache."""
    pairs = [(one.sequences, other.sequences), *zip(one.logits, other.logits)]
    caches = getattr(one, CACHE), getattr(other, CACHE)
    if all(type(cache) is DynamicCache for cache in caches):
        for layer, same in zip(*(cache.layers for cache in caches), strict=True):
            pairs += [(layer.keys, same.keys), (layer.values, same.values)]
    return len(one.logits) == len(other.logits) and all(torch.equal(*pair) for pair in pairs)


def compare(model: Any, name: str, inputs: dict[str, Any], **settings: Any) -> Any:
    """Run a strategy and compare all bits; returns its output."""
    given = {"output_logits": True, "eos_token_id": None, "max_new_tokens": 16, **settings}
    outputs = []
    for strategy in ({}, strict(name)):
        torch.manual_seed(0)
        cache = {CACHE: DynamicCache(config=model.config)}
        outputs.append(generate(model, inputs, **given, **strategy, **cache))
    assert bits(*outputs)
    assert outputs[1].spec_stats.num_drafted_tokens
    return outputs[1]


@pytest.mark.parametrize(
    ("architecture", "dtype", "rows"),
    [
        ("llama", BF16, 1), ("llama", FP32, 3), ("qwen2", FP16, 1), ("qwen2", FP16, 3),
        ("qwen3", BF16, 3), ("gpt2", FP32, 1), ("gpt2", FP32, 3), ("gpt_neox", FP32, 1),
        ("opt", BF16, 1), ("opt", BF16, 3), ("mistral", BF16, 1), ("gemma3", FP32, 3),
        ("phi3", BF16, 3),
    ],
)  # fmt: skip
def test_the_bits_of_plain_generation(
    fresh: Any, architecture: str, dtype: torch.dtype, rows: int
) -> None:
    compare(of_type(fresh(architecture), dtype), "prompt_lookup", prompts(rows))


def test_a_difference_as_small_as_rounding_is_noticed(fresh: Any) -> None:
    """Without ``strict`` there are such on most CPUs; here on all."""
    model = of_type(fresh("llama"), FP32)
    given = {"output_logits": True, "eos_token_id": None}
    plain = generate(model, prompts(1), **given)
    model.lm_head.weight.data.mul_(1 + 2**-22)
    usual = generate(model, prompts(1), **given, **strict("prompt_lookup", exact="auto"))
    assert torch.equal(plain.sequences, usual.sequences) and not bits(plain, usual)


@pytest.mark.parametrize("name", sorted({*methods()} - {"prompt_lookup", "mtp"}))
def test_every_strategy(fresh: Any, name: str) -> None:
    dtype = (BF16, FP32, FP16)[len(name) % 3]
    model = of_type(adapt(fresh("llama"), name), dtype)
    compare(model, name, prompts(1 + len(name) % 2))


def test_sampled_with_a_seed_and_processed(fresh: Any) -> None:
    model = of_type(fresh("llama"), BF16)
    output = compare(
        model, "prompt_lookup", {"input_ids": prompt()}, do_sample=True, temperature=0.2,
        min_new_tokens=9, max_new_tokens=60,
    )  # fmt: skip
    assert output.spec_stats.mean_accepted_tokens > 1


def test_second_turn_of_a_dynamic_cache(fresh: Any) -> None:
    model = of_type(fresh("llama"), BF16)
    caches, given = (DynamicCache(), DynamicCache()), {"output_logits": True, "eos_token_id": None}
    ids = prompts(1)["input_ids"]
    for _ in range(2):
        plain = generate(model, ids, **given, **{CACHE: caches[0]})
        found = generate(model, ids, **given, **strict("prompt_lookup"), **{CACHE: caches[1]})
        assert bits(plain, found)
        ids = torch.cat([plain.sequences, ids[:, :5]], 1)


def test_sequences_that_end(fresh: Any) -> None:
    model = of_type(fresh("llama"), BF16)
    free = generate(model, prompts(3), eos_token_id=None).sequences
    ends = sorted({int(row[12 + 4 * n]) for n, row in enumerate(free)} | {EOS})
    plain = generate(model, prompts(3), eos_token_id=ends).sequences
    found = generate(model, prompts(3), eos_token_id=ends, **strict("prompt_lookup")).sequences
    assert plain.shape[1] < free.shape[1] or (plain == 0).any()
    assert torch.equal(plain, found)


def test_with_a_lora(fresh: Any) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    compare(of_type(peft.get_peft_model(fresh("llama"), config), BF16), "prompt_lookup", prompts(1))


def test_says_how_products_were_computed(fresh: Any) -> None:
    output = generate(of_type(fresh("llama"), BF16), prompts(1), **strict("prompt_lookup"))
    products = output.spec_stats.details["strict"]["products"]
    assert products and set(products.values()) <= {"at_once", "batched", "one_by_one"}
    assert any(name.startswith("(61, 32), ") for name in products)  # the output embeddings


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "padding": ({"inputs": ragged()}, "prompt with padding: .* Give prompts of equal length"),
    "compiled": (CAPTURED, "cache_implementation='static': compiled code rounds"),
    "sampled batch": ({"inputs": prompts(2), "do_sample": True}, "do_sample=True for several"),
    "typical": ({"options": {"acceptance": "typical"}}, "acceptance='typical': only 'match'"),
    "unknown": ({"options": {"exact": "bits"}}, "exact='bits': choose one of auto, strict"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_calls(case: str) -> None:
    given, message = REFUSED[case]
    given = {"inputs": prompts(1), "options": {}, **given}
    inputs, options = given.pop("inputs"), given.pop("options")
    with pytest.raises(ValueError, match=message):
        generate(shared("llama"), inputs, **given, **strict("prompt_lookup", **options))


def test_refuses_a_cache_without_windows() -> None:
    with pytest.raises(ValueError, match=r"Create it by DynamicCache\(config=model.config\)"):
        generate(
            shared("mistral"), prompts(1), **strict("prompt_lookup"), **{CACHE: DynamicCache()}
        )


def test_refuses_a_tree_cache_and_pruning(fresh: Any) -> None:
    model = adapt(fresh("llama"), "propd")
    cache = getattr(generate(model, prompt(), **strict("prompt_lookup")), CACHE)
    with pytest.raises(ValueError, match="a TreeCache .* Give a DynamicCache"):
        generate(model, prompt(), **strict("prompt_lookup"), **{CACHE: cache})
    with pytest.raises(ValueError, match="prune=True"):
        generate(model, prompt(), **strict("propd", prune=True))


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("bloom", "its positions depend on more than the token"),
        ("mixtral", "its Mixtral.* multiplies in a way of its own"),
        ("falcon", "its attention cannot be exchanged"),
        ("gptj", "attention|attn_implementation"),
    ],
)
def test_refused_models(architecture: str, why: str) -> None:
    message = f"in torch.float32 does not work with exact='strict'.*{why}.*Leave exact='strict' out"
    with pytest.raises(ValueError, match=message):
        generate(shared(architecture), prompts(1), **strict("prompt_lookup"))


def test_refuses_eager_attention(fresh: Any) -> None:
    model = fresh("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="attn_implementation='eager' cannot run node by node"):
        generate(model, prompts(1), **strict("prompt_lookup"))


def test_a_trial_finds_other_bits(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(kind: Any, inputs: Any, weight: Any, bias: Any) -> Any:
        return kind(inputs.flip(-1), weight.flip(-1), bias)

    def product(*args: Any) -> Any:
        return turned

    product.cache_info = bitwise.product.cache_info  # type: ignore[attr-defined]
    monkeypatch.setattr(bitwise, "product", product)
    with pytest.raises(ValueError, match=r"in a trial \d of 8 rows of logits differ from plain"):
        generate(of_type(fresh("llama"), FP32), prompts(1), **strict("prompt_lookup"))


def test_activations_where_vectors_leave_numbers_over(
    fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node by node: what is left over is computed by other code, here at once with all others."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 3)
        cpu = torch.device("cpu")
        counts = (64, 144, 65536, 3 * 32768, 3 * 32768 + 64)
        assert [bitwise.in_whole_vectors(n, cpu) for n in counts] == [
            True,
            False,
            True,
            True,
            False,
        ]
        assert bitwise.in_whole_vectors(144, torch.device("cuda"))
    silu, seen = torch.nn.functional.silu, set()

    def counted(inputs: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        seen.add(inputs.shape[1])
        return silu(inputs)

    model = of_type(fresh("llama"), FP32)
    for layer in model.model.layers:
        monkeypatch.setattr(layer.mlp.act_fn, "forward", counted)
    generate(model, prompt(), **strict("prompt_lookup"))
    assert seen == {1, prompt().shape[1], 19}, "single nodes, the prompt and the trial's"


def test_is_an_option_of_a_config(fresh: Any) -> None:
    config = hf_spec.SpecConfig(
        assistant_strategy="prompt_lookup", assistant_kwargs={"exact": "strict"}, max_new_tokens=8
    )
    model = fresh("llama")
    output = model.generate(
        **prompts(1), generation_config=config, return_dict_in_generate=True, do_sample=False
    )
    assert "strict" in output.spec_stats.details
