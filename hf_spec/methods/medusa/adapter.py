"""Registers the MEDUSA type, an adapter of heads."""

from hf_spec.methods.heads import HeadsAdapter, heads_loss
from hf_spec.methods.medusa.config import MedusaConfig
from hf_spec.methods.peft_bridge import register

register(MedusaConfig, HeadsAdapter, heads_loss)
