"""``pack_weights``: the same tokens, copies that follow the weights, and what is refused."""

import copy
import gc
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Tiny, prompt, ragged
from test_compiled import CAPTURED, adapt, compiled, generate, strategy

from hf_spec import pack_weights
from hf_spec.methods.eagle3 import Eagle3Adapter
from hf_spec.modeling_patches.modules import decoder_layers
from hf_spec.modeling_patches.per_call import Changes
from hf_spec.target import packed_weights as packing

pytestmark = pytest.mark.instructions


class Unpacked(packing._Copy):
    """A copy that no instructions are needed for."""

    def __init__(self, *weights: torch.Tensor):
        self.weights = [weight.detach() for weight in weights]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each product with a packed weight; small weights are packed, too."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN, which packs weights")
    seen: list[int] = []

    def counted(copy: Any, inputs: torch.Tensor, bias: Any) -> torch.Tensor:
        seen.append(inputs.numel() // inputs.shape[-1])
        return product(copy, inputs, bias)

    product = packing._Copy.product
    monkeypatch.setattr(packing, "SMALLEST", dict.fromkeys(packing.SMALLEST, 1))
    monkeypatch.setattr(packing._Copy, "product", counted)
    return seen


def calls(**options: Any) -> list[dict[str, Any]]:
    """An eager call, and a captured one."""
    eager = strategy("prompt_lookup", **options)
    return [eager, {**eager, **CAPTURED}]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_same_tokens(shallow: Tiny, used: list[int], architecture: str) -> None:
    model, inputs = shallow(architecture), ragged((12, 5))
    plain, made = generate(model, inputs).sequences, []
    for packs in (False, True, False):
        assert (pack_weights(model, packs) > 0) == packs
        for kwargs in calls():
            output = generate(model, inputs, **kwargs)
            assert torch.equal(output.sequences, plain)
            # gpt2 has Conv1D instead of linear layers, but for the head.
            assert bool(used and max(used) > 2) == packs, "products of trees must use the copies"
            used.clear()
        made.append(compiled(output)["made"] > 0)
        assert torch.equal(generate(model, inputs).sequences, plain)
        assert not used, "plain generation must not"
    assert made == [True, True, False], "code with copies and code without are kept side by side"


def test_models_and_files_are_as_they_were(shallow: Tiny, used: list[int], tmp_path: Any) -> None:
    used_before, inputs = shallow(), prompt()
    # A model without hooks: those that Transformers gives to models of other tests are not pickled.
    model: Any = type(used_before)(used_before.config).eval()
    names = [*model.state_dict()]
    pack_weights(model)
    plain = generate(model, inputs, **calls()[0]).sequences
    assert used and [*model.state_dict()] == names
    model.save_pretrained(tmp_path)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)),
                  type(model).from_pretrained(tmp_path)):  # fmt: skip
        used.clear()
        assert torch.equal(generate(other, inputs, **calls()[0]).sequences, plain) and not used


def test_weights_that_change(shallow: Tiny, used: list[int]) -> None:
    model, inputs = shallow(), prompt()
    head = model.get_output_embeddings()
    pack_weights(model)
    for kwargs in calls():
        generate(model, inputs, **kwargs)
    for change in (
        lambda: head.weight.data.mul_(-1.0),  # as PEFT merges
        lambda: head.weight.copy_(head.weight.roll(1, 0)),
        lambda: setattr(head, "weight", torch.nn.Parameter(head.weight.roll(1, 0))),
    ):
        before = generate(model, inputs).sequences
        with torch.no_grad():
            change()
        plain = generate(model, inputs).sequences
        assert not torch.equal(plain, before)
        for kwargs in calls():
            used.clear()
            assert torch.equal(generate(model, inputs, **kwargs).sequences, plain) and used
    model.to(torch.float64)  # which is not packed
    used.clear()
    plain = generate(model, inputs).sequences
    assert torch.equal(generate(model, inputs, **calls()[0]).sequences, plain) and not used


def test_modules_with_a_forward_of_their_own_are_not_packed(
    shallow: Tiny, used: list[int]
) -> None:  # fmt: skip
    model, inputs = shallow(), prompt()
    size, before = pack_weights(model), generate(model, inputs).sequences
    head = model.get_output_embeddings()
    for _ in range(2):  # the second one after calls with the copies
        inside = head.forward
        head.forward = lambda hidden, inside=inside: -inside(hidden)
        plain = generate(model, inputs).sequences
        for kwargs in calls():
            assert torch.equal(generate(model, inputs, **kwargs).sequences, plain) and used
        assert pack_weights(model) == size - head.weight.nbytes
        assert not torch.equal(plain, before)
        head.forward = inside
        for kwargs in calls():
            assert torch.equal(generate(model, inputs, **kwargs).sequences, before)
        assert pack_weights(model) == size


