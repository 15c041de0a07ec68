"""Decides how much to draft; the only package that uses measured times."""
