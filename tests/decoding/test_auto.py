"""``assistant_strategy="auto"``: what it takes, and that it is what naming it would be."""

import json
from pathlib import Path

import pytest
import torch
from conftest import check_same
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import hf_spec
from hf_spec.decoding.call import choose

pytestmark = pytest.mark.usefixtures("mtp_as_shipped")

MTP = Path(__file__).parents[1] / "fixtures/drafters/mtp/qwen3/checkpoint"
IDS = torch.arange(1, 13)[None]


def taken(model, **kwargs) -> hf_spec.SpecStats:
    """Statistics of a call with auto, whose tokens are those of plain ``generate``."""
    rest = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 12}
    check_same(model, {"assistant_strategy": "auto", **kwargs}, IDS, **rest)
    stats = hf_spec.last_stats(model)
    assert stats is not None
    return stats


def test_look_ups_where_there_is_nothing_else(fresh):
    model = fresh("llama")
    assert taken(model).strategy == "token_recycling"
    choice = choose(model)
    assert choice.options == {} and "needs no adapter" in choice.reason
    assert set(choice.passed) == {"mtp"} and "not loaded from a checkpoint" in choice.passed["mtp"]


def test_an_assistant_comes_first(fresh, tiny):
    assert taken(fresh("llama"), assistant_model=tiny("llama")).strategy == "draft_model"


def test_an_active_adapter_comes_before_layers_of_the_checkpoint():
    model = AutoModelForCausalLM.from_pretrained(MTP, dtype=torch.float32)
    assert taken(model).strategy == "mtp" and choose(model).passed == {}
    model.add_adapter(hf_spec.MedusaConfig(num_heads=2))
    assert taken(model).strategy == "medusa" and choose(model).passed == {}
    model.disable_adapters()
    assert taken(model).strategy == "mtp"


def test_the_active_adapter_with_the_options_beside_it(fresh, tmp_path):
    folder = str(tmp_path)
    get_peft_model(fresh("llama"), hf_spec.MedusaConfig(num_heads=2)).save_pretrained(folder)
    options = {"tree": [[0]]}
    hf_spec.SpecConfig("medusa", options).save_pretrained(folder)
    model = fresh("llama")
    model.load_adapter(folder)
    stats = taken(model, assistant_kwargs={"drafting": "always", "lookup": False})
    assert stats.strategy == "medusa" and max(stats.offered) == 1
    assert choose(model).options == options
    given = {"drafting": "always", "lookup": False, "tree": [[0], [0, 0]]}
    own = taken(model, assistant_kwargs=given)
    assert max(own.offered) == 2, "options of the call replace stored ones"
    config = json.loads((tmp_path / "generation_config.json").read_text())
    config["assistant_strategy"] = "bita"  # of another strategy: no options for this one
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert choose(model).options == {}
    model.disable_adapters()
    assert taken(model).strategy == "token_recycling"


def test_an_adapter_that_does_not_draft_is_said_to_be_attached(fresh):
    """Transformers' ``active_adapters()`` names disabled ones, too."""
    model = fresh("llama")
    model.add_adapter(hf_spec.MedusaConfig(num_heads=2), "heads")
    model.disable_adapters()
    assert model.active_adapters() == ["heads"] and taken(model).strategy == "token_recycling"
    none = "it needs no adapter, and none is active; to activate 'heads', call "
    enable = "enable_adapters(), or leave the `disable_adapter` block"
    assert choose(model).reason == none + enable
    model.enable_adapters()
    model.add_adapter(LoraConfig(target_modules=["q_proj"]), "tuned")
    assert model.active_adapters() == ["tuned"] and taken(model).strategy == "token_recycling"
    assert choose(model).reason == none + "set_adapter(['tuned', 'heads'])"
    model.disable_adapters()
    assert choose(model).reason == none + enable + ", and call set_adapter('heads')"
    model.enable_adapters()
    model.set_adapter(["tuned", "heads"])
    assert choose(model).strategy == "medusa"


@pytest.mark.parametrize("deleted", ["one", "two"])
def test_an_adapter_is_not_activated_as_one_of_another_type_is_deleted(fresh, deleted):
    """As ``active_adapters()`` says, which looks at one type alone."""
    model = fresh("llama")
    model.add_adapter(hf_spec.MedusaConfig(num_heads=2), "one")
    model.add_adapter(hf_spec.BitaConfig(), "two")
    model.set_adapter(deleted)
    model.delete_adapter(deleted)
    assert model.active_adapters() == [] and choose(model).strategy == "token_recycling"
    (left,) = {"one", "two"} - {deleted}
    model.set_adapter(left)
    assert choose(model).strategy == {"one": "medusa", "two": "bita"}[left]


def test_adapters_of_two_strategies_are_refused(fresh):
    model = fresh("llama")
    model.add_adapter(hf_spec.MedusaConfig(num_heads=2), "one")
    model.add_adapter(hf_spec.BitaConfig(), "two")
    model.set_adapter(["one", "two"])
    with pytest.raises(ValueError, match=r"adapters of bita, medusa are active\. Name one"):
        model.generate(IDS, assistant_strategy="auto", max_new_tokens=4)


def test_a_config_that_is_kept(tmp_path, fresh):
    """Options are those of any strategy; the config of a call stays as it is."""
    for options, message in (
        ({"widt": 2}, r"strategy 'auto' has no option 'widt'"),
        ({"draftin": "always"}, r"no option 'draftin' \(did you mean 'drafting'\?\)"),
        ({"drafting": "never"}, "drafting='never': choose one of auto, always"),
    ):
        with pytest.raises(ValueError, match=message):
            hf_spec.SpecConfig("auto", options)
    with pytest.raises(ValueError, match="'token_recycling' has no option 'width'"):
        fresh("llama").generate(IDS, generation_config=hf_spec.SpecConfig("auto", {"width": 2}))
    hf_spec.SpecConfig("auto", {"drafting": "always"}).save_pretrained(tmp_path)
    config = hf_spec.SpecConfig.from_pretrained(tmp_path)
    model = fresh("llama")
    model.generate(IDS, generation_config=config, max_new_tokens=4)
    assert (config.assistant_strategy, config.assistant_kwargs) == ("auto", {"drafting": "always"})
    stats = hf_spec.last_stats(model)
    assert stats is not None and stats.strategy == "token_recycling"
