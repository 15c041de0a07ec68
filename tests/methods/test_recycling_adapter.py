"""A table of ``token_recycling`` as an adapter: written, loaded, where calls start."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, Tiny, check_same, prompt, ragged, shared
from peft import PeftModel, get_peft_model
from running import CAPTURED, drafting, proposals
from safetensors.torch import load_file, save_file
from torch import Tensor

import hf_spec
from hf_spec.adapters.checkpoint import WEIGHTS
from hf_spec.adapters.loading import find_active
from hf_spec.draft.drafter import Drafter
from hf_spec.methods.registry import methods
from hf_spec.predict.recycling import ORDERS, SuccessorTable, largest_prime, learned_table
from hf_spec.threads import forget

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
NAME = "token_recycling"


def drafts(model: Any, **options: Any) -> list[Any]:
    """All trees of a call."""
    with proposals(Drafter) as seen:
        model.generate(**ragged(), **GREEDY, **drafting(NAME, lookup=False, **options))
    return [tree.tokens.tolist() for _, tree in seen]


def tau(model: Any, **options: Any) -> float:
    model.generate(**ragged(), **GREEDY, **drafting(NAME, lookup=False, **options))
    return float(hf_spec.last_stats(model).tau)


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in tensors.items()}


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def learn(fresh: Tiny, folder: Path) -> Any:
    """A model that has learned from calls, after which its table was written."""
    model = fresh("llama")
    for _ in range(2):
        tau(model)
    hf_spec.save_table(model, folder)
    return model


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    learn(lambda name: copy.deepcopy(shared(name)), folder)
    return folder


@pytest.fixture
def table(written: Path, tmp_path: Path) -> Path:
    """The folder of what a model has learned from calls."""
    return shutil.copytree(written, tmp_path / "table")


@pytest.mark.parametrize("how", ["load_adapter", "PeftModel", "named"])
def test_another_process_drafts_as_the_one_that_learned(
    fresh: Tiny, tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "table"
    model = learn(fresh, folder)
    expected = drafts(model)
    other, options = fresh("llama"), {}
    if how == "load_adapter":
        other.load_adapter(str(folder))
    elif how == "PeftModel":
        other = PeftModel.from_pretrained(other, str(folder))
    else:
        options["adapter"] = str(folder)
    assert drafts(other, **options) == expected
    assert drafts(fresh("llama")) != expected, "an empty table drafts otherwise"


@pytest.mark.parametrize("how", [{}, CAPTURED], ids=["eager", "recorded"])
def test_it_learns_on_a_copy(fresh: Tiny, table: Path, how: dict[str, Any]) -> None:
    """Other prompts than those of the adapter are drafted better the second time."""
    model = fresh("llama")
    model.load_adapter(str(table))
    tensors = find_active(model, "TOKEN_RECYCLING").tensors()
    before, steps = copied(tensors), []
    spec = drafting(NAME, lookup=False, num_draft_tokens=7, max_depth=4) | how
    other = {"input_ids": prompt(9, seed=5), "max_new_tokens": 16, "do_sample": False}
    for _ in range(2):
        check_same(model, spec, **other)
        steps.append(hf_spec.last_stats(model).num_steps)
    assert steps[1] < steps[0]
    assert equal(find_active(model, "TOKEN_RECYCLING").tensors(), before)
    hot = learned_table(model)
    forget(model)
    check_same(model, spec, **other)
    assert hf_spec.last_stats(model).num_steps == steps[0] and learned_table(model) is not hot


def test_a_call_that_keeps_no_table_starts_from_the_adapter(fresh: Tiny, table: Path) -> None:
    model = fresh("llama")
    cold = tau(model, keep_table=False)
    model.load_adapter(str(table))
    assert tau(model, keep_table=False) == tau(model, keep_table=False) > 1.2 * cold


def test_sampled_output_is_that_of_the_model(fresh: Tiny, table: Path) -> None:
    model = fresh("llama")
    model.load_adapter(str(table))
    check_same(model, drafting(NAME), input_ids=prompt(), max_new_tokens=16, do_sample=True)


def test_stock_assisted_decoding_drafts_from_it(fresh: Tiny, table: Path) -> None:
    model, method = fresh("llama"), methods()[NAME]
    text = model.generate(**ragged(), **GREEDY)[0]
    model.load_adapter(str(table))
    drafter = method.make_drafter(model, method.parse_options({"max_depth": 7}))
    candidates, _ = drafter.get_candidates(text[None, :-8])
    assert candidates[0, -8:].tolist() == text[-8:].tolist()


def test_weights_that_are_loaded_in_its_place_are_used(
    fresh: Tiny, table: Path, tmp_path: Path
) -> None:
    """What was learned from the earlier ones is not mixed in."""
    model = PeftModel.from_pretrained(fresh("llama"), str(table))
    hot = tau(model)
    stored = load_file(table / WEIGHTS)
    contexts = next(name for name in stored if name.endswith("contexts"))
    save_file(stored | {contexts: torch.full_like(stored[contexts], -1)}, table / WEIGHTS)
    model.load_adapter(str(table), adapter_name="default")
    assert tau(model) == tau(fresh("llama")) < hot


def test_the_vocabulary_may_grow(fresh: Tiny, table: Path) -> None:
    """Contexts are tokens in the file, whatever their keys in a table are."""
    model = fresh("llama")
    model.resize_token_embeddings(VOCAB + 9, mean_resizing=False)
    cold = tau(model)
    model.load_adapter(str(table))
    assert tau(model) > 1.2 * cold


def test_log_probs_stay_bit_for_bit(fresh: Tiny, table: Path, tmp_path: Path) -> None:
    """Whatever the model's type is, and saved by PEFT, too."""
    stored = load_file(table / WEIGHTS)
    assert {one.dtype for one in stored.values()} == {torch.int32, torch.float16}
    model = PeftModel.from_pretrained(fresh("llama", dtype=torch.bfloat16), str(table))
    model.to(torch.float32).half().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "again")
    assert equal(load_file(tmp_path / "again" / WEIGHTS), stored)


