"""Steps at long contexts: ``python benchmarks/contexts.py --model M --adapter medusa/``.

By context and contender: the prompt's seconds, milliseconds of a step, accepted tokens, tokens per
second, peak memory. Prompts are source code and a question about it (``long_prompts.py``).

``--shape 8b``, the default on CUDA, widens the model and its adapters with zeros to the shape of a
larger Llama: the text, and what is accepted, are the small model's, and a step takes what the
larger one takes. Behind its own context (8,192 tokens) the text of SmolLM2 is no longer sensible;
the times are what they are. ``eagle3`` is of random weights unless there is an adapter: it drafts
15 tokens in every step, of which hardly any is accepted, and its speed at a tau of t is t times
what is shown.

On a GPU, steps are recorded and attention is the kernel of ``tree_attention``; one call, with all
contexts, is meant to take less than four minutes, and past ``--deadline`` seconds it leaves out the
rest. On a CPU, contenders alternate for ``--rounds`` rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import long_prompts
import torch
from cuda import Row, Ticks, free_memory, options_of, recorded
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig, LlamaForCausalLM

import hf_spec
from hf_spec.adapters.active import find_active
from hf_spec.core.checks import first_line
from hf_spec.core.stats import synchronize
from hf_spec.files import write_atomically
from hf_spec.methods.registry import get_method
from hf_spec.tools.bench.report import aligned
from hf_spec.tools.cli.options import whole_numbers
from modeling_patches.attention_masks import TREE_ATTENTION

#: Plain generation by Transformers, as it is.
TRANSFORMERS = "transformers"
#: Of strategies without an adapter: draft tokens of each step.
CANDIDATES = 15


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int

    @classmethod
    def of(cls, name: str, config: Any) -> Shape:
        """That of a Llama of 8B parameters; or the double of the model's, with a layer more."""
        if name == "8b":
            return cls(4096, 32, 64, 16, 14336)
        return cls(
            2 * config.hidden_size, config.num_hidden_layers + 1, 2 * config.num_attention_heads,
            2 * config.num_key_value_heads, 2 * config.intermediate_size,
        )  # fmt: skip