def test_copies_are_shared_and_freed(fresh: Tiny, used: list[int]) -> None:
    model = fresh("llama")
    model.set_output_embeddings(model.get_output_embeddings())
    embedding = model.get_input_embeddings()
    before, size = len(packing._COPIES), pack_weights(model)
    linears = [x.weight for x in model.modules() if type(x) is torch.nn.Linear]
    assert size == sum(weight.nbytes for weight in linears)
    (first,) = packing.packed_weights(model)
    assert packing.packed_weights(model) == [first] and pack_weights(model) == size
    model.get_output_embeddings().weight = embedding.weight  # tied: a copy, not a third one
    (second,) = packing.packed_weights(model)
    assert second is not first
    del first
    assert len(packing._COPIES) == before + len(second.groups)
    del second
    pack_weights(model, False)
    assert len(packing._COPIES) == before and not packing.packed_weights(model)
    pack_weights(model)
    assert len(packing._COPIES) > before
    del model, embedding, linears
    gc.collect()
    assert len(packing._COPIES) == before


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "stablelm", "gpt2"])
def test_queries_keys_and_values_are_one_product(
    fresh: Tiny, used: list[int], architecture: str
) -> None:
    """Also with biases, in captured code, and where an input is changed or repeated."""
    model = fresh(architecture)
    pack_weights(model)
    (parts,) = packing.packed_weights(model)
    joint = [group for group in parts.groups if len(group) > 1]
    assert len(joint) == (0 if architecture == "gpt2" else len(decoder_layers(model)))
    if not joint:
        return
    plain = generate(model, prompt()).sequences
    for kwargs in calls():
        assert torch.equal(generate(model, prompt(), **kwargs).sequences, plain)
    changes, (query, key, value) = Changes(), joint[0]
    parts.add_to(changes)
    inputs = torch.randn(2, 3, query.in_features)

    @torch.no_grad()
    def mixed() -> list[torch.Tensor]:
        used.clear()
        found = [query(inputs), key(inputs)]
        inputs.add_(1.0)
        return [*found, value(inputs), value(inputs.clone()), query(inputs)]

    start = inputs.clone()
    found, number = changes.run(mixed), len(used)
    wanted = torch.nn.functional.linear
    each = [(query, start), (key, start), (value, inputs), (value, inputs), (query, inputs)]
    for one, (module, given) in zip(found, each):
        torch.testing.assert_close(one, wanted(given, module.weight, module.bias))
    assert number == 4  # the second one is ready, and the last one is not, after another input
    with torch.inference_mode():
        frozen = torch.randn(2, 3, query.in_features)
        used.clear()
        both = changes.run(lambda: (query(frozen), key(frozen), value(frozen)))
        torch.testing.assert_close(both[2], wanted(frozen, value.weight, value.bias))
    assert len(used) == 1


@pytest.mark.parametrize("name", ["eagle3", "draft_model"])
def test_drafts_take_them(
    shallow: Tiny, used: list[int], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = shallow()
    plain = generate(model, prompt()).sequences
    call = strategy(name, max_depth=2)
    drafter = call.get("assistant_model")
    if drafter is None:
        adapt(model, name)
        drafter = next(module for module in model.modules() if isinstance(module, Eagle3Adapter))
    own = {weight.data_ptr() for weight in drafter.parameters()}
    inside: list[bool] = []
    counted = packing._Copy.product

    def seen(copy: Any, inputs: torch.Tensor, bias: Any) -> torch.Tensor:
        inside.append(copy.weights[0].data_ptr() in own)
        return counted(copy, inputs, bias)

    monkeypatch.setattr(packing._Copy, "product", seen)
    pack_weights(model)
    for kwargs in (call, {**call, **CAPTURED}):
        assert torch.equal(generate(model, prompt(), **kwargs).sequences, plain)
        assert any(inside) and not all(inside)
        inside.clear()
    pack_weights(model, False)
    generate(model, prompt(), **call)
    assert not inside
    if name == "draft_model":  # it can be packed by itself
        pack_weights(drafter)
        assert torch.equal(generate(model, prompt(), **call).sequences, plain)
        assert inside and all(inside)
        pack_weights(drafter, False)


def test_long_prompts_and_gradients_take_the_models_own(
    fresh: Tiny, used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MOST_TOKENS", dict.fromkeys(packing.MOST_TOKENS, 4))
    model, inputs = fresh("llama"), prompt(24)
    plain = generate(model, inputs).sequences
    pack_weights(model)
    for kwargs in calls(num_draft_tokens=7):
        assert torch.equal(generate(model, inputs, **kwargs).sequences, plain)
    assert used and min(used) >= 2 and max(used) <= 4


def test_refused(fresh: Tiny) -> None:
    model = fresh("llama")
    with pytest.raises(ValueError, match=r"pack_weights: oneDNN packs none of the weights"):
        pack_weights(model)
    assert pack_weights(model, False) == 0
    with pytest.raises(ValueError, match="pack='no': must be True or False"):
        pack_weights(model, "no")
    with pytest.raises(ValueError, match="pack_weights"):
        generate(model, prompt(), **strategy("prompt_lookup", pack_weights=True))


def test_where_it_pays(shallow: Tiny, used: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With AVX and room, in float32 and bfloat16."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(packing, "_Copy", Unpacked)
    for name in ("bf16", "fp16"):
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda: True)

    def packs(dtype: torch.dtype = torch.float32) -> bool:
        model = shallow().to(dtype)
        packing.pack_where_it_pays(model)
        return bool(packing.packed_weights(model))

    assert packs() and packs(torch.bfloat16) and not packs(torch.float16)
    assert not packs(torch.float64)
    with monkeypatch.context() as patch:
        patch.setattr(packing.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
        assert not packs()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert not packs()
