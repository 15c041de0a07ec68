"""The kernel equals attention with a dense mask: by Triton's interpreter, which computes on a CPU
what a GPU would, or on a GPU (``--device cuda``)."""

import copy
import itertools
import os
import random
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import architectures
import pytest
import torch
from adapter_oracle import lent
from conftest import Tiny, check_same, prompt, ragged
from covering import covering
from random_trees import random_tree
from replay import RECORDED
from running import drafting
from torch import Tensor

import hf_spec
from hf_spec.core.tree import Tree, tree_mask
from hf_spec.methods.registry import methods
from hf_spec.modeling_patches import attention_masks
from hf_spec.modeling_patches.attention_masks import (
    TREE_ATTENTION,
    Local,
    check_attention,
    unpacked,
)
from hf_spec.target.target import Slots, first_near

pytest.importorskip("triton", reason="Triton is not installed: its kernel cannot run")

from hf_spec.modeling_patches import tree_attention as kernel

#: Names and values of what a case has.
FEATURES: dict[str, tuple[Any, ...]] = {
    "dims": ((16, 16), (24, 40), (64, 64), (80, 80), (192, 128)),
    "groups": (1, 3, 4),
    "nodes": (1, 5, 66),  # more than a word has bits
    "lengths": ((140,), (0, 65), (64, 90)),
    "local": (None, Local(20), Local(70), Local(48, True)),
    "cap": (0.0, 3.0),
    "sinks": (False, True),
    "front": (0, 16, 80),
    "dtype": (torch.float32, torch.float16),
    "splits": (1, 2, 11),
}
#: Some of all combinations, of which :func:`covering` takes those that have every pair. The
#: interpreter runs a merge for each query head of a node: there are few of many nodes.
CASES = covering(
    [
        case for case in random.Random(0).sample([*itertools.product(*FEATURES.values())], 1500)
        if case[1] == 1 or case[2] < 66 or case[-1] == 1
    ]
)  # fmt: skip