def test_files_are_replaced_and_those_of_others_stay(fresh: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "table"
    model = learn(fresh, folder)
    hf_spec.SpecConfig(NAME, {"max_depth": 3}).save_pretrained(folder)
    (folder / "results.json").write_text("{}")
    hf_spec.save_table(model, str(folder))
    assert (folder / "results.json").is_file(), "the same table"
    model.generate(input_ids=prompt(9, 2, seed=5), **GREEDY, **drafting(NAME))
    hf_spec.save_table(model, folder)
    assert not (folder / "results.json").is_file(), "it was of another table"
    assert hf_spec.SpecConfig.from_pretrained(folder).assistant_kwargs == {"max_depth": 3}
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_facts"]["vocab_size"] == VOCAB and config["inference_mode"] is True
    assert config["num_entries"] == len(next(iter(load_file(folder / WEIGHTS).values())))
    assert not [*folder.glob(".*")], "nothing temporary is left"


def test_the_table_of_the_last_call_is_written(fresh: Tiny, tmp_path: Path) -> None:
    """Also that of a PeftModel, of a size of its own, and with what it started from."""
    model = fresh("llama")
    tau(model)
    hf_spec.save_table(model, tmp_path / "one")
    small = {"table_size": 1024}
    tau(model, **small)
    hf_spec.save_table(model, tmp_path / "two")
    one, two = (
        json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("one", "two")
    )
    assert (one["table_size"], two["table_size"]) == (1 << 17, 1024)
    wrapped = PeftModel.from_pretrained(fresh("llama"), str(tmp_path / "one"))
    wrapped.generate(input_ids=prompt(9, 2, seed=5), **GREEDY, **drafting(NAME))
    hf_spec.save_table(wrapped, tmp_path / "three")
    three = json.loads((tmp_path / "three" / "adapter_config.json").read_text())
    assert three["num_entries"] > one["num_entries"]


def test_what_cannot_be_written(fresh: Tiny, tmp_path: Path) -> None:
    model = fresh("llama")
    with pytest.raises(ValueError, match="LlamaForCausalLM has kept a table. First generate"):
        hf_spec.save_table(model, tmp_path / "new")
    tau(model, keep_table=False)
    with pytest.raises(ValueError, match="without keep_table=False"):
        hf_spec.save_table(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    for wrong in (None, b"model", 3):
        with pytest.raises(ValueError, match=r"save_table\(.*give the model that has generated"):
            hf_spec.save_table(wrong, tmp_path / "new")
        with pytest.raises(ValueError, match=r"save_table\(model, .*give a folder"):
            hf_spec.save_table(model, wrong or "")
    get_peft_model(fresh("llama"), hf_spec.MedusaConfig()).save_pretrained(tmp_path / "heads")
    before = (tmp_path / "heads" / WEIGHTS).read_bytes()
    tau(model)
    with pytest.raises(ValueError, match="holds an adapter of type MEDUSA.*Choose another folder"):
        hf_spec.save_table(model, tmp_path / "heads")
    assert (tmp_path / "heads" / WEIGHTS).read_bytes() == before


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"num_entries": 3}, "has shape"),
        ({"num_entries": 0}, "has shape"),  # not one that is sharded over processes
        ({"num_entries": 10**7}, "num_entries=10000000: must be .*of this table_size has no more"),
        ({"num_successors": 7}, "has shape"),
        ({"table_size": 3}, "table_size=3: must be a whole number from 1024"),
    ],
)
def test_configs_that_do_not_fit_their_weights(
    fresh: Tiny, table: Path, edit: dict[str, Any], message: str
) -> None:
    path, model = table / "adapter_config.json", fresh("llama")
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
    with pytest.raises(ValueError, match=message):
        model.load_adapter(str(table))
    with pytest.raises(ValueError, match=message):
        tau(model, adapter=str(table))


