"""Writes the tables of ``docs/guides/models.md`` from what the sweep finds."""

import re
from pathlib import Path

import transformers

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "models.md"
BEGIN, END = "<!-- tables of the sweep: begin -->\n", "<!-- tables of the sweep: end -->\n"

#: By strategy, what the sweep says of a model type.
Outcomes = dict[str, dict[str, str]]

#: Names under which people look for models, and their model types.
FAMILIES: dict[str, tuple[str, ...]] = {
    "Llama 2, Llama 3, TinyLlama, SmolLM2, Vicuna, Yi, DeepSeek-R1-Distill-Llama": ("llama",),
    "Llama 4": ("llama4_text",),
    "SmolLM3": ("smollm3",),
    "Qwen2, Qwen2.5": ("qwen2",),
    "Qwen2-MoE": ("qwen2_moe",),
    "Qwen3": ("qwen3",),
    "Qwen3-MoE (30B-A3B, 235B-A22B)": ("qwen3_moe",),
    "Qwen3-Next": ("qwen3_next",),
    "Qwen3.5": ("qwen3_5_text", "qwen3_5_moe_text"),
    "Mistral": ("mistral",),
    "Ministral": ("ministral", "ministral3"),
    "Mixtral": ("mixtral",),
    "Gemma 1, 2": ("gemma", "gemma2"),
    "Gemma 3": ("gemma3_text",),
    "Gemma 3n": ("gemma3n_text",),
    "Gemma 4": ("gemma4_text",),
    "RecurrentGemma": ("recurrent_gemma",),
    "Phi-1.5, Phi-2": ("phi",),
    "Phi-3, Phi-4-mini": ("phi3",),
    "Phi-3.5-MoE": ("phimoe",),
    "DeepSeek-V2": ("deepseek_v2",),
    "DeepSeek-V3, DeepSeek-R1": ("deepseek_v3",),
    "DeepSeek-V3.2": ("deepseek_v32",),
    "DeepSeek-V4": ("deepseek_v4",),
    "gpt-oss": ("gpt_oss",),
    "GLM-4": ("glm", "glm4"),
    "GLM-4.5, GLM-4.6": ("glm4_moe",),
    "GLM-5": ("glm_moe_dsa",),
    "MiniMax-Text-01": ("minimax",),
    "MiniMax-M2": ("minimax_m2",),
    "MiniMax-M3": ("minimax_m3_vl_text",),
    "Kimi-Linear": ("kimi_linear",),
    "Nemotron": ("nemotron",),
    "Nemotron-H, Nemotron 3": ("nemotron_h",),
    "Granite 3": ("granite", "granitemoe"),
    "Granite 4": ("granitemoehybrid",),
    "LFM2": ("lfm2", "lfm2_moe"),
    "LFM3": ("lfm3",),
    "Falcon": ("falcon",),
    "Falcon-H1": ("falcon_h1",),
    "Falcon-Mamba": ("falcon_mamba",),
    "Mamba, Mamba-2": ("mamba", "mamba2"),
    "Jamba": ("jamba",),
    "Zamba, Zamba2": ("zamba", "zamba2"),
    "Bamba": ("bamba",),
    "RWKV": ("rwkv",),
    "xLSTM": ("xlstm",),
    "OLMo, OLMo 2, OLMo 3": ("olmo", "olmo2", "olmo3"),
    "OLMoE": ("olmoe",),
    "OLMo-Hybrid": ("olmo_hybrid",),
    "Command R": ("cohere",),
    "Command R7B, Command A": ("cohere2",),
    "EXAONE 4": ("exaone4",),
    "Hunyuan": ("hunyuan_v1_dense", "hunyuan_v1_moe"),
    "ERNIE 4.5": ("ernie4_5", "ernie4_5_moe"),
    "Seed-OSS": ("seed_oss",),
    "MiniCPM3": ("minicpm3",),
    "StarCoder": ("gpt_bigcode",),
    "StarCoder2": ("starcoder2",),
    "StableLM": ("stablelm",),
    "CodeGen": ("codegen",),
    "GPT-2": ("gpt2",),
    "GPT-Neo": ("gpt_neo",),
    "GPT-J": ("gptj",),
    "GPT-NeoX, Pythia": ("gpt_neox",),
    "OPT": ("opt",),
    "BLOOM": ("bloom",),
    "MPT": ("mpt",),
    "DBRX": ("dbrx",),
    "BitNet": ("bitnet",),
    "Inkling": ("inkling_text",),
    "BERT, RoBERTa as decoders": ("bert", "roberta"),
    "Whisper's decoder without an encoder": ("whisper",),
}

