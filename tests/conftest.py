"""Tiny, local, deterministic models: two or three layers, vocabulary 61, built from a config.

The initializer's range is large, so that greedy outputs vary with the prompt, wander for a while
and then repeat themselves; drafts are rejected and accepted alike.
"""

# ruff: noqa: E402
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from typing import Any

# Before Triton is imported: its kernels run on CPUs, by its interpreter. Workers get this, too.
_ON_DEVICE = any(argument.startswith("--device") for argument in sys.argv)
os.environ.setdefault("TRITON_INTERPRET", "0" if _ON_DEVICE else "1")

import models_page
import pytest
import torch
from architectures import config_class
from covering import EVERY_CASE
from running import drafting
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_spec.modeling_patches import fingerprint
from hf_spec.modeling_patches.modules import CACHE

# More threads cost more than they bring on models of this size, above all beside other workers.
torch.set_num_threads(1)

VOCAB = 61
PAD, BOS, EOS = 0, 1, 2

#: fp32 with other reduction orders: a few ulps of values up to about 10.
CLOSE = {"rtol": 1e-4, "atol": 2e-4}
#: What the fixtures ``tiny``, ``fresh`` and ``shallow`` are.
Tiny = Callable[..., PreTrainedModel]

_IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_BASE = {**_IDS, "vocab_size": VOCAB, "initializer_range": 0.2, "tie_word_embeddings": False}
_LLAMA = {
    **_BASE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
_GPT = {**_BASE, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
_FALCON = {**_LLAMA, "num_kv_heads": 2, "bias": True}
_WINDOW = {"head_dim": 8, "sliding_window": 5}
_HYBRID = {
    **_WINDOW,
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

#: name -> (model type, config): everything that the design and its notes promise.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "llama_tied": ("llama", {**_LLAMA, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", _LLAMA),
    "qwen3": ("qwen3", {**_LLAMA, "head_dim": 8}),
    "mistral": ("mistral", {**_LLAMA, **_WINDOW}),
    "gemma3": ("gemma3_text", {**_LLAMA, **_HYBRID}),
    "gemma2": ("gemma2", {**_LLAMA, **_HYBRID}),
    "gpt2": ("gpt2", _GPT),
    "gpt_neox": ("gpt_neox", _LLAMA),
    "opt": ("opt", {**_LLAMA, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2}),
    "falcon": ("falcon", {**_FALCON, "new_decoder_architecture": True}),
    "phi": ("phi", {**_LLAMA, "initializer_range": 0.3}),
    "phi3": ("phi3", _LLAMA),
    "stablelm": ("stablelm", _LLAMA),
    "starcoder2": ("starcoder2", {**_LLAMA, "sliding_window": None, "initializer_range": 0.3}),
    "olmo2": ("olmo2", _LLAMA),
    "mixtral": (
        "mixtral",
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "cohere2": ("cohere2", {**_LLAMA, **_HYBRID, "logit_scale": 1.0}),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 4}),
    "gpt_bigcode": ("gpt_bigcode", _GPT),
}  # fmt: skip

#: How these know where a token stands; the others rotate queries and keys.
POSITIONS = {
    **dict.fromkeys(("mistral", "gemma3", "gemma2", "cohere2"), "rotated, windows"),
    **dict.fromkeys(("gpt2", "opt", "gpt_bigcode"), "learned"),
}

#: Architectures that Transformers has no sdpa for.
EAGER_ONLY = frozenset({"gemma2", "gptj"})


#: Flags of the command line, and what they do.
FLAGS = {
    "--every-architecture": "Every causal language model with every strategy, and a table of it.",
    "--models-page": "With --every-architecture: write the tables of docs/guides/models.md.",
    "--every-case": "Every combination of parameters, not only every pair of them.",
    "--environments": "Also what is marked so: servers, wheels, programs from the shell.",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    for flag, said in FLAGS.items():
        parser.addoption(flag, action="store_true", help=said)
    where = "Where models and inputs are made: cuda, mps, ... (default: cpu)."
    parser.addoption("--device", default="cpu", help=where)


#: Folders and files of tests of the tools, which are marked so; all others are the library's.
TOOLS = (
    "bench", "demo", "hub", "search", "training", "test_check", "test_cli", "test_data",
    "test_docs", "test_doctor", "test_examples", "test_files", "test_messages",
    "test_other_programs", "test_program_examples", "test_run", "test_serve", "test_tour",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(Path(__file__).parent).with_suffix("").parts[0] in TOOLS:
            item.add_marker(pytest.mark.tools)
    if not config.getoption("--environments"):
        skip = pytest.mark.skip(reason="an environment of its own: --environments, make test-all")
        for item in items:
            if item.get_closest_marker("environment"):
                item.add_marker(skip)
    if not config.getoption("--every-case"):
        items[:] = take_turns(items)


def take_turns(items: list[pytest.Item]) -> list[pytest.Item]:
    """A test with the fixture ``spec`` and other parameters runs each of these with one strategy,
    the next of them with the next strategy."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        given = dict(getattr(getattr(item, "callspec", None), "params", {}))
        if given.pop("spec", None) is not None and given:
            others = sorted((name, id(value)) for name, value in given.items())
            key = item.path, getattr(item, "originalname", ""), *others
            groups.setdefault(key, []).append(item)
    left_out, turns = set(), dict.fromkeys((key[:2] for key in groups), 0)
    for key, group in groups.items():
        if len(group) == len(STRATEGIES):
            left_out.update(group[: turns[key[:2]]] + group[turns[key[:2]] + 1 :])
            turns[key[:2]] = (turns[key[:2]] + 1) % len(group)
    return [item for item in items if item not in left_out]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") != "cpu":
        torch.set_default_device(config.getoption("--device"))
        for name in ("rand", "randn", "randint", "randperm"):
            setattr(torch, name, on_every_device(getattr(torch, name)))
    if config.getoption("--every-case"):
        os.environ[EVERY_CASE] = "1"


def on_every_device(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Random numbers of a generator on the CPU are the same wherever they are needed."""

    @wraps(draw)
    def drawn(*args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        if generator is None or generator.device.type != "cpu" or "device" in kwargs:
            return draw(*args, generator=generator, **kwargs)
        made = draw(*args, generator=generator, device="cpu", **kwargs)
        return made.to(torch.get_default_device())

    return drawn


#: The file whose tests run.
_file: list[Path] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # What imports and earlier files have made and left stays. The garbage collector would look
    # through all of it again whenever accelerate or a test calls it; tests that train took three
    # times as long at the end of the suite.
    if _file != [item.path]:
        _file[:] = [item.path]
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    outcomes: models_page.Outcomes = {}
    reports = [report for some in terminalreporter.stats.values() for report in some]
    for report in reports:
        outcome = dict(getattr(report, "user_properties", ())).get("outcome")
        if outcome is not None and report.when == "call":
            model_type, _, name = report.nodeid.partition("[")[2].rstrip("]").rpartition("-")
            outcomes.setdefault(model_type, {})[name] = outcome
    if config.getoption("--models-page"):
        models_page.write(outcomes)
    if not config.getoption("--every-architecture"):
        return
    terminalreporter.section("architectures")
    for model_type, found in sorted(outcomes.items()):
        for outcome in dict.fromkeys(found.values()):
            names = sorted(name for name, same in found.items() if same == outcome)
            terminalreporter.line(f"{model_type}: {', '.join(names)}: {outcome}")


_shared: list[PreTrainedModel] = []


@cache
def _build(architecture: str, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    model_type, fields = ARCHITECTURES[architecture]
    config = config_class(model_type)(**fields)
    with torch.device("cpu"):  # the same numbers on every device
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            # Biases and norms start at 0 and 1: make them matter, too.
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.generation_config.eos_token_id = None  # outputs run to their full length ...
    model.generation_config.pad_token_id = PAD  # ... unless a test says otherwise
    _shared.append(model.eval().to(torch.get_default_device(), dtype))
    return model


def shared(
    architecture: str = "llama", attention: str | None = None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """What the fixture ``tiny`` gives, for what tests make once and keep."""
    best = "eager" if architecture in EAGER_ONLY else "sdpa"
    return _build(architecture, attention or best, dtype)


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    """``tiny("llama", attention="eager", dtype=torch.float64)``: a model, shared by all tests.

    A test must leave it as it found it; one that changes a model takes ``fresh``.
    """
    return shared


@pytest.fixture(autouse=True, scope="session")
def random_mtp() -> Iterator[None]:
    """The strategy ``mtp`` runs on models whose checkpoints have no layers for it, too."""
    from random_mtp import read_or_random

    from hf_spec.methods import mtp

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mtp, "_read", read_or_random(mtp._read))
        yield


@pytest.fixture
def mtp_as_shipped(random_mtp: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without these random layers."""
    from hf_spec.methods import mtp

    read: Any = mtp._read
    monkeypatch.setattr(mtp, "_read", read.__wrapped__)


#: What rounds sizes up for compiled code.
PADDED = (
    "hf_spec.decoding.step", "hf_spec.predict.network", "hf_spec.target.compiled",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def one_size() -> Iterator[None]:
    """Compiled steps are padded to 32 nodes or more, so that code is captured for one size of
    trees, not for five: that is what tests of compiled calls take their time for. Plain steps of
    models with recurrent layers run without padding: see `sizes_as_shipped`."""
    from hf_spec.core.device import bucket

    with pytest.MonkeyPatch.context() as patch:
        for user in PADDED:
            patch.setattr(f"{user}.bucket", lambda count: count and max(32, bucket(count)))
        yield


@pytest.fixture
def sizes_as_shipped(one_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this padding."""
    from hf_spec.core.device import bucket

    for user in PADDED:
        monkeypatch.setattr(f"{user}.bucket", bucket)


#: Hooks of tests look on, or fail: a model with them is to run as without, and is not tried.
_IDLE_HOOKS = fingerprint._IDLE_HOOKS
fingerprint._IDLE_HOOKS = (*_IDLE_HOOKS, "test_", "running.", "processors.")


@pytest.fixture
def hooks_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks of this test are those of a user."""
    monkeypatch.setattr(fingerprint, "_IDLE_HOOKS", _IDLE_HOOKS)


_plain: dict[Any, torch.Tensor] = {}


def plainly(model: PreTrainedModel, *inputs: torch.Tensor, **settings: Any) -> torch.Tensor:
    """What plain ``generate`` gives; made once where the model is shared and greedy."""
    settings |= dict(zip(["inputs"], inputs))
    try:
        known = tuple((name, _hashable(value)) for name, value in sorted(settings.items()))
    except TypeError:  # a processor, a cache, a streamer
        return model.generate(**settings)
    if settings["do_sample"] or all(model is not one for one in _shared):
        return model.generate(**settings)
    if (id(model), known) not in _plain:
        _plain[id(model), known] = model.generate(**settings)
    return _plain[id(model), known].clone()


def check_same(
    model: PreTrainedModel, spec: dict[str, Any], *inputs: torch.Tensor, **settings: Any
) -> Any:
    """What a call with a strategy gives, after comparing its tokens with those of plain
    ``generate``: greedy unless the settings say otherwise, and else with one seed."""
    settings = {"max_new_tokens": 16, "do_sample": False, **settings}
    torch.manual_seed(3)
    plain = plainly(model, *inputs, **settings)
    torch.manual_seed(3)
    ours = model.generate(*inputs, **settings, **spec)
    ids = ours if isinstance(ours, torch.Tensor) else ours.sequences
    assert ids.tolist() == plain.tolist() and ids.dtype == plain.dtype
    return ours


def check_continued(model: PreTrainedModel, spec: dict[str, Any], **settings: Any) -> Any:
    """The same of a ragged batch and of a call that goes on with its cache; gives the first."""
    given = {**ragged(), **settings}
    first = check_same(model, {**spec, "return_dict_in_generate": True}, **given)
    ids = torch.cat([first.sequences, prompt(2, len(first.sequences), seed=7)], dim=1)
    mask = torch.ones_like(ids)
    mask[:, : given["attention_mask"].shape[1]] = given["attention_mask"]
    given |= {"input_ids": ids, "attention_mask": mask}
    check_same(model, {**spec, CACHE: first[CACHE]}, **given)
    return first


def _hashable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, tuple(value.flatten().tolist())
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(value)


@pytest.fixture
def fresh(tiny: Tiny) -> Tiny:
    """Like ``tiny``, but a copy that the test may change."""
    import copy

    def factory(*args: Any, **kwargs: Any) -> PreTrainedModel:
        return copy.deepcopy(tiny(*args, **kwargs))

    return factory


@pytest.fixture
def shallow(fresh: Tiny) -> Tiny:
    """Like ``fresh``, with the first layers only, where nothing depends on how many there are."""
    from hf_spec.modeling_patches.modules import decoder_layers

    def factory(architecture: str = "llama", layers: int = 1) -> PreTrainedModel:
        model: Any = fresh(architecture)
        del decoder_layers(model)[layers:]
        model.config.num_hidden_layers = layers
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = model.config.layer_types[:layers]
        return model

    return factory


def prompt(length: int = 12, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """``(batch, length)`` ids: a random stretch whose second half repeats the first."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(3, VOCAB, (batch, (length + 1) // 2), generator=generator)
    return torch.cat([half, half], dim=1)[:, :length]


def ragged(lengths: tuple[int, ...] = (12, 5, 9), seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of these lengths as a batch."""
    rows = [prompt(length, seed=seed + row)[0] for row, length in enumerate(lengths)]
    return padded([row.tolist() for row in rows])


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """A batch of these rows, padded on the left: ``input_ids`` and ``attention_mask``."""
    width = max(map(len, rows))
    ids = [[PAD] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


#: Strategies that run on the tiny models as they are, with options under which drafts hit and miss;
#: every step drafts.
STRATEGIES: dict[str, dict[str, Any]] = {
    "prompt_lookup": drafting("prompt_lookup"),
    "layer_skip": drafting(
        "layer_skip", skip_attention=[1], skip_mlp=[], draft_exit="fixed", num_draft_tokens=3
    ),
}


@pytest.fixture(params=STRATEGIES)
def spec(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Keywords for ``generate`` that name a strategy; the test runs once with each."""
    return STRATEGIES[request.param]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by a strategy's name whenever our loop runs: proof that a call reached it."""
    from hf_spec.decoding.strategy import Strategy

    calls: list[str] = []
    of = Strategy.of

    def spy(model: Any, config: Any, *args: Any) -> Any:
        calls.append(config.assistant_strategy)
        return of(model, config, *args)

    monkeypatch.setattr(Strategy, "of", spy)
    return calls


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded as on a GPU, compiled code included."""
    from replay import Replay

    from hf_spec.target import captures

    monkeypatch.setitem(captures.RECORDERS, "cpu", Replay)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each shared step."""
    from hf_spec.decoding.shared import SharedSteps

    found, take = [], SharedSteps.take

    def noted(self: SharedSteps) -> None:
        found.append(self.state.batch_size)
        take(self)

    monkeypatch.setattr(SharedSteps, "take", noted)
    return found


@pytest.fixture
def sharing(model: PreTrainedModel) -> Iterator[Any]:
    """Calls of the fixture ``model``, which a test's module has, share their steps; at the end
    nothing is left of them."""
    from test_sharing import wait_until

    from hf_spec import StepSharing, share_steps

    with share_steps(model) as found:
        yield found
    assert StepSharing.of(model) is None
    assert not found.rows and not found.cached_tokens
    wait_until(lambda: not found._batches)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Signals of Ctrl-C interrupt, also in a job of a shell's background, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails the test."""

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("a model was loaded before the input was checked")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model and its tokenizer; read it only."""
    from tiny_checkpoint import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("base") / "m")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``trained("bita")``: the folder of an adapter, see `trained.TRAININGS`; read it only."""
    from trained import trained_in

    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    (root / "trained").mkdir(exist_ok=True)
    return lambda name: trained_in(root / "trained", name)
