"""Drafters over predictors, growing of trees, the policy, lookups and rollouts."""
