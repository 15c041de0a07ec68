"""What the adapters of every method must do, with all parameters that they may have."""

import copy
import gc
import json
import pickle
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapter_oracle
import pytest
import torch
from adapter_oracle import hooked, load, randomise
from conftest import Tiny, check_same, prompt, ragged, shared
from covering import covering
from method_variants import SHARED, VARIANTS, Variants
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from running import configured, drafting
from safetensors.torch import load_file, save_file
from tiny_checkpoint import make_model
from torch import Tensor
from torch.nn import functional
from trained import TRAININGS
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import hf_spec
from hf_spec.adapters import loading
from hf_spec.adapters.checkpoint import WEIGHTS, read_weights
from hf_spec.adapters.config import PredictingConfig
from hf_spec.adapters.loading import find_active
from hf_spec.adapters.tuner import random_anchors
from hf_spec.methods.registry import methods
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.predict.network import LevelPredictor
from hf_spec.threads import forget
from hf_spec.tools.hub import write_card

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
METHODS = {name: method for name, method in methods().items() if method.adapter_config}
#: Fields of configs, by method and name.
CONFIGS = {
    (name, kind): fields
    for name in METHODS
    for kind, fields in VARIANTS.get(name, Variants({})).configs.items()
}
CONFIGS |= {
    (name, "shared"): SHARED
    for name, method in METHODS.items()
    if issubclass(method.adapter_config, PredictingConfig)
}
#: Those that gradients train.
TRAINED = [name for name, method in METHODS.items() if method.objective]
NEEDED = [name for name, method in METHODS.items() if method.needs_adapter]
#: Those whose adapters predict a certain number of future tokens.
LIMITED = [name for name in NEEDED if not issubclass(METHODS[name].declares, LevelPredictor)]

every_config = pytest.mark.parametrize(("name", "kind"), CONFIGS)


def first_kind(name: str) -> str:
    return next(kind for method, kind in CONFIGS if method == name)


def config_of(name: str, kind: str | None = None) -> Any:
    """The config of this name, or the first one."""
    kind = kind or first_kind(name)
    config_class: Any = METHODS[name].adapter_config
    return config_class(**CONFIGS[name, kind])


def added(
    model: Any, name: str, kind: str | None = None, adapter: str = "default", seed: int = 1
) -> dict[str, Tensor]:
    """Add an adapter of random parameters and activate it; returns these."""
    return adapter_oracle.added(model, config_of(name, kind), adapter, seed=seed).tensors()


def active(model: Any, name: str) -> Any:
    return find_active(model, config_of(name).type_name)


def tokens(model: Any, name: str | None = None, **options: Any) -> list[list[int]]:
    spec = {} if name is None else drafting(name, **options)
    return model.generate(**ragged(), **GREEDY, **spec).tolist()


def batch(rows: int = 2) -> dict[str, Tensor]:
    ids = prompt(12, rows)
    labels = ids.clone()
    labels[:, :4] = -100
    return {"input_ids": ids, "labels": labels, "anchors": torch.tensor([[3, 7], [5, 8]][:rows])}


@pytest.fixture(scope="module")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    shared("llama").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("name", "kind"), covering(CONFIGS, lambda name, kind: [name]))
def test_named_by_a_call(base_path: str, tmp_path: Path, name: str, kind: str) -> None:
    """It drafts as if it were attached, and the model does not know of it."""
    attached = load(base_path)
    added(attached, name, kind)
    attached.save_pretrained(tmp_path)
    model = load(base_path)
    before = {key: (one.data_ptr(), one.requires_grad) for key, one in model.named_parameters()}
    if attached.peft_config["default"].changes_model:
        with pytest.raises(ValueError, match="changes the model's weights.*load_adapter"):
            tokens(model, name, adapter=str(tmp_path))
        return
    tokens(attached, name)
    theirs = hf_spec.last_stats(attached)
    for strategy in (name, "auto"):
        spec = {**drafting(name, adapter=str(tmp_path)), "assistant_strategy": strategy}
        forget(model)  # what the call before has learned
        check_same(model, spec, **ragged(), **GREEDY)
        ours = hf_spec.last_stats(model)
        assert ours.strategy == name and ours.num_drafted_tokens == theirs.num_drafted_tokens
        assert ours.accepted_histogram == theirs.accepted_histogram
    now = {key: (one.data_ptr(), one.requires_grad) for key, one in model.named_parameters()}
    assert now == before and not hasattr(model, "peft_config") and not model._hf_peft_config_loaded
    named = find_active(model, config_of(name).type_name, str(tmp_path))
    dead = [weakref.ref(one) for one in (named, *named.parameters(), *named.buffers())]
    del named
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match="cannot read adapter="):
        tokens(model, name, adapter=str(tmp_path))
    gc.collect()
    assert not [one for one in dead if one() is not None], "what is kept for a folder follows it"
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None, "what is kept for a model does not keep it"


