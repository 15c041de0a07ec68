"""Which operations are in records. Whether a CUDA graph can contain one is known by looking at it:
a new one fails here, is looked at, and joins the list."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from conftest import ARCHITECTURES, Tiny, ragged
from covering import EVERY_CASE
from recurrent_models import KINDS, recurrent
from replay import RECORDED, Replay, Tape
from running import LAYERS, drafting, without_pruning
from test_compiled import compiled, generate
from test_method_contract import FIRST, adapted
from test_method_contract import strategy as variant_of
from torch import Tensor

from hf_spec.target import captures

#: The list is of these releases.
LISTED = transformers.__version__.startswith("5.24.") and torch.__version__.startswith("2.13.")
#: What runs on the device alone, with shapes and numbers that the host knows.
KNOWN = """
    _log_softmax _safe_softmax _scaled_dot_product_flash_attention_for_cpu _softmax _to_copy
    _unsafe_view add.Tensor add_.Scalar addcmul addmm alias amax any.dim arange arange.start
    baddbmm bitwise_and.Tensor bitwise_and_.Tensor bitwise_not bitwise_or.Tensor bmm cat clamp
    clone constant_pad_nd convolution copy_ cos cumsum detach div.Tensor div.Tensor_mode
    div_.Tensor embedding empty.memory_format empty_like eq.Scalar eq.Tensor exp exp2 expand eye
    fill_.Tensor flip floor_divide fmax full_like gather ge.Scalar ge.Tensor gelu gt.Scalar
    gt.Tensor histc index.Tensor index_copy_ index_put_ index_select isnan le.Scalar le.Tensor
    lift_fresh log log1p logaddexp logsumexp lt.Scalar lt.Tensor masked_fill.Scalar
    masked_fill_.Scalar max.dim mean.dim minimum mm mul.Scalar mul.Tensor nan_to_num
    native_layer_norm neg new_empty new_full new_zeros ones ones_like permute pow.Tensor_Scalar
    promote_types relu remainder.Scalar repeat rsqrt rsub.Scalar scalar_tensor scatter.src
    scatter.value scatter_.src scatter_.value scatter_add select.int sigmoid silu sin
    slice.Tensor softplus sort sort.stable split.Tensor split_with_sizes sqrt squeeze.dim stack
    sub.Tensor sum sum.dim_IntList t tanh topk transpose.int tril unbind.int unsqueeze view
    where.self zeros zeros_like
"""

#: Of these the host reads sizes on most GPUs, where they are refused
#: (:func:`hf_spec.target.captures._obstacle`).
REFUSED = "_grouped_mm"

SAMPLED = {
    "do_sample": True, "temperature": 0.9, "top_k": 8, "top_p": 0.95, "repetition_penalty": 1.2,
}  # fmt: skip
#: Of sampling, drafters, experts, windows and recurrent layers.
SOME = ["plain sampled", "medusa sampled", "mixtral", "gemma2", "kimi_linear"]


class Noted(Replay):
    """Notes what is recorded."""

    operations: set[str] = set()

    def _program(self, function: Any, inputs: Any) -> Callable[..., tuple[Tensor, ...]]:
        tape = Tape(inputs)
        with tape:
            results = function(*inputs)
        names = (str(func) for func, *_ in tape.steps)
        self.operations.update(
            name.removeprefix("aten.").removesuffix(".default") for name in names
        )
        return tape.program(results)


def cases() -> list[str]:
    """Models with lookups, and methods on a model, greedy and sampled."""
    methods = [name for name, _ in FIRST]
    every = [*ARCHITECTURES, *KINDS, *methods, *(f"{name} sampled" for name in methods)]
    return every if os.environ.get(EVERY_CASE) else SOME


def record(shallow: Tiny, case: str) -> None:
    """Record the steps of a call."""
    kind, *sampled = case.split()
    if kind in KINDS or kind in ARCHITECTURES:
        layers = 2 if kind in ("gemma2", "gemma3", "cohere2") else 1
        model: Any = recurrent(kind) if kind in KINDS else shallow(kind, layers)
        spec = drafting("prompt_lookup", max_nodes=2)
        output = generate(model, ragged((12, 5)), **spec, **RECORDED, max_new_tokens=6)
    else:
        model, variant = shallow(layers=LAYERS.get(kind, 1)), dict(FIRST)[kind]
        spec = without_pruning(variant_of(kind, variant))
        settings = SAMPLED if sampled else {}
        with adapted(model, kind, variant):
            output = generate(
                model, ragged((12, 5)), **spec, **RECORDED, max_new_tokens=6, **settings
            )
    assert compiled(output)["made"], case


@pytest.mark.usefixtures("sizes_as_shipped")
@pytest.mark.skipif(not LISTED, reason="other releases have other operations")
def test_operations(shallow: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(captures.RECORDERS, "cpu", Noted)
    monkeypatch.setattr(Noted, "operations", set())
    for case in cases():
        record(shallow, case)
    found, known = Noted.operations, {*KNOWN.split(), REFUSED}
    assert found <= known, f"look at these: {sorted(found - known)}"
    if os.environ.get(EVERY_CASE):
        assert found == known, f"take these off the list: {sorted(known - found)}"
