"""What follows the rows of a batch, and what code takes and gives, by names of attributes."""

from typing import Any, NamedTuple

import pytest
import torch

from hf_spec.core.device import FollowsRows, Holds, follows


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[str]


class Inner(FollowsRows):
    of_rows = ("names",)

    def __init__(self, names: str):
        self.names = list(names)


class Part(FollowsRows):
    of_rows = ("pair", "by_name", "inner", "nothing")
    per_row = ("numbers",)

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


class Table(Holds):
    held = ("weight",)
    per_row = ("last",)
    layout = "by row"

    def __init__(self, first: int):
        self.weight, self.last = torch.tensor([first]), torch.tensor([first + 1])


class Code(Holds):
    held = ("tables", "by_name", "nothing")
    per_row = ("pair", "none")

    def __init__(self) -> None:
        self.tables, self.by_name = (Table(0), Table(2)), {"own": torch.tensor([4])}
        self.pair = Pair(torch.tensor([5]), torch.tensor([6]))  # type: ignore[arg-type]
        self.nothing, self.none = None, None
        self.other = "untouched"


def numbers(tensors: Any) -> list[int]:
    return [int(one) for one in tensors]


def test_code_takes_the_tensors_of_a_part_and_gives_some_anew() -> None:
    code = Code()
    fixed, changing = code.tensors(), code.changing()
    assert numbers(fixed) == [0, 2, 4] and numbers(changing) == [1, 3, 5, 6]
    assert code.layout == (("by row", "by row"), (("own", "tensor"),), "None")
    assert numbers(code.renewed()) == [5, 6]
    copied = code.using(iter(10 + one for one in fixed), iter(10 + one for one in changing))
    assert numbers(copied.tensors()) == [10, 12, 14]
    assert numbers(copied.changing()) == [11, 13, 15, 16]
    assert isinstance(copied.pair, Pair) and copied.other == "untouched"
    assert numbers([table.last for table in copied.tables]) == [11, 13]
    assert all(map(torch.Tensor.is_set_to, code.tensors() + code.changing(), fixed + changing))
    code.take(iter(copied.renewed()))
    assert numbers(code.tensors()) == [0, 2, 4] and numbers(code.changing()) == [1, 3, 15, 16]