#: Why single strategies are refused: what errors say, and what the page says.
REASONS = {
    "several shapes": "keys and values of several shapes, and a prefix KV is of one",
    "have no KV of their own": "layers without keys and values of their own, for a prefix KV",
    "more than its decoder's final states": "a layer between decoder and output embeddings, which "
    "heads and probes would misread",
    "cannot find the decoder layers": "decoder layers that are not found in one list",
    "to skip": "layers without an MLP or attention of a known name",
    "refused with padding": "a mask that plain generation gets wrong where a batch is padded",
}
OTHERWISE = "a trial that differed from plain generation or raised an error"

#: What errors add for the caller of a single model.
_REMEDY = re.compile(r"[.,;]? (Generate without|Choose|Load it|Call|Pass a|or try|\(relative).*")


def tables(outcomes: Outcomes) -> str:
    """The tables, as Markdown."""
    strategies = sorted({name for found in outcomes.values() for name in found})
    release = ".".join(transformers.__version__.split(".")[:2])
    works = {
        kind: [name for name in strategies if found.get(name, "").startswith("exact")]
        for kind, found in outcomes.items()
    }
    built = {
        kind for kind, found in outcomes.items()
        if not next(iter(found.values())).startswith("not built")
    }  # fmt: skip
    refused = sorted(kind for kind in built if _refused(outcomes[kind]))
    every = sorted(kind for kind in built if len(works[kind]) == len(strategies))
    some = sorted(built - set(refused) - set(every))
    lines = [
        f"Transformers {release} has {len(outcomes)} causal model types. Every strategy works with "
        f"{len(every)} of them, some strategies with {len(some)}, and none with {len(refused)}. "
        f"{len(outcomes) - len(built)} types have no tiny version that could be tried.",
        "",
        "## By name",
        "",
        "| models | `model_type` | " + " | ".join(f"`{name}`" for name in strategies) + " |",
        "| --- | --- |" + " :-: |" * len(strategies),
    ]
    for family, kinds in FAMILIES.items():
        present = [kind for kind in kinds if kind in built]
        marks = ["yes" if all(name in works[kind] for kind in present) else "–"
                 for name in strategies]  # fmt: skip
        if present:
            listed = ", ".join(f"`{kind}`" for kind in present)
            lines.append(f"| {family} | {listed} | {' | '.join(marks)} |")
    lines += ["", "## All model types", "", f"With every strategy: {_names(every)}.", ""]
    lines += ["| `model_type` | works | what is in the way of the others |", "| --- | --- | --- |"]
    groups: dict[tuple[str, str], list[str]] = {}
    for kind in some:
        ways = {_reason(text) for text in outcomes[kind].values() if not text.startswith("exact")}
        alone = [name for name, text in outcomes[kind].items() if "refused with padding" in text]
        works_here = _names(works[kind]) or f"{_names(sorted(alone))}, without padding"
        groups.setdefault((works_here, "; ".join(sorted(ways))), []).append(kind)
    lines += [f"| {_names(kinds)} | {names} | {ways} |" for (names, ways), kinds in groups.items()]
    lines += ["", "With none:", "", "| type | reason |", "| --- | --- |"]
    lines += [f"| `{kind}` | {_why(outcomes[kind])} |" for kind in refused]
    others = sorted(set(outcomes) - built)
    if others:
        lines += ["", f"Not built tiny: {_names(others)}."]
    return "\n".join(lines) + "\n"


def write(outcomes: Outcomes) -> None:
    """Put the tables into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{tables(outcomes)}\n{END}{rest.partition(END)[2]}")


def listed() -> dict[str, str]:
    """What the page says of the model types with which no strategy works."""
    part = PAGE.read_text().partition("With none:")[2]
    return dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", part, re.MULTILINE))


def _refused(found: dict[str, str]) -> bool:
    return all(text.startswith("refused:") for text in found.values())


def _reason(outcome: str) -> str:
    return next((said for key, said in REASONS.items() if key in outcome), OTHERWISE)


def _why(found: dict[str, str]) -> str:
    """The error of the strategy that needs least of a model, without its remedy."""
    text = found["prompt_lookup"].removeprefix("refused: ")
    text = text.replace(" does not work with prompt_lookup: it", "")
    text = text.replace(" does not work with prompt_lookup", "")
    return _REMEDY.sub("", text).replace("|", "\\|")


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
