"""The heads that a block drafter can have, by the value of ``markov_head``."""

from hf_spec.drafting.block_diffusion.domino import Domino
from hf_spec.drafting.block_diffusion.dspark import (
    GatedHead,
    RecurrentHead,
    Selector,
    VanillaHead,
)
from hf_spec.drafting.block_diffusion.dspine import DSpine
from hf_spec.drafting.block_diffusion.head import BlockHead
from hf_spec.drafting.block_diffusion.xpress import XPress

HEADS: dict[str, type[BlockHead]] = {
    "vanilla": VanillaHead,
    "gated": GatedHead,
    "rnn": RecurrentHead,
    "selector": Selector,
    "domino": Domino,
    "dspine": DSpine,
    "xpress": XPress,
}
