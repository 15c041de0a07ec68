"""Recurring sizes: code is compiled for each shape."""


def bucket(count: int) -> int:
    """The smallest power of two that is at least ``count``; 0 for 0."""
    return 1 << (count - 1).bit_length() if count else 0