def dense(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, sinks: Tensor | None, cap: float
) -> Tensor:
    """By the definition, in float64: ``(batch, nodes, heads, dim)``."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = (one.double() for one in (query, key, value))
    scores = query @ key.repeat_interleave(groups, 1).mT * query.shape[3] ** -0.5
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], 3)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2)


def emulated(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None, scale: float,
    cap: float, near: int,
) -> Tensor:  # fmt: skip
    """What the kernel computes, without it: the interpreter is slow."""
    query = query * (scale * query.shape[3] ** 0.5)
    found = dense(query, key, value, unpacked(mask, key.shape[2]), sinks, cap)
    return found.to(query.dtype).contiguous()


def trees(seed: int, nodes: int, lengths: tuple[int, ...]) -> tuple[Tree, Tensor]:
    rng = random.Random(seed)
    return Tree.of_shapes([random_tree(rng, nodes) for _ in lengths]), torch.tensor(lengths)


def masked(tree: Tree, lengths: Tensor, local: Local | None, front: Tensor | None) -> Tensor:
    """The packed mask of all nodes."""
    positions, slots = lengths[:, None] + tree.depths, Slots(torch.empty(0), False)
    begin = None if local is None else first_near(local, positions)
    return slots.mask(tree.ancestors, lengths, True, begin, positions, front)


@pytest.mark.parametrize("local", FEATURES["local"])
@pytest.mark.parametrize(("nodes", "front"), [(1, 0), (7, 16), (70, 80)])
def test_packed_is_dense(nodes: int, front: int, local: Local | None) -> None:
    tree, lengths = trees(nodes, nodes, (0, 131))
    slots = 131 + nodes + 9
    learned = torch.rand(2, nodes, front) < 0.5
    expected = tree_mask(tree.ancestors, lengths, torch.arange(slots)[None])
    positions = lengths[:, None] + tree.depths
    at = torch.arange(slots).repeat(2, 1)
    at.scatter_(1, lengths[:, None] + torch.arange(nodes), positions)
    if local is not None:
        query, key = positions[:, None, :, None], at[:, None, None]
        chunks = query // local.size == key // local.size
        expected = expected & (chunks if local.chunked else query - key < local.size)
    expected = torch.cat([learned[:, None], expected], 3)
    found = unpacked(masked(tree, lengths, local, learned), slots + front)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_is_attention(case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(zip(FEATURES, case))
    (dim, value_dim), dtype, lengths = given["dims"], given["dtype"], given["lengths"]
    torch.manual_seed(0)
    tree, on_device = trees(0, given["nodes"], lengths)
    heads, slots = 2 * given["groups"], given["front"] + max(lengths) + given["nodes"] + 5
    # As a model has them: heads beside each other, and a part of a larger buffer.
    query = torch.randn(len(lengths), given["nodes"], heads, dim, dtype=dtype).transpose(1, 2)
    key = torch.randn(len(lengths), 2, slots + 30, dim, dtype=dtype)[:, :, :slots]
    value = torch.randn(len(lengths), 2, slots + 30, value_dim, dtype=dtype)[:, :, :slots]
    sinks = torch.randn(heads, dtype=dtype) if given["sinks"] else None
    front = torch.rand(len(lengths), given["nodes"], given["front"]) < 0.5
    mask = masked(tree, on_device, given["local"], front)
    monkeypatch.setattr(kernel, "split_count", lambda *_: given["splits"])
    found = kernel.tree_attention(
        query, key, value, mask, sinks, dim**-0.5, given["cap"], getattr(given["local"], "size", 0)
    )
    expected = dense(query, key, value, unpacked(mask, slots), sinks, given["cap"])
    assert found.dtype == dtype and found.shape == expected.shape
    close = {"rtol": 1e-5, "atol": 4e-6} if dtype == torch.float32 else {"rtol": 3e-3, "atol": 2e-3}
    torch.testing.assert_close(found.double(), expected, **close)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("dim", "value_dim"), [(16, 16), (64, 64), (256, 128), (256, 256)])
@pytest.mark.parametrize("shared", [64, 99, 163, 227])  # KiB, of GPUs from AMD's to the H100
@pytest.mark.parametrize("rows", [4, 64, 256])
def test_tiles_fit(rows: int, dim: int, value_dim: int, itemsize: int, shared: int) -> None:
    cut = kernel.tiling(rows, dim, value_dim, itemsize, 132, shared * 2**10)
    tile = (dim + value_dim) * cut.slots * itemsize
    assert cut.rows * dim * itemsize + cut.stages * tile < shared * 2**10
    assert cut.rows in (16, 32, 64, 128) and 64 % cut.slots == 0 and cut.resident >= 132


#: Compiles both kernels for a GPU of NVIDIA's of some compute capability, or AMD's, as a launch
#: would.
COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_spec.modeling_patches import tree_attention as kernel

kind, number, heads, dim, value_dim, capped, merged = eval(sys.argv[1])
target = GPUTarget("cuda", kind, 32) if kind else GPUTarget("hip", "gfx942", 64)
shared = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99, 0: 64}[kind] * 2**10
itemsize = 4 if number == "fp32" else 2
padded, value_padded = kernel._padded(dim), kernel._padded(value_dim)
cut = kernel.tiling(64, padded, value_padded, itemsize, 132, shared)
held = {"GROUPS": heads, "V": value_dim, "VP": value_padded, "SINKS": True}
split = {"D": dim, "DP": padded, "M": cut.rows, "N": cut.slots, "CAPPED": capped,
         "MERGED": merged, "PRECISION": "ieee" if itemsize == 4 else "tf32"}
types = {"parts": "*fp32", "mask": "*i64", "scale": "fp32", "cap": "fp32",
         **dict.fromkeys(("q", "k", "v", "out", "sinks"), "*" + number)}
options = {"num_warps": cut.warps, "num_stages": cut.stages}
for function, given in ((kernel._split, {**held, **split}), (kernel._merge, {**held, "S": 64})):
    names = function.arg_names
    signature = {n: "constexpr" if n in given else types.get(n, "i32") for n in names}
    constants = {(names.index(name),): value for name, value in given.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    made = triton.compile(source, target=target, options=options)
    assert made.metadata.shared <= shared, (made.metadata.shared, cut)
"""


def seconds_more(*case: Any) -> Any:
    return pytest.param(case, marks=pytest.mark.environment)


