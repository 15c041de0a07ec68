"""Flags of a model's config that only matter in training, as trainings leave them."""

import threading
from typing import Any

import pytest
import torch
from adapter_oracle import added, batch_of, random_answers
from conftest import Tiny, ragged
from running import drafting, one_of_each_kind

import hf_spec
from hf_spec.adapters.loading import find_active
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.methods.registry import methods

FLAGS = ("output_router_logits", "output_hidden_states", "output_attentions")


def with_adapter(model: Any, strategy: str) -> None:
    config = methods()[strategy].adapter_config
    if config is not None and strategy != "mtp":
        added(model, config())


def tokens(model: Any, strategy: str | None = None, **more: Any) -> list[list[int]]:
    spec = {} if strategy is None else drafting(strategy)
    if strategy == "layer_skip":
        spec["assistant_kwargs"] |= {"skip_attention": [1], "skip_mlp": []}
    out = model.generate(**ragged(), max_new_tokens=8, do_sample=False, **spec, **more)
    return out.tolist()


@pytest.mark.parametrize("strategy", one_of_each_kind())
def test_outputs_that_training_wants(fresh: Tiny, strategy: str) -> None:
    """A mixture of experts whose config asks for them: plain generation of a batch fails."""
    model: Any = fresh("mixtral", attention="eager")
    with_adapter(model, strategy)
    expected = tokens(model)
    for name in FLAGS:
        setattr(model.config, name, True)
    before = model.config.to_dict()
    assert tokens(model, strategy) == expected
    assert tokens(model, strategy, output_router_logits=True) == expected
    assert model.config.to_dict() == before


def test_flags_stay_for_others(fresh: Tiny) -> None:
    """Another thread's forward returns what the config asks for while a call runs."""
    model: Any = fresh("mixtral", attention="eager")
    for name in FLAGS:
        setattr(model.config, name, True)
    asked, found = threading.Event(), []

    def forward() -> None:
        while not asked.is_set():
            out = model(torch.arange(3, 8)[None])
            found.append(
                all(one is not None for one in (out.router_logits, out.hidden_states, out.aux_loss))
            )

    thread = threading.Thread(target=forward)
    thread.start()
    try:
        tokens(model, "prompt_lookup")
    finally:
        asked.set()
        thread.join()
    assert found and all(found)


#: Adapters whose losses run the base over trees, over texts, and with a cache of their own.
TRAINED = {
    "bita": hf_spec.BitaConfig, "ppd": hf_spec.PPDConfig, "space": hf_spec.SpaceConfig,
    "medusa": hf_spec.MedusaConfig, "dflash": hf_spec.DFlashConfig, "eagle3": hf_spec.Eagle3Config,
}  # fmt: skip


@pytest.mark.parametrize("strategy", TRAINED)
def test_losses_do_not_depend_on_flags(fresh: Tiny, strategy: str) -> None:
    model: Any = fresh("mixtral", attention="eager")
    added(model, TRAINED[strategy]())
    batch = TrainingBatch(**batch_of(random_answers(2, 16), num_anchors=3))

    def loss() -> float:
        torch.manual_seed(0)
        adapter = find_active(model, TRAINED[strategy].type_name)
        made = methods()[strategy].objective(model, adapter, batch)["loss"]
        made.backward()
        return float(made.detach())

    expected = loss()
    for name in FLAGS:
        setattr(model.config, name, True)
    assert loss() == expected
    model.gradient_checkpointing_enable()
    model.train()
    assert loss() == pytest.approx(expected, rel=1e-5)