def test_folders_of_named_adapters_change(
    base_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read again then, and some are kept."""
    read, folders = [], [tmp_path / str(number) for number in range(loading.NAMED + 1)]

    def counted(path: Path) -> Any:
        read.append(path.parent)
        return read_weights(path)

    monkeypatch.setattr(loading, "read_weights", counted)
    model = load(base_path)
    for number, folder in enumerate(folders):
        get_peft_model(load(base_path), config_of("medusa")).save_pretrained(folder)
        for _ in range(2):
            tokens(model, "medusa", adapter=str(folder))
        tokens(model, "medusa", adapter=str(folders[0]))  # is not the one that goes
        assert read == folders[: number + 1]
    tokens(model, "medusa", adapter=str(folders[1]))
    assert read.pop() == folders[1] and read == folders, "it was dropped"
    attached = load(base_path)
    added(attached, "ppd")
    shutil.rmtree(folders[0])
    attached.save_pretrained(folders[0])
    check_same(model, drafting("ppd", adapter=str(folders[0])), **ragged(), **GREEDY)
    with pytest.raises(ValueError, match="is of type PPD, one of MEDUSA is needed"):
        tokens(model, "medusa", adapter=str(folders[0]))
    weights = load_file(folders[0] / WEIGHTS)
    floats = [name for name, one in weights.items() if one.is_floating_point()]
    save_file(weights | {name: weights[name].fill_(0.5) for name in floats}, folders[0] / WEIGHTS)
    tokens(model, "ppd", adapter=str(folders[0]))
    found = find_active(model, "PPD", str(folders[0])).tensors().values()
    assert all((one == 0.5).all() for one in found if one.is_floating_point())
    model.resize_token_embeddings(40)
    with pytest.raises(ValueError, match="vocab_size"):
        tokens(model, "ppd", adapter=str(folders[0]))
    shutil.rmtree(folders[0])
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        tokens(model, "ppd", adapter=str(folders[0]))


def test_reading_an_adapter_draws_no_numbers(base_path: str, tmp_path: Path) -> None:
    """A seed gives the same tokens also in the first call that names it."""
    get_peft_model(load(base_path), config_of("medusa")).save_pretrained(tmp_path)
    spec = drafting("medusa", adapter=str(tmp_path))
    check_same(load(base_path), spec, input_ids=prompt(), do_sample=True)


def test_names_of_adapters_that_do_not_fit(base_path: str, tmp_path: Path) -> None:
    model = load(base_path)
    get_peft_model(load(base_path), config_of("medusa")).save_pretrained(tmp_path / "heads")
    get_peft_model(load(base_path), LoraConfig()).save_pretrained(tmp_path / "lora")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text("{")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "adapter_config.json").write_text('{"peft_type": "ALIEN"}')
    wrong = {
        "propd": ("broken", "cannot read adapter='.*broken': '.*adapter_config.json' is not JSON"),
        "ppd": ("newer", "cannot read adapter='.*newer': KeyError: 'ALIEN'"),
        "bita": ("heads", r"of type MEDUSA, one of BITA is needed: name the strategy 'medusa'"),
        "medusa": ("lora", r"of type LORA: it drafts nothing\. Attach it"),
        "prompt_lookup": ("heads", "no option 'adapter': it needs no adapter. Name .* or 'auto'"),
        "auto": ("none", "there is no such folder"),
    }
    for name, (folder, message) in wrong.items():
        spec = {**drafting("medusa", adapter=str(tmp_path / folder)), "assistant_strategy": name}
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            model.generate(**ragged(), **GREEDY, **spec)
    with pytest.raises(ValueError, match="adapter=3: give an adapter's folder.* as a string"):
        tokens(model, "medusa", adapter=3)


@every_config
def test_saved_and_loaded_every_way(base_path: str, tmp_path: Path, name: str, kind: str) -> None:
    model = load(base_path)
    weights = {key: value.clone() for key, value in added(model, name, kind).items()}
    expected = tokens(model)
    folder = tmp_path / "adapter"
    model.save_pretrained(folder)
    stored = json.loads((folder / "adapter_config.json").read_text())
    assert stored["peft_type"] == config_of(name).type_name
    assert stored.items() >= {**CONFIGS[name, kind]}.items()
    assert len(load_file(folder / "adapter_model.safetensors")) == len(weights)

    def itself(loaded: Any) -> Any:
        loaded.load_adapter(str(folder), adapter_name="other")
        return loaded

    def wrapped(**kwargs: Any) -> Any:
        return PeftModel.from_pretrained(load(base_path), str(folder), **kwargs)

    ways: list[Callable[[], Any]] = [
        lambda: itself(AutoModelForCausalLM.from_pretrained(base_path, device_map={"": "cpu"})),
        wrapped,
        lambda: wrapped(low_cpu_mem_usage=True),
        lambda: pickle.loads(pickle.dumps(wrapped(is_trainable=True))),
        lambda: AutoPeftModelForCausalLM.from_pretrained(str(folder)),
        lambda: itself(load(base_path)),
    ]
    # By which way weights come has to do with the method, not with its config.
    for way in ways if kind == first_kind(name) else ways[-1:]:
        loaded = way()
        found = active(loaded, name).tensors()
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[key], value) for key, value in weights.items())
    assert tokens(loaded) == expected
    config = hf_spec.SpecConfig.from_pretrained(folder, **GREEDY)
    assert config.assistant_strategy == name
    assert loaded.generate(**ragged(), **configured(config)).tolist() == expected


@pytest.mark.parametrize("name", METHODS)
def test_in_bfloat16(fresh: Tiny, tmp_path: Path, name: str) -> None:
    """PEFT keeps what it trains of a bf16 model in fp32; a base that adds it itself takes its type.
    Log-probabilities are in fp16."""
    model = fresh("llama", dtype=torch.bfloat16)
    wrapped = get_peft_model(fresh("llama", dtype=torch.bfloat16), config_of(name))
    randomise(wrapped, config_of(name).type_name)
    wrapped.save_pretrained(tmp_path)
    added(model, name)
    loaded = fresh("llama", dtype=torch.bfloat16)
    loaded.load_adapter(str(tmp_path))
    for one, dtype in ((wrapped, "float32"), (model, "bfloat16"), (loaded, "bfloat16")):
        kinds = {w.dtype for w in active(one, name).tensors().values() if w.is_floating_point()}
        assert kinds == {getattr(torch, dtype if name in TRAINED else "float16")}
        assert one.generate(**ragged(), **GREEDY, **drafting(name)).shape == (3, 12 + 8)
    if name not in TRAINED:
        with pytest.raises(ValueError, match="are not trained with `anchors`"):
            wrapped(**batch())
        return
    loss = wrapped(**batch())["loss"]
    assert loss.dtype == torch.float32 and loss.isfinite()
    loss.backward()


@pytest.mark.parametrize(
    ("name", "kind", "architecture"),
    covering(
        [
            (*case, base)
            for case, fields in CONFIGS.items()
            if case[0] in TRAINED
            for base in ("llama", "gemma2", "gpt2", "mixtral")
            if base == "llama" or "draft_target_modules" not in fields  # which are llama's
            # Whose layers for multi-token prediction would not be like theirs.
            if case[0] != "mtp" or base != "gpt2"
        ],
        lambda name, kind, base: [(name, kind), (name, base)],
    ),
)
def test_gradients_reach_the_adapter_alone(
    fresh: Tiny, name: str, kind: str, architecture: str
) -> None:
    model = get_peft_model(fresh(architecture), config_of(name, kind))
    weights = randomise(model, config_of(name).type_name)
    model.print_trainable_parameters()
    assert model.get_model_status().enabled is True
    out = model(**batch())
    out["loss"].backward()
    assert out["logits"].shape[:2] == out["labels"].shape[:2] == (2, 2)
    learned = {id(w) for w in weights.values() if w.is_floating_point()}
    for key, parameter in model.named_parameters():
        moved = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert moved == parameter.requires_grad == (id(parameter) in learned), key


@pytest.mark.parametrize("name", TRAINED)
def test_labels_without_anchors_train(fresh: Tiny, name: str) -> None:
    """The loss is that of anchors before two labels; in evaluation it is the base's."""
    ids, mask = prompt(12, 2), torch.ones(2, 12, dtype=torch.long)
    labels = ids.clone()
    labels[:, :4] = labels[1, 9:] = -100
    mask[1, 9:] = 0
    plain: dict[str, Any] = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    # All such places, and the last column where there are fewer.
    anchors = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 6, 11, 11, 11]])
    model = get_peft_model(fresh("llama"), config_of(name, first_kind(name))).train()
    randomise(model, config_of(name).type_name)
    torch.manual_seed(0)
    torch.rand(labels.shape)  # what draws the anchors
    expected = model(**plain, anchors=anchors)["loss"]
    torch.manual_seed(0)
    # Of two such batches, 26 labels, this is one half.
    found = model(**plain, use_cache=False, num_items_in_batch=torch.tensor(26))["loss"]
    torch.testing.assert_close(found, expected / 2)
    found.backward()
    with pytest.raises(ValueError, match="position_ids among the inputs of a training step"):
        model(**plain, position_ids=mask.cumsum(-1))
    with torch.no_grad():
        assert model(**plain).logits.shape[:2] == model.eval()(**plain).logits.shape[:2] == (2, 12)


