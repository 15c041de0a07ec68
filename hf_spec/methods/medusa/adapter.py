"""Registers the MEDUSA type, an adapter of heads."""

from hf_spec.adapters.tuner import register
from hf_spec.drafting.heads import HeadsAdapter, heads_loss
from hf_spec.methods.medusa.config import MedusaConfig

register(MedusaConfig, HeadsAdapter, heads_loss)
