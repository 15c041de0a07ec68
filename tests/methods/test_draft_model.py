"""An assistant model drafts: its trees are its own predictions, and the output is the model's."""

import copy
from itertools import product
from types import SimpleNamespace
from typing import Any

import architectures
import pytest
import torch
from conftest import Tiny, check_continued, check_same, prompt, ragged
from covering import covering
from running import CAPTURED, drafting, no_forward
from step_by_hand import frontier

import hf_spec
from hf_spec.methods.registry import get_method

GREEDY: dict[str, Any] = {"max_new_tokens": 11, "do_sample": False}
GIVEN = {"row": {"input_ids": prompt()}, "batch": ragged()}


def drafts(assistant: Any, **options: Any) -> dict[str, Any]:
    return {**drafting("draft_model", **options), "assistant_model": assistant}


def assistant_of(tiny: Tiny, name: str) -> Any:
    return architectures.build(name) if name in ("qwen3_next", "mamba2") else tiny(name)


@pytest.mark.parametrize(
    ("name", "tree", "given"),
    covering(
        product(["llama", "gemma3", "gpt2", "qwen3_next"], ["adaptive", "chain"], GIVEN),
        lambda name, tree, given: [(name, tree), (name, given), (tree, given)],
    ),
)
def test_a_model_that_drafts_for_itself_is_always_right(
    tiny: Tiny, name: str, tree: str, given: str
) -> None:
    model = assistant_of(tiny, name)
    check_same(model, drafts(model, tree=tree), **GIVEN[given], **GREEDY)
    stats = hf_spec.last_stats(model)
    # 10 tokens after the first one: chains of 8 draft tokens and a bonus.
    assert stats.num_steps == 3 if tree == "chain" else stats.num_steps < 9


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen3_next", "mamba2"])
@torch.no_grad()
def test_nodes_of_a_tree_are_as_the_assistant_alone(tiny: Tiny, name: str) -> None:
    """Of prompts that run in parts, the first of which is padding for a row."""
    assistant, method = assistant_of(tiny, name), get_method("draft_model")
    made = method.make_drafter(tiny("llama"), method.parse_options({}), assistant)
    drafter: Any = made.predictor
    between: list[int] = []
    batch = [prompt(7)[0].tolist(), prompt(4, seed=1)[0].tolist()]
    state: Any = SimpleNamespace(
        batch_size=2, tokens=batch, remaining=[9, 9], timed=False, do_sample=False,
        target=SimpleNamespace(graphs=None), prompt_part=3, between_parts=lambda: between.append(1),
    )  # fmt: skip
    drafter.start(state)
    for step in range(2):
        drafter.catch_up(state)
        assert len(between) == (0 if name in ("qwen3_next", "mamba2") else 2)  # of a prompt's parts
        logits = drafter.level(frontier(0, torch.zeros(2, 1, dtype=torch.long)))
        paths: list[list[int]] = [[]]
        for depth in range(3):
            for row, node in product(range(2), range(len(paths))):
                alone = assistant(torch.tensor([batch[row] + paths[node]])).logits[0, -1]
                expected = alone[: drafter.shared]
                torch.testing.assert_close(logits[row, node], expected, rtol=1e-4, atol=1e-4)
            tokens, parents = [3 + depth, 9, 5], [1, 0, 1] if depth else [0, 0, 0]
            paths = [paths[above] + [token] for above, token in zip(parents, tokens)]
            given = (torch.tensor([one] * 2) for one in (tokens, parents))
            logits = drafter.level(frontier(depth + 1, *given))
        drafter.finish()
        batch[0] += [8, 11, 4][: 3 * step or 1]
        batch[1] += [6] * (step + 1)


def test_parts_of_a_prompt(tiny: Tiny, fresh: Tiny) -> None:
    assistant, widths = fresh("llama"), []
    assistant.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    check_same(tiny("llama"), drafts(assistant), prompt(11), **GREEDY, prefill_chunk_size=4)
    assert widths[:3] == [4, 4, 4]  # the prompt and its first new token


@pytest.mark.parametrize("given", GIVEN)
def test_a_text_may_be_longer_than_the_assistant_s_table_of_positions(
    tiny: Tiny, fresh: Tiny, given: str
) -> None:
    """As its prompt is, or as it becomes."""
    for known in (8, 14):
        assistant: Any = fresh("gpt2")
        table = assistant.transformer.wpe
        table.weight.data, table.num_embeddings = table.weight.data[:known].clone(), known
        assistant.config.n_positions = known
        check_same(tiny("llama"), drafts(assistant), **GIVEN[given], **GREEDY)
        assert hf_spec.last_stats(tiny("llama")).num_drafted_tokens > 0


