"""``token_recycling``: drafts from what the model itself predicted before, without any training."""

from dataclasses import dataclass

from hf_spec.core.checks import MAX_DRAFT_TOKENS, choice, count, setting
from hf_spec.draft.options import DraftOptions
from hf_spec.methods.registry import Method
from hf_spec.predict.recycling import RecyclingPredictor


@dataclass(frozen=True)
class RecyclingOptions(DraftOptions):
    """Options of ``token_recycling``."""

    max_depth: int = setting(8, rule=count(1, MAX_DRAFT_TOKENS))
    table_size: int = setting(1 << 17, rule=count(1 << 10, 1 << 24))
    keep_table: bool = setting(True, rule=choice(True, False))


METHOD = Method(
    name="token_recycling",
    summary="what the model predicted after the same tokens before, without any training",
    options=RecyclingOptions,
    predictor=RecyclingPredictor,
)