def test_tokens_that_no_model_has_are_left_out(fresh: Tiny, table: Path) -> None:
    """A broken file drafts nothing that the model has no row for."""
    stored = load_file(table / WEIGHTS)
    for name, tensor in stored.items():
        if tensor.dtype == torch.int32:
            tensor[::2, -1], tensor[1::4, -1], tensor[3::8, -2] = 2**31 - 1, -7, 5
            stored[name] = tensor
    save_file(stored, table / WEIGHTS)
    model = fresh("llama")
    model.load_adapter(str(table))
    check_same(model, drafting(NAME), **ragged(), **GREEDY)
    filled = learned_table(model)
    assert filled is not None and int(filled.successors.max()) < VOCAB


# -- entries, against a dictionary -----------------------------------------------------------------


def random_entries(seed: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    contexts = torch.randint(VOCAB, (count, ORDERS), generator=draw, dtype=torch.int32)
    shorter = torch.randint(ORDERS, (count,), generator=draw)
    contexts[torch.arange(ORDERS) < shorter[:, None]] = -1
    successors = torch.randint(VOCAB, (count, 8), generator=draw, dtype=torch.int32)
    return contexts, successors, -torch.rand(count, 8, generator=draw).half()


@pytest.mark.parametrize("size", [1, 7, 1000])  # one entry for all longer contexts, few, many
@pytest.mark.parametrize("seed", range(3))
def test_entries_are_those_that_were_entered_last(seed: int, size: int) -> None:
    given = random_entries(seed, 80)
    table = SuccessorTable(VOCAB, size, torch.device("cpu"))
    table.enter(*given)
    expected: dict[Any, Any] = {}
    for context, tokens, log_probs in zip(*(one.tolist() for one in given)):
        known = [token for token in context if token >= 0]
        key = sum(token * (VOCAB + 1) ** n for n, token in enumerate(reversed(known)))
        place = len(known), key if len(known) == 1 else key % largest_prime(size)
        expected[place] = context, tokens, log_probs
    found = zip(*(one.tolist() for one in table.entries()))
    assert sorted(found) == sorted(expected.values())


def test_contexts_that_reach_before_a_text_are_not_given_away() -> None:
    table = SuccessorTable(VOCAB, 100, torch.device("cpu"))
    outside = table.places(torch.tensor([[VOCAB, VOCAB, 5]]))
    table.keys[outside[1]] = outside[0]
    contexts, _, _ = table.entries()
    assert contexts.tolist() == [[-1, -1, 5]]


def test_a_table_with_fewer_successors_is_filled_up() -> None:
    contexts, successors, log_probs = random_entries(1, 5)
    table = SuccessorTable(VOCAB, 100, torch.device("cpu"))
    table.enter(contexts, successors[:, :3], log_probs[:, :3])
    _, tokens, found = table.entries()
    assert tokens.shape == found.shape == (5, 8)
    assert (found[:, 3:].exp() == 0).all() and found.isfinite().all()  # as files must be


def test_copies_of_a_model_learn_apart(fresh: Tiny, table: Path) -> None:
    model = fresh("llama")
    model.load_adapter(str(table))
    tau(model)
    other = copy.deepcopy(model)
    tau(other)
    assert learned_table(model) is not learned_table(other)
