"""What follows the rows of a batch, by one description."""

from typing import Any, NamedTuple

import pytest
import torch

from hf_spec.core.rows import FollowsRows, follows


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[str]


class Inner(FollowsRows):
    of_rows = ("names",)

    def __init__(self, names: str):
        self.names = list(names)


class Part(FollowsRows):
    of_rows = ("numbers", "pair", "by_name", "inner", "nothing")

    def __init__(self, names: str):
        codes = torch.tensor([[ord(name)] for name in names])
        self.numbers, self.pair = codes, Pair(-codes, [*names.upper()])
        self.by_name, self.inner = {"twice": 2 * codes}, Inner(names)
        self.nothing: Any = None
        self.other = "untouched"

    def check(self, names: str) -> None:
        codes = [[ord(name)] for name in names]
        assert self.numbers.tolist() == codes and (-self.pair.first).tolist() == codes
        assert self.by_name["twice"].tolist() == [[2 * code] for (code,) in codes]
        assert self.inner.names == [*names] and self.pair.second == [*names.upper()]
        assert isinstance(self.pair, Pair) and self.nothing is None and self.other == "untouched"


def test_rows_leave_and_come() -> None:
    part = Part("abcd")
    inner = part.inner
    part.select([3, 1])
    part.check("db")
    part.join(Part("xyz"))
    part.check("dbxyz")
    part.select([4, 0, 2])
    part.check("zdx")
    part.select([0, 1, 2, 0])  # filled up
    part.check("zdxz")
    assert part.inner is inner


def test_something_of_some_rows_alone() -> None:
    part, other = Part("a"), Part("b")
    other.nothing = torch.zeros(1)
    with pytest.raises(ValueError, match=r"Part\.nothing is NoneType .* and Tensor .* define join"):
        part.join(other)


def test_parts_that_select_by_their_own_code_join_by_it() -> None:
    def select(self: Any, rows: Any) -> None: ...

    def join(self: Any, other: Any) -> None: ...

    selects = type("Selects", (Inner,), {"select": select})
    both = type("Both", (selects,), {"join": join})
    joins = type("Joins", (Inner,), {"join": join})
    parts = [Inner(""), selects(""), both(""), type("Below", (both,), {})(""), joins("")]
    assert [follows(part) for part in parts] == [True, False, True, True, True]
