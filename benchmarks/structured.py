"""Output under a grammar, with its forced tokens drafted and without.

``python benchmarks/structured.py --model M [--libraries xgrammar,llguidance,outlines]
[--strategies plain,prompt_lookup,token_recycling,medusa] [--adapter A]``

Two tasks: ``record``, a JSON object of 20 fields, and ``tools``, calls of one of three tools. Each
is generated greedily with ``forced=False`` and with ``forced=True`` in turns, after a short call
of each; the outputs must be equal. ``token_recycling`` begins each call with an empty table. Times
are CPU seconds of the process (on CUDA: wall time), the least of all turns. Needs xgrammar,
llguidance and outlines: ``pip install --group programs``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_spec

_KINDS = {
    "text": {"type": "string", "maxLength": 24},
    "number": {"type": "string", "pattern": "^[0-9]{1,4}$"},  # outlines knows no bounds of numbers
    "flag": {"type": "boolean"},
    "level": {"enum": ["low", "medium", "high"]},
}
#: Fields of the record, by what they hold.
FIELDS = {
    "order_id": "number", "customer_name": "text", "email_address": "text", "phone_number": "text",
    "street_address": "text", "city": "text", "postal_code": "text", "country_code": "text",
    "product_name": "text", "quantity": "number", "unit_price": "number", "currency": "text",
    "discount_percent": "number", "shipping_method": "text", "express_delivery": "flag",
    "gift_wrapping": "flag", "payment_status": "level", "priority": "level",
    "expected_days": "number", "internal_comment": "text",
}  # fmt: skip
#: Tools with their arguments.
TOOLS = {
    "get_weather_forecast": {"city_name": "text", "number_of_days": "number"},
    "search_products": {"search_query": "text", "maximum_price": "number", "in_stock_only": "flag"},
    "create_reminder": {"reminder_text": "text", "hour_of_day": "number", "importance": "level"},
}
REQUESTS = [
    "What will the weather in Paris be on the next 3 days?",
    "Find running shoes for at most 80 dollars that are in stock.",
    "Remind me to water the plants at 18 o'clock, it is important.",
]


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": fields, "required": list(fields),
        "additionalProperties": False,
    }  # fmt: skip


def _schema(fields: dict[str, str]) -> dict[str, Any]:
    return _object({name: _KINDS[kind] for name, kind in fields.items()})


def tasks(tokenizer: Any) -> dict[str, tuple[dict[str, Any], list[Any]]]:
    """The schema and the prompts of each task."""
    calls = [
        _object({"name": {"const": name}, "arguments": _schema(fields)})
        for name, fields in TOOLS.items()
    ]
    told = f"Answer with a call of one of these tools as JSON: {json.dumps(TOOLS)}"
    chats = [
        [{"role": "system", "content": told}, {"role": "user", "content": request}]
        for request in REQUESTS
    ]
    order = "Write an order of a bookshop as JSON with these fields: " + ", ".join(FIELDS)
    chats.append([{"role": "user", "content": order}])
    encoded = [
        tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        for chat in chats
    ]
    return {"record": (_schema(FIELDS), encoded[-1:]), "tools": ({"anyOf": calls}, encoded[:-1])}


def maker(library: str, model: Any, tokenizer: Any, schema: dict[str, Any]) -> Callable[[], Any]:
    """Makes processors for JSON of a schema without whitespace, each for one call."""
    size = model.config.vocab_size
    if library == "xgrammar":
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
        grammar = xgrammar.GrammarCompiler(info).compile_json_schema(
            json.dumps(schema), any_whitespace=False, separators=(",", ":")
        )
        return lambda: xgrammar.contrib.hf.LogitsProcessor(grammar)
    import outlines
    from outlines.backends import get_json_schema_logits_processor
    from outlines.backends.llguidance import LLGuidanceLogitsProcessor

    if library == "llguidance":
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        compact = {"whitespace_flexible": False}
        rules = LLMatcher.grammar_from_json_schema(schema, overrides=compact)
        known = from_tokenizer(tokenizer, n_vocab=size)
        return lambda: LLGuidanceLogitsProcessor(rules, known, "torch")
    processor = get_json_schema_logits_processor(
        "outlines_core", outlines.from_transformers(model, tokenizer), json.dumps(schema),
        whitespace_pattern="",
    )  # fmt: skip

    def again() -> Any:
        processor.reset()
        return processor

    return again


def measure(
    model: Any, prompts: list[Any], make: Callable[[], Any], length: int, **spec: Any
) -> tuple[list[list[int]], float, float]:
    """The outputs, tokens per step, and seconds."""
    outputs, steps, tokens, seconds = [], 0, 0, 0.0
    clock = time.perf_counter if model.device.type == "cuda" else time.process_time
    for prompt in prompts:
        processor, begun = make(), clock()
        found = model.generate(
            prompt.to(model.device), max_new_tokens=length, do_sample=False,
            logits_processor=[processor], **spec,
        )  # fmt: skip
        outputs.append(found[0].tolist())
        seconds += clock() - begun
        if spec:
            stats = hf_spec.last_stats(model)
            assert stats is not None
            steps, tokens = steps + stats.num_steps, tokens + stats.num_generated_tokens
    return outputs, tokens / max(steps, 1), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter", help="folder of an adapter that drafts")
    parser.add_argument("--libraries", default="xgrammar,llguidance,outlines")
    parser.add_argument("--strategies", default="plain,prompt_lookup")
    parser.add_argument("--tasks", default="record,tools")
    parser.add_argument("--length", type=int, default=300, help="max_new_tokens")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    model = model.eval().to(given.device)
    if given.adapter:
        model.load_adapter(given.adapter)
    print("| library | task | strategy | tokens | tau without | with | s without | with | speed |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for library in given.libraries.split(","):
        for task in given.tasks.split(","):
            schema, prompts = tasks(tokenizer)[task]
            make = maker(library, model, tokenizer, schema)
            measure(model, prompts[:1], make, 8)
            for name in given.strategies.split(","):
                taus, outputs, times = {}, {}, {False: [], True: []}
                options = {"keep_table": False} if name == "token_recycling" else {}
                for turn in range(1 + given.turns):
                    for on in times:
                        outputs[on], taus[on], seconds = measure(
                            model, prompts, make, given.length if turn else 8,
                            assistant_strategy=name, assistant_kwargs={"forced": on, **options},
                        )  # fmt: skip
                        if turn:
                            times[on].append(seconds)
                    assert outputs[True] == outputs[False]
                tokens = sum(map(len, outputs[True])) - sum(one.shape[1] for one in prompts)
                before, after = min(times[False]), min(times[True])
                print(
                    f"| {library} | {task} | {name} | {tokens} | {taus[False]:.2f} "
                    f"| {taus[True]:.2f} | {before:.1f} | {after:.1f} | {before / after:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