def test_accumulated_batches_are_averaged(fresh: Tiny, tmp_path: Path) -> None:
    """As by a Trainer of one's own, which adds up what it is given; logged losses, too."""
    places, found = torch.tensor([2, 5, 8]), []
    rows = [{"input_ids": ids, "labels": ids, "anchors": places} for ids in prompt(12, 4)]
    for parts in (1, 2, 4):
        torch.manual_seed(0)
        config = hf_spec.MedusaConfig(num_heads=2, draft_vocab_size=0)
        model = get_peft_model(fresh("llama"), config)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4 // parts,
            gradient_accumulation_steps=parts, optim="sgd", learning_rate=0.1, max_grad_norm=1.0,
            logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
            remove_unused_columns=False,
        )  # fmt: skip
        training = Trainer(model, arguments, train_dataset=rows)
        training.train()
        (entry,) = [one for one in training.state.log_history if "loss" in one]
        found.append((entry, active(model, "medusa").tensors()))
    for entry, weights in found[1:]:
        assert entry["loss"] == pytest.approx(found[0][0]["loss"], rel=1e-4)
        assert entry["grad_norm"] == pytest.approx(found[0][0]["grad_norm"], rel=1e-4)
        for key, one in weights.items():
            torch.testing.assert_close(one, found[0][1][key])


