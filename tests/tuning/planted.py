"""A tiny model some of whose sublayers compute nothing, and costs that do not depend on timing."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, event
from tiny_checkpoint import make_model, make_tokenizer

from hf_spec.bench.prompts import Prompt
from hf_spec.tuning.layers.costs import Skip, StepCosts
from hf_spec.tuning.layers.study import Settings

LAYERS = 4
#: Their output projections are zero: leaving them out changes nothing and saves time.
PLANTED = Skip((1, 2), (0, 3))
PROMPTS = [Prompt("abab" * 4), Prompt("xyz xyz xyz"), Prompt("one two one")]
#: In units of a plain step; drafting costs 0.1 and 0.1 for each sublayer that is kept.
COSTS = StepCosts(
    verify={1: 1.0, 13: 1.12}, draft_base=0.1, layer=0.0, attention=(0.1,) * LAYERS,
    mlp=(0.1,) * LAYERS, draft_overhead=0.0, step_overhead=0.0, prefill=1.0, plain=1.0,
)  # fmt: skip
SETTINGS = Settings(max_new_tokens=12, max_draft=6, seed=1)


@event.listens_for(Engine, "connect")
def _without_waiting_for_the_disk(connection: Any, _: Any) -> None:
    """Most of a short search's time; it protects from power cuts, not from killed processes."""
    connection.execute("PRAGMA synchronous = OFF")


def planted_model() -> tuple[Any, Any]:
    model = make_model(seed=3, layers=LAYERS)
    for layer in PLANTED.attention:
        model.model.layers[layer].self_attn.o_proj.weight.data.zero_()
    for layer in PLANTED.mlp:
        model.model.layers[layer].mlp.down_proj.weight.data.zero_()
    # Sure of itself, so that the draft exit lets drafts grow long.
    model.lm_head.weight.data.mul_(8)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return model, make_tokenizer()
