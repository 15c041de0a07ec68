"""The model that :mod:`gpu` measures, and how it is called."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from long_prompts import KINDS, REST, text_of
from peft import LoraConfig
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CompileConfig,
    LlamaConfig,
    LlamaForCausalLM,
)  # fmt: skip
from wide import SHAPES, Shape, built, widen_adapter, widened

import hf_spec
from hf_spec.decoding.sequences import pad_left
from hf_spec.modeling_patches.attention_masks import TREE_ATTENTION
from hf_spec.target.captures import CUDA_GRAPHS
from hf_spec.tools.bench import contenders as entries
from hf_spec.tools.bench.contenders import SyntheticRates
from hf_spec.tools.bench.prompts import BUNDLED, encode, read_prompts, spread

Row = dict[str, Any]
#: Plain generation by Transformers.
TRANSFORMERS = "transformers"
#: A model of random weights, in place of a name.
RANDOM = "random"
#: Words that a random model is asked with, and repeats: lookups find what they need.
WORDS = 16
#: What LoRA is beside.
LINEAR = r".*model\.layers\..*(q|k|v|o|gate|up|down)_proj"


class Way(StrEnum):
    """How steps run: as they are, recorded as CUDA graphs, or compiled."""

    EAGER = "eager"
    RECORDED = "recorded"
    COMPILED = "compiled"


class What(StrEnum):
    """What is measured: calls; launches and waits of a step; a forward over some tokens; attention
    of one layer; whether something works (:mod:`gpu_checks`)."""

    SPEED = "speed"
    COUNTS = "counts"
    FORWARD = "forward"
    LAYER = "layer"
    CHECK = "check"


def compiling(way: Way, device: torch.device) -> CompileConfig:
    """How steps are recorded or compiled; off CUDA, where nothing can be recorded, their code is
    captured and runs as it is."""
    backend = {Way.RECORDED: CUDA_GRAPHS, Way.COMPILED: "inductor"}[way]
    config = CompileConfig(backend=backend if device.type == "cuda" else "eager")
    config._compile_all_devices = True  # Transformers', too
    return config


class Cell(NamedTuple):
    """A row of the results: what is measured, and how.

    Attributes:
        context: tokens of a prompt, about, or in the cache.
        lora: whether a LoRA adapter of the user's is active, too.
        tokens: of a forward, or nodes of a tree.
        kernel: whether attention is ``tree_attention``.
        recycle: whether candidates of ``token_recycling`` join the trees.
    """

    contender: str
    way: Way = Way.EAGER
    batch: int = 1
    context: int = 0
    temperature: float = 0.0
    lora: bool = False
    what: What = What.SPEED
    tokens: int = 0
    kernel: bool = False
    recycle: bool = False


def random_llama(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """A Llama of random weights that emits one of a few tokens."""
    config = LlamaConfig(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, vocab_size=shape.vocabulary,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = built(LlamaForCausalLM, config, device, dtype)
    with torch.no_grad():
        model.lm_head.weight[:WORDS] *= 10
    return model


class Subject:
    """The model of a command line with adapters and assistant, for cells alike in their LoRA."""

    def __init__(self, args: Any, cells: Sequence[Cell]):
        self.args, self.device = args, args.device
        self.rates = SyntheticRates.parse(args.rates)
        self.tokenizer, self.assistant, self.filler = None, None, list[int]()
        self.synthetic: set[str] = set()
        self.model = self._load()
        names = {cell.contender for cell in cells} & {*hf_spec.strategies()}
        if args.model == RANDOM:
            self.synthetic = names - {"plain"}
        self.adapters = {name: name for name in getattr(self.model, "peft_config", {})}
        made = entries.untrained([name for name in names if name not in self.adapters], ())
        entries.add_untrained(self.model, made)
        self.adapters |= {one.strategy: one.name for one in made}
        self.options = {one.strategy: one.options for one in made}
        self.synthetic |= {one.strategy for one in made}
        if any(cell.lora for cell in cells):
            self.model.add_adapter(LoraConfig(r=16, target_modules=LINEAR), "lora")
        self.attention = self.model.config._attn_implementation
        config = self.model.generation_config
        config.update(eos_token_id=None, pad_token_id=config.pad_token_id or 0)
        longest, config = max(cell.context for cell in cells), self.model.config
        longest = max(longest + args.new_tokens + REST, config.max_position_embeddings)
        config.max_position_embeddings = longest

    def _load(self) -> Any:
        args, dtype = self.args, self.args.dtype
        if args.model == RANDOM:
            shape = SHAPES[args.shape]
            few = shape._replace(layers=max(shape.layers // 8, 1))
            self.assistant = random_llama(few, self.device, dtype)
            return random_llama(shape, self.device, dtype)
        self.tokenizer = tokenizer = AutoTokenizer.from_pretrained(args.model)
        docs = tokenizer(text_of(KINDS["docs"]), add_special_tokens=False, verbose=False)
        self.filler = docs["input_ids"]
        model = self._named(args.model)
        for folder in args.adapter:
            kind = json.loads((folder / "adapter_config.json").read_text())["peft_type"]
            model.load_adapter(folder, kind.lower())
        if args.assistant:
            self.assistant = self._named(args.assistant).to(self.device)
        if not args.shape:
            return model.to(self.device)
        shape = Shape.of(model.config).doubled() if args.shape == "tiny" else SHAPES[args.shape]
        wide = widened(model, shape, self.device, dtype)
        for name in getattr(model, "peft_config", {}):
            widen_adapter(name, model, wide)
        if self.assistant is None:  # which the wide model agrees with, always
            self.assistant = self._named(args.model).to(self.device)
            self.synthetic.add("draft_model")
        return wide

    def _named(self, name: str) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=self.args.dtype)
        return model.eval()

    def prompts(self, cell: Cell) -> list[dict[str, Tensor]]:
        """The inputs of each call: prompts of several tasks, behind text of about so many
        tokens."""
        several = cell.batch == 1 and cell.contender != TRANSFORMERS
        count = self.args.prompts if several else cell.batch
        if self.tokenizer is None:
            draw = torch.Generator().manual_seed(0)
            rows = torch.randint(WORDS, (count, max(cell.context, REST)), generator=draw).tolist()
        else:
            texts = [one.text for one in spread(read_prompts(BUNDLED), count)]
            room, rows = max(cell.context - REST, 0), []
            for place in range(count):
                start = place * 97 % max(len(self.filler) - room, 1)
                before = self.tokenizer.decode(self.filler[start : start + room])
                text = texts[place % len(texts)]
                rows.append(encode(self.tokenizer, f"{before}\n\n{text}".strip()))
        rows = [rows[at : at + cell.batch] for at in range(0, count, cell.batch)]
        return [pad_left(some, 0, self.device) for some in rows]

    def keywords(self, cell: Cell) -> Row:
        """Arguments of ``generate``; activates the adapters."""
        name, given = cell.contender, dict[str, Any]()
        attention = TREE_ATTENTION if cell.kernel else self.attention
        if self.model.config._attn_implementation != attention:
            self.model.set_attn_implementation(attention)
        active = [self.adapters[name]] if name in self.adapters else []
        active += ["lora"] * cell.lora
        if active:
            self.model.enable_adapters()
            self.model.set_adapter(active)
        elif getattr(self.model, "peft_config", None):
            self.model.disable_adapters()
        if name == entries.STOCK_LOOKUP:
            given |= entries.STOCK_LOOKUP_OPTIONS
        elif name not in (TRANSFORMERS, entries.STOCK_ASSISTED):
            options = dict(self.options.get(name, {}))
            if cell.recycle:
                options["recycle"] = True
            given |= {"assistant_strategy": name, "assistant_kwargs": options}
        if entries.needs_assistant(name):
            given["assistant_model"] = self.assistant
        if cell.way != Way.EAGER:
            config = compiling(cell.way, self.device)
            given |= {"cache_implementation": "static", "compile_config": config}
            if name == TRANSFORMERS:
                given["max_cache_len"] = max(cell.context, REST) + REST + self.args.new_tokens
        if cell.temperature:
            given |= {"do_sample": True, "temperature": cell.temperature}
        return given