def test_labels_are_for_another_adapter_that_is_trained(fresh: Tiny) -> None:
    model = fresh("llama")
    model.add_adapter(config_of("medusa"), "drafts")
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"])).train()
    ids = prompt(12, 2)
    assert wrapped(input_ids=ids, labels=ids).logits.shape[:2] == (2, 12)


@pytest.mark.parametrize("count", [1, 3, 50])
def test_anchors_are_drawn_before_two_labels(count: int) -> None:
    labels = torch.tensor([[-100, 1, 2, 3, 4, -100, 5], [-100, -100, 1, 2, -100, -100, 3]])
    fit = [{0, 1, 2}, {1}]
    for seed in range(20):
        torch.manual_seed(seed)
        drawn = random_anchors(labels, count)
        for row, places in zip(drawn.tolist(), fit):
            assert row == sorted(row) and {*row} - {6} <= places
            assert len({*row} - {6}) == min(count, len(places))


@pytest.mark.parametrize("training", [name for name in TRAININGS if name != "full"])
def test_trained(trained: Callable[[str], Path], tmp_path: Path, training: str) -> None:
    """What ``hf-spec train`` writes loads, drafts and has a card."""
    folder, model = shutil.copytree(trained(training), tmp_path / "adapter"), make_model()
    name, ids = TRAININGS[training][0], torch.tensor([[4, 5, 6, 7, 4, 5]])
    base = model.generate(ids, **GREEDY).tolist()
    model.load_adapter(str(folder))
    plain = model.generate(ids, **GREEDY).tolist()
    assert (plain == base) == (training != "lora")
    assert all(weight.isfinite().all() for weight in active(model, name).tensors().values())
    config = hf_spec.SpecConfig.from_pretrained(folder, **GREEDY)
    out = model.generate(ids, **configured(config))
    assert out.tolist() == plain
    assert hf_spec.last_stats(model).num_drafted_tokens > 0
    card = write_card(folder).read_text()
    assert f"| strategy | `{name}` |" in card