@pytest.mark.parametrize(
    "case",
    [
        (90, "bf16", 4, 64, 64, False, True),
        seconds_more(80, "bf16", 4, 128, 128, False, True),
        seconds_more(90, "fp32", 1, 192, 128, True, False),
        seconds_more(90, "bf16", 4, 256, 256, True, True),
        seconds_more(86, "bf16", 8, 512, 512, False, True),
        seconds_more(100, "bf16", 4, 80, 80, False, True),
        seconds_more(120, "fp16", 2, 256, 256, True, True),
        seconds_more(0, "fp16", 4, 128, 128, False, True),
    ],
    ids=str,
)
def test_it_compiles(case: tuple[Any, ...], tmp_path: Path) -> None:
    """What the interpreter takes is not always what a GPU's compiler takes."""
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = tmp_path / "compiles.py"
    script.write_text(COMPILE)
    found = subprocess.run(
        [sys.executable, str(script), repr(case)], capture_output=True, text=True,
        env={**os.environ, **own, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]


def test_splits_fill_the_device() -> None:
    assert kernel.split_count(8, 2048, 264) == 33  # one wave of as many programs as run at once
    assert kernel.split_count(256, 2048, 264) == 1  # which nearly as many are, without
    assert kernel.split_count(8, 3, 264) == 1  # too little to split
    for programs, tiles in itertools.product((1, 24, 100, 300), (16, 129, 2049)):
        assert 1 <= kernel.split_count(programs, tiles, 132) <= tiles // kernel.LEAST


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the kernel's queries, of caches that are not split: each merge takes its time."""
    made: list[tuple[int, ...]] = []
    run = kernel.tree_attention

    def counted(query: Tensor, *rest: Any) -> Tensor:
        made.append(tuple(query.shape))
        return run(query, *rest)

    monkeypatch.setattr(kernel, "tree_attention", counted)
    monkeypatch.setattr(kernel, "split_count", lambda *_: 1)
    return made


@pytest.fixture
def emulated_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Numbers of queries, slots and words of the mask of each call of the kernel, emulated."""
    made: list[tuple[int, int, int]] = []

    def counted(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *rest: Any) -> Tensor:
        made.append((query.shape[2], key.shape[2], mask.shape[3]))
        return emulated(query, key, value, mask, *rest)

    monkeypatch.setattr(kernel, "tree_attention", counted)
    return made


def check_model(
    tiny: Tiny, name: str, strategy: str, fields: dict[str, Any] = {},  # noqa: B006
    attention: str = TREE_ATTENTION, **settings: Any,
) -> float:  # fmt: skip
    """The same tokens as plain generation's; gives how many a step takes."""
    if name in ("gpt_oss", "llama4_text", "deepseek_v3", "qwen3_next"):
        model: Any = copy.deepcopy(architectures.build(name))  # which tests share
        if attention == TREE_ATTENTION:
            model.set_attn_implementation(attention)
    else:
        model = tiny(name, attention)
    config = methods()[strategy].adapter_config
    adapter = lent(model, config(**fields), random=True) if config else nullcontext()
    with adapter:
        check_same(model, drafting(strategy), **ragged((12, 7)), **settings)
    return hf_spec.last_stats(model).mean_accepted_tokens


@pytest.mark.parametrize(
    ("name", "strategy", "fields"),
    [
        # Kinds of attention, and strategies whose trees, probes or pruning differ.
        *(("llama", strategy, {}) for strategy in ("bita", "ppd", "propd", "layer_skip")),
        ("gemma3", "bita", {}), ("cohere2", "space", {}), ("gpt_oss", "medusa", {}),
        ("llama4_text", "medusa", {}), ("deepseek_v3", "prompt_lookup", {}),
        ("qwen3_next", "prompt_lookup", {}),
        # Drafters that have caches of their own.
        *(("llama", strategy, {}) for strategy in ("eagle3", "mtp", "draft_model")),
        ("gemma3", "mtp", {}), ("gpt_oss", "eagle3", {}), ("llama", "dflash", {"causal": True}),
        ("llama", "dspark", {"sliding_layers": [0], "sliding_window": 6, "num_layers": 2}),
    ],
)  # fmt: skip
def test_the_same_tokens_and_drafts(
    tiny: Tiny, emulated_calls: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch,
    name: str, strategy: str, fields: dict[str, Any],
) -> None:  # fmt: skip
    """Without any dense mask."""
    tau = check_model(tiny, name, strategy, fields, attention="sdpa")
    assert not emulated_calls
    monkeypatch.setattr("hf_spec.target.target.tree_mask", None)
    assert check_model(tiny, name, strategy, fields) == tau
    assert max(queries for queries, *_ in emulated_calls) > 1


@pytest.mark.parametrize("strategy", ["medusa", "bita"])
def test_windows_that_are_rings(
    tiny: Tiny, emulated_calls: list[tuple[int, int, int]], strategy: str
) -> None:
    """Their slots are bits, since tokens are not in order."""
    model = tiny("gemma3", TREE_ATTENTION)
    with lent(model, methods()[strategy].adapter_config(), random=True):
        check_same(model, drafting(strategy), prompt(110), max_new_tokens=16)
    slots = [count for _, count, _ in emulated_calls]
    assert min(slots) < max(slots) and max(words for *_, words in emulated_calls) > 4


@pytest.mark.parametrize(("name", "splits"), [("mistral", 2), ("gpt_oss", 1)])
def test_the_same_tokens_by_the_kernel(
    tiny: Tiny, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, name: str,
    splits: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(kernel, "split_count", lambda *_: splits)
    check_model(tiny, name, "prompt_lookup", max_new_tokens=5)
    assert any(shape[2] > 1 for shape in calls)


@pytest.mark.usefixtures("recorded")
def test_in_programs(shallow: Tiny, calls: list[tuple[int, ...]]) -> None:
    """One program serves all lengths: the kernel is an operation that it contains."""
    model: Any = shallow("mistral")
    model.set_attn_implementation(TREE_ATTENTION)
    given = {
        "return_dict_in_generate": True,
        **RECORDED,
        **drafting("prompt_lookup", num_draft_tokens=4),
    }
    output = check_same(model, given, prompt(), max_new_tokens=5)
    found = output.spec_stats.details["compiled"]
    assert found["kept"] and not found["refused"] and calls


def test_long_prompts_in_chunks(shallow: Tiny, calls: list[tuple[int, ...]]) -> None:
    """A continued prompt runs through forwards of trees: chains of more nodes than a word has."""
    model: Any = shallow("llama")
    model.set_attn_implementation(TREE_ATTENTION)
    given = {"return_dict_in_generate": True, "max_new_tokens": 2, "do_sample": False}
    first = model.generate(prompt(8), **given, assistant_strategy="plain")
    longer = torch.cat([first.sequences, prompt(66, seed=4)], 1)
    plain = model.generate(longer, **given)
    output = model.generate(
        longer, past_key_values=first.past_key_values, **given, assistant_strategy="plain"
    )
    assert output.sequences.tolist() == plain.sequences.tolist()
    assert max(shape[2] for shape in calls) > 64


# -- what it is refused for -----------------------------------------------------------------------


def test_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where keys are chosen, on CPUs, without Triton; plain generation runs."""
    chooses: Any = copy.deepcopy(architectures.build("deepseek_v32"))
    chooses.set_attn_implementation(TREE_ATTENTION)

    def refuses(model: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            model.generate(prompt(), assistant_strategy="prompt_lookup")

    refuses(chooses, "chooses the keys that each query sees")
    model = tiny("llama", TREE_ATTENTION)
    monkeypatch.setattr(kernel, "INTERPRETS", False)
    if model.device.type == "cpu":
        refuses(model, "is for GPUs, and the model is on cpu")
    assert model.generate(prompt(), max_new_tokens=2).shape == (1, 14)
    monkeypatch.setattr(attention_masks.importlib.util, "find_spec", lambda name: None)
    refuses(model, "needs Triton.*attn_implementation='sdpa'")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_older_gpus_are_refused(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """Whose shared memory is too small for 64 nodes."""
    model = copy.copy(tiny("llama"))
    place = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr("hf_spec.modeling_patches.attention_masks.placement", lambda _: place)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", TREE_ATTENTION)
    refused = pytest.raises(ValueError, match=r"needs compute capability 8\.0, .* has \(7, 5\)")
    with refused if capability < (8, 0) else nullcontext():
        check_attention(model)
