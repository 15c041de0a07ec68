"""The heads that a block drafter can have, by the value of ``markov_head``."""

from hf_spec.drafting.block_diffusion.dspark import (
    GatedHead,
    RecurrentHead,
    Selector,
    VanillaHead,
)
from hf_spec.drafting.block_diffusion.head import BlockHead

HEADS: dict[str, type[BlockHead]] = {
    "vanilla": VanillaHead,
    "gated": GatedHead,
    "rnn": RecurrentHead,
    "selector": Selector,
}