@pytest.mark.parametrize("name", METHODS)
def test_switched_copied_disabled_and_deleted(fresh: Tiny, name: str) -> None:
    model = fresh("llama")
    base, kinds = tokens(model), [kind for method, kind in CONFIGS if method == name]
    kinds, held = [*dict.fromkeys([kinds[0], kinds[-1]])], {}
    for seed, kind in enumerate(kinds, 1):
        held[kind] = added(model, name, kind, kind, seed), tokens(model)
    other = copy.deepcopy(model)
    randomise(other, config_of(name).type_name, seed=3)
    for kind in (*kinds, kinds[0]):
        model.set_adapter(kind)
        weights, expected = held[kind]
        assert active(model, name).name == kind
        assert all(torch.equal(active(model, name).tensors()[k], w) for k, w in weights.items())
        assert tokens(model, name) == expected
    *others, last = kinds
    for kind in others:
        model.delete_adapter(kind)
    model.set_adapter(last)
    assert tokens(model, name) == held[last][1]
    assert tokens(other) == tokens(other, name)
    model.disable_adapters()
    assert tokens(model) == base
    if METHODS[name].needs_adapter:
        with pytest.raises(ValueError, match=f"active adapter of type {config_of(name).type_name}"):
            tokens(model, name)
    model.enable_adapters()
    model.delete_adapter(last)
    assert tokens(model) == base and hooked(model) == 0


@pytest.mark.parametrize("name", METHODS)
def test_a_conversation_goes_on(fresh: Tiny, name: str) -> None:
    """Rows of different lengths; the cache has no trace of drafts or of the adapter's."""
    model = fresh("llama")
    added(model, name)
    mask = functional.pad(ragged()["attention_mask"], (0, 8 + 5), value=1)
    spec = {**drafting(name), "return_dict_in_generate": True}
    first = model.generate(**ragged(), **GREEDY, **spec)
    ids = torch.cat([first.sequences, prompt(5, 3, seed=7)], dim=1)
    given = {"input_ids": ids, "attention_mask": mask, **GREEDY}
    check_same(model, {**drafting(name), CACHE: first[CACHE]}, **given)
    check_same(model, {**drafting(name), "prefill_chunk_size": 4}, **given)


@pytest.mark.parametrize("name", LIMITED)
def test_trees_deeper_than_the_adapter(fresh: Tiny, name: str) -> None:
    model = fresh("llama")
    added(model, name)
    with pytest.raises(ValueError, match=r"max_depth=99: .* The adapter predicts no more"):
        tokens(model, name, max_depth=99)
    with pytest.raises(ValueError, match=r"paths of 9 ranks, \d future tokens"):
        tokens(model, name, tree=[[0] * length for length in range(1, 10)])


@pytest.mark.parametrize("name", [name for name in NEEDED if name not in LIMITED])
def test_static_trees_of_drafters_that_grow_each_tree(fresh: Tiny, name: str) -> None:
    model = fresh("llama")
    added(model, name)
    with pytest.raises(ValueError, match=r"tree=\[\[0\]\]: choose one of"):
        tokens(model, name, tree=[[0]])


@pytest.mark.parametrize("name", METHODS)
def test_an_adapter_of_another_base(fresh: Tiny, name: str) -> None:
    model = fresh("llama")
    added(model, name)
    with pytest.raises(ValueError, match=r"llama.*gpt2|gpt2.*llama"):
        fresh("gpt2").add_adapter(model.peft_config["default"])
