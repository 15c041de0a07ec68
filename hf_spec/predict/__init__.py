"""Drafters that predict a block of tokens in one forward of a small decoder: DFlash and its kin."""