@pytest.mark.parametrize("way", [{}, CAPTURED], ids=["eager", "compiled"])
def test_continued(tiny: Tiny, way: dict[str, Any]) -> None:
    """The drafter has not seen what an earlier call has cached."""
    spec = {**drafts(tiny("llama")), **way}
    check_continued(tiny("llama_tied"), spec, **GREEDY)


@pytest.mark.parametrize("recycle", [False, True])
@pytest.mark.parametrize("size", [40, 64])
def test_vocabularies_of_other_padded_sizes(
    tiny: Tiny, fresh: Tiny, size: int, recycle: bool
) -> None:
    """Tokens that only one of the models has are drafted only where they are recycled, and may yet
    be emitted."""
    model, assistant = tiny("llama_tied"), fresh("llama")
    assistant.resize_token_embeddings(size)
    for given in GIVEN.values():
        out = check_same(model, drafts(assistant, recycle=recycle), **given, **GREEDY)
        assert size > 61 or out.max() >= size
        assert hf_spec.last_stats(model).num_drafted_tokens > 0


def test_refused(tiny: Tiny, fresh: Tiny) -> None:
    model, spec, larger, other = tiny(), drafts(None), fresh("llama"), fresh("llama")
    larger.resize_token_embeddings(2000)
    other.config.bos_token_id = other.generation_config.bos_token_id = 7
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "draft_model' without assistant_model: give"),
        ({"assistant_model": "gpt2"}, "assistant_model='gpt2': give a loaded model"),
        ({"assistant_model": model.model}, "LlamaModel does not generate by itself.*import"),
        ({**drafting("prompt_lookup"), "assistant_model": tiny("llama_tied")},
         "assistant_model=LlamaForCausalLM with .*'prompt_lookup'.*itself"),
        ({"assistant_model": other}, r"another tokenizer.*bos_token_id \[1\] and \[7\]"),
        ({"assistant_model": larger}, "61 and 2000 tokens.*tokenizer=.*, assistant_tokenizer="),
        ({"assistant_model": architectures.build("xlstm")}, "xlstm|XLSTM|xLSTM"),
    ]  # fmt: skip
    with no_forward(model):
        for given, message in cases:
            with pytest.raises(ValueError, match=message):
                model.generate(prompt(), **{**GREEDY, **spec, **given})


@pytest.mark.parametrize(
    ("name", "rate"), [("gpt2", "resid_pdrop"), ("llama", "attention_dropout")]
)
def test_dropout_is_refused_as_it_would_draw_what_tokens_are_sampled_with(
    tiny: Tiny, name: str, rate: str
) -> None:
    config = copy.deepcopy(tiny(name).config)
    for own in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):
        setattr(config, own, 0.1 if own == rate else 0.0)
    assistant = type(tiny(name))(config)
    assistant.generation_config.eos_token_id = None
    sampled = {"do_sample": True, "top_k": 0, "max_new_tokens": 20}
    with pytest.raises(ValueError, match="is in training mode, with dropout: .*Call its eval()"):
        check_same(tiny("llama"), drafts(assistant.train()), prompt(), **sampled)
    check_same(tiny("llama"), drafts(assistant.eval()), prompt(), **sampled)
    setattr(assistant.config, rate, 0.0)
    without = type(tiny(name))(assistant.config)
    check_same(tiny("llama"), drafts(without.train()), prompt(), **sampled)


def test_assistants_in_wrappers_draft_as_their_models_do(tiny: Tiny, fresh: Tiny) -> None:
    """A `PeftModel`, whose LoRA drafts with it, and the wrapper of `torch.compile`."""
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    model, lora = tiny("llama"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    tuned = get_peft_model(fresh("llama"), lora).eval()
    merged = copy.deepcopy(tuned).merge_and_unload()

    def accepted(assistant: Any) -> float:
        check_same(model, drafts(assistant), **GIVEN["row"], **GREEDY)
        return hf_spec.last_stats(model).mean_accepted_tokens

    best, expected = accepted(model), accepted(merged)
    assert best > expected, "the LoRA must matter"
    assert accepted(tuned) == accepted(torch.compile(tuned, backend="eager")) == expected
    assert accepted(torch.compile(model, backend="eager")) == best
    prompts = get_peft_model(
        fresh("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(ValueError, match=r"PROMPT_TUNING: .*assistant_model=.*get_base_model\(\)"):
        accepted(prompts)
    assert accepted(prompts.get_base_model()) == best
