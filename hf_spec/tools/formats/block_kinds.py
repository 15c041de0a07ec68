"""Kinds of released block drafters, and their fields in the formats of :mod:`.blocks`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hf_spec.tools.formats import tables
from hf_spec.tools.formats.tables import ANY, KIND, LAYERS, OF_DEEPSPEC

#: Types of layers that formats have; the first one where a config names another.
TYPES = ("qwen3", "gemma4_text")
#: Fields that choose what is drafted, in a part of the config of their own.
GROUP = "dflash_config"
#: The type that Transformers has as a model of its own, and prefixes of its names; of Domino's in
#: early files.
MUSE = "muse_glimmer_assistant"
NAMES = (
    ("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."), ("logit_head.", "")
)  # fmt: skip
#: Ends of tensors that files may have besides: the base's embeddings, and what is computed.
UNUSED = ("embed_tokens.weight", "rotary_emb.inv_freq", tables.MASK)
#: Of DSpine: whether its codes have been made.
READY = "transfer_ready"
#: Our fields and theirs: those of all, of DFlash 2 and of DSpark.
FIELDS = {name: name for name in ("block_size", "mask_token_id", "sample_from_anchor")}
SCALES = {
    "embedding_scale": "input_embedding_scale", "logit_scale": "output_multiplier",
    "logit_softcap": "final_logit_softcapping",
}  # fmt: skip
CONFIDENCE_HEAD = ("enable_confidence_head", "confidence_head_with_markov")
#: xPress' rank, and the width of its MLP as a multiple of that.
RANK, RATIO = "xpress_rank", "xpress_mlp_ratio"
IDS, CAUSAL = "aux_hidden_state_layer_ids", "sliding_window_non_causal"


class Kind(NamedTuple):
    """A kind of block drafters.

    Attributes:
        strategy: ours.
        name: in architectures.
        fields: our fields and theirs, besides those of all.
        head: its ``markov_head``; None if there is none, or a field says.
        tensors: what names of tensors begin with that it alone has.
        group: of its fields in flat configs.
    """

    strategy: str
    name: str
    fields: Mapping[str, str] = {}
    head: str | None = None
    tensors: str = ""
    group: str = GROUP


#: By ``speculators_model_type`` or ``projector_type``.
KINDS = {
    "dflash": Kind("dflash", "DFlash"),
    "dflash2": Kind(
        "dflash", "DFlash2", {
            "markov_rank": "selector_rank",
            **{name: name for name in ("selector_top_k", "conv_kernel_size", "conv_group_size")},
        }, "selector", "candidate_selector.",
    ),
    "dspark": Kind(
        "dspark", "DSpark", {"markov_rank": "markov_rank", "markov_head": "markov_head_type"}
    ),
    "domino": Kind(
        "dflash", "Domino", {
            "markov_rank": "emb_dim", "markov_width": "gru_hidden_dim",
            "markov_skips": "pure_draft_prefix_len", "sample_from_anchor": "shift_label",
        }, "domino", "prefix_gru.",
    ),
    "dspine": Kind(
        "dflash", "DSpine", {
            "markov_rank": "transfer_rank", "markov_width": "message_size",
            "selector_top_k": "top_k",
        }, "dspine", "injection.", "dspine_config",
    ),
    "xpress": Kind("dflash", "XPress", {"markov_rank": RANK}, "xpress", "refiner_head."),
}  # fmt: skip
#: Names of the flag of causal blocks: JetSpec's, NeMo's and vLLM's, SpecForge's. vLLM 0.32 reads
#: the last one first, and not the first one; in files of speculators it reads `CAUSAL` alone.
CAUSAL_BLOCK = ("causal_head", "causal", "is_causal")
#: Fields with the value that changes nothing.
NEUTRAL: dict[str, Any] = {
    "use_swa": False, "attention_sink_bias": False, "target_hidden_size": None,
    "attention_mode": "gqa",
}  # fmt: skip
#: Fields that are read, or say how a drafter was trained.
KNOWN = NEUTRAL | dict.fromkeys(
    (
        *FIELDS.values(), *(name for kind in KINDS.values() for name in kind.fields.values()),
        *SCALES.values(), *CONFIDENCE_HEAD, *CAUSAL_BLOCK, IDS, CAUSAL, OF_DEEPSPEC, RATIO,
        "draft_vocab_size", "num_jacobi_passes", "projector_type", "confidence_head_alpha",
        "num_anchors", "loss_decay_gamma", "ce_weight", "alignment_weight",
        "alignment_warmup_steps", "replacement_layers", "replacement_probability",
        "replacement_hold_ratio", "replacement_end_ratio", "candidate_mass_threshold",
    ),
    ANY,
)  # fmt: skip
#: Fields of every config of speculators.
OF_SPECULATORS = dict.fromkeys(
    (
        "architectures", "auto_map", "dtype", "torch_dtype", "model_type", "speculators_config",
        KIND, "speculators_version", "tie_word_embeddings", LAYERS, "transformers_version",
        "has_no_defaults_at_init", GROUP,
    ),
    ANY,
)  # fmt: skip