@torch.no_grad()
def widened(small: Any, shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """A Llama in a larger shape that computes the same.

    Hidden states get zeros, for which norms are scaled; heads and neurons that are new get random
    weights and end in zeros, and new layers add nothing.
    """
    config = copy.deepcopy(small.config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = config.hidden_size / shape.hidden
    config.update({
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "head_dim": dim,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate, "rms_norm_eps": config.rms_norm_eps * share,
        "max_position_embeddings": 2**18, "tie_word_embeddings": False,
    })  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            wide = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    # Where the query heads of a small key-value head are among those of a wide one.
    heads, kv_heads = small.config.num_attention_heads, small.config.num_key_value_heads
    each, wide_each = heads // kv_heads, shape.heads // shape.kv_heads
    if each > wide_each or kv_heads > shape.kv_heads:
        raise ValueError(f"{heads} heads for {kv_heads} of keys do not fit into {shape}")
    head = torch.arange(heads)
    rows = (head // each * wide_each + head % each)[:, None] * dim + torch.arange(dim)
    tensors = small.state_dict()
    for name, weight in wide.state_dict().items():
        kind, known = name.split(".")[-2], tensors.get(name)
        if kind in ("embed_tokens", "o_proj", "down_proj") or weight.ndim == 1:
            weight.zero_()
        else:
            weight.normal_(std=0.02)
        if known is None:
            continue
        known = known.to(weight)
        if kind == "q_proj":
            weight[rows.flatten().to(device), : known.shape[1]] = known
        elif kind == "o_proj":
            weight[: known.shape[0], rows.flatten().to(device)] = known
        elif weight.ndim == 1:
            weight[: len(known)] = known * share**0.5
        else:
            weight[: known.shape[0], : known.shape[1]] = known
    wide.generation_config = small.generation_config
    return wide


@torch.no_grad()
def widen_adapter(name: str, small: Any, wide: Any) -> None:
    """Give the wide model the small one's adapter, with zeros behind its numbers."""
    config = copy.deepcopy(small.peft_config[name])
    config.base_facts = config.base_model_name_or_path = None
    wide.add_adapter(config, name)
    made, given = (find_active(model, config.peft_type) for model in (wide, small))
    assert made is not None and given is not None
    tensors = given.state_dict()
    for key, weight in made.state_dict().items():
        known = tensors[key].to(weight)
        weight.zero_()
        weight[tuple(slice(size) for size in known.shape)] = known


def prepare(args: argparse.Namespace) -> Any:
    """The model with its adapters, one named like each strategy that needs one."""
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
    for folder in args.adapter:
        kind = json.loads((folder / "adapter_config.json").read_text())["peft_type"]
        model.load_adapter(folder, kind.lower())
    if args.shape == "as it is":
        wide = model.to(args.device)
    else:
        wide = widened(model, Shape.of(args.shape, model.config), args.device, args.dtype)
        for name in getattr(model, "peft_config", {}):
            model.set_adapter(name)
            widen_adapter(name, model, wide)
    known = {*getattr(wide, "peft_config", {})}
    for name in {*args.contenders} - {TRANSFORMERS} - known:
        if get_method(name).needs_adapter:
            config: Any = get_method(name).adapter_config
            wide.add_adapter(config(), name)
            args.random.add(name)
    wide.config.max_position_embeddings = max(
        wide.config.max_position_embeddings, max(args.contexts) + args.new_tokens
    )
    return wide


def prompt_of(args: argparse.Namespace, tokenizer: Any, context: int) -> Tensor:
    """``(1, n)`` ids of about so many tokens."""
    rows = [*long_prompts.prompts(tokenizer, [context], 1)]
    text = next(row["prompt"] for row in rows if row["category"].endswith("code"))
    chat = [{"role": "user", "content": text}]
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)
    found: Tensor = ids["input_ids"].to(args.device)
    return found


def timed(args: argparse.Namespace, model: Any, ids: Tensor, name: str) -> Row:
    """One call. Code is made, and graphs are recorded, in the first half of its steps, which does
    not count."""
    spec, cuda = dict[str, Any](), args.device.type == "cuda"
    if name != TRANSFORMERS:
        spec["assistant_strategy"] = name
        if name in args.random:
            layers = model.config.num_hidden_layers
            spec["assistant_kwargs"] = options_of(name, CANDIDATES, layers)
        if cuda:
            recording = CompileConfig(backend="cudagraphs")
            spec |= {"cache_implementation": "static", "compile_config": recording}
        if get_method(name).needs_adapter:
            model.set_adapter(name)
    free_memory()
    begin_peak(cuda)
    ticks, start = Ticks(ids), time.perf_counter()
    own = spec or {"stopping_criteria": [ticks]}
    with recorded() as found:
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None,
            max_new_tokens=args.new_tokens, **own,
        )  # fmt: skip
    synchronize(ids.device)
    whole, seconds = time.perf_counter() - start, [step["seconds"] for step in found[1:-1]]
    seconds = seconds or [b - a for a, b in zip(ticks.marks, ticks.marks[1:])]
    stats = hf_spec.last_stats(model)
    tau = stats.mean_accepted_tokens if spec and stats is not None else 1.0
    ms = 1e3 * statistics.median(seconds[len(seconds) // 2 :])
    first = found[0]["seconds"] if spec else ticks.marks[0] - start
    return {
        "prompt_s": first, "ms": ms, "tau": tau, "tokens_per_second": 1e3 * tau / ms,
        "call_s": whole, "peak_gib": peak(cuda), "ids": output[0, ids.shape[1] :].tolist(),
    }  # fmt: skip


def begin_peak(cuda: bool) -> None:
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    elif os.path.exists("/proc/self/clear_refs"):
        Path("/proc/self/clear_refs").write_text("5")


def peak(cuda: bool) -> float:
    """Most memory in GiB since :func:`begin_peak`, with the weights; 0 where it is not known."""
    if cuda:
        return torch.cuda.max_memory_allocated() / 2**30
    if not os.path.exists("/proc/self/status"):
        return 0.0
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kilobytes) / 2**20


def measured(args: argparse.Namespace) -> Iterator[Row]:
    tokenizer, model = AutoTokenizer.from_pretrained(args.model), prepare(args)
    model.set_attn_implementation(args.attention)
    for context in args.contexts:
        ids = prompt_of(args, tokenizer, context)
        for turn in range(args.rounds):
            outputs = []
            for name in args.contenders:
                row: Row = {"context": context, "contender": name, "round": turn}
                if time.monotonic() > args.ends:
                    yield {**row, "error": "past the deadline"}
                    continue
                try:
                    row |= timed(args, model, ids, name)
                    outputs.append(row.pop("ids"))
                    row["same"] = outputs[-1] == outputs[0]
                except (RuntimeError, ValueError) as error:
                    row["error"] = first_line(error)
                yield {**row, "load": os.getloadavg()[0]}


def table(rows: Sequence[Row]) -> str:
    """Medians over rounds; speed over the first contender of a context."""
    lines, base = [], dict[int, float]()
    keys = dict.fromkeys((row["context"], row["contender"]) for row in rows)
    for context, name in keys:
        some = [r for r in rows if (r["context"], r["contender"]) == (context, name) and "ms" in r]
        if not some:
            lines.append([f"{context:,}", name, "not measured", *[""] * 6])
            continue
        prompt, ms, tau, speed, most = (
            statistics.median(row[key] for row in some)
            for key in ("prompt_s", "ms", "tau", "tokens_per_second", "peak_gib")
        )
        ratio = speed / base.setdefault(context, speed)
        same = f"{sum(row['same'] for row in some)}/{len(some)}"
        lines.append([
            f"{context:,}", name, f"{prompt:.2f}", f"{ms:.2f}", f"{tau:.2f}", f"{speed:.1f}",
            f"{ratio:.2f}x", f"{most:.2f}", same,
        ])  # fmt: skip
    heads = ["context", "", "prompt, s", "ms a step", "tau", "tokens/s", "speed", "GiB", "same"]
    return aligned(heads, lines, 2)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="a Llama: a folder, or its name on the Hub")
    add("--adapter", type=Path, action="append", default=[], help="its adapters' folders")
    add("--shape", choices=("8b", "double", "as it is"), default="8b" if cuda else "as it is",
        help="default: %(default)s")  # fmt: skip
    contexts = "1024,8192,32768,131072" if cuda else "4096,8192"
    add("--contexts", default=contexts, help="tokens of a prompt (default: %(default)s)")
    names = "plain,prompt_lookup,medusa,eagle3"
    names = names if cuda else f"{TRANSFORMERS},{names}"
    add("--contenders", default=names, help="the first one counts as 1 (default: %(default)s)")
    add("--attention", default=TREE_ATTENTION if cuda else "sdpa", help="default: %(default)s")
    add("--new-tokens", type=int, default=96, help="of a call (default: %(default)s)")
    add("--rounds", type=int, default=1 if cuda else 3, help="default: %(default)s")
    add("--threads", type=int, default=None, help="of a CPU")
    add("--busy", action="store_true", help="one thread's CPU seconds, where others run, too")
    add("--deadline", type=float, default=220.0 if cuda else 1e5, help="default: %(default)s s")
    add("--output", type=Path, default=Path("contexts.json"), help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        args.contexts = whole_numbers("--contexts", args.contexts)
        args.contenders = args.contenders.split(",")
        for name in args.contenders:
            name == TRANSFORMERS or get_method(name)
        if args.new_tokens < 8 or args.rounds < 1:
            raise ValueError("give --new-tokens of 8 or more, and --rounds of 1 or more")
    except ValueError as error:
        parser.error(first_line(error))
    args.device = torch.device("cuda" if cuda else "cpu")
    args.dtype = torch.bfloat16 if cuda else torch.float32
    args.ends, args.random = time.monotonic() + args.deadline, set[str]()
    if args.busy:
        args.threads, time.perf_counter = 1, time.process_time
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args, rows = parse(argv), list[Row]()
    for row in measured(args):
        rows.append(row)
        shown = {key: round(x, 3) if isinstance(x, float) else x for key, x in row.items()}
        print(*(f"{key} {value}" for key, value in shown.items()), sep=", ", flush=True)
        write_atomically(args.output, json.dumps(rows, indent=1))
    print(f"\n{table(rows)}\n\nwritten to {args.output}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
