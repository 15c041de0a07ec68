"""What a call changes of a model: in which order, for how long, and for whom."""

import copy
import functools
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_spec.modeling_patches import per_call
from hf_spec.modeling_patches.per_call import Changes, plain, step_aside


class Block(nn.Module):
    """Gives ``2 x + shift``, where the factor is a method's."""

    def factor(self) -> int:
        return 2

    def forward(self, x: Tensor, shift: int = 0) -> Tensor:
        return self.factor() * x + shift


class Model(nn.Module):
    """Two blocks in a row: ``4 x``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x), shift=0)


ONE = torch.ones(1)


def value(model: nn.Module, changes: Changes | None = None) -> int:
    return int(model(ONE) if changes is None else changes.run(model, ONE))


def adding(model: Model, number: int) -> Changes:
    """Changes under which the first block gives so much more: the model ``4 x + 2 number``."""
    changes = Changes()
    changes.after(model.first, lambda args, kwargs, output: output + number)
    return changes


def everything(model: Model) -> Changes:
    """A change of each kind; the model gives 3 * (2 (1 + 1) + 5) = 27."""
    changes = adding(model, 5)
    changes.before(model.first, lambda args, kwargs: ((args[0] + 1,), kwargs))
    changes.instead(model.second, "factor", lambda: 3)
    return changes


# -- what the changes do -------------------------------------------------------------------------


def test_hooks_run_in_the_order_in_which_they_were_added() -> None:
    model, changes, seen = Model(), Changes(), []

    def before(number: int) -> Callable[..., Any]:
        def hook(args: Any, kwargs: Any) -> Any:
            seen.append((int(args[0]), dict(kwargs)))
            return (args[0] * 10,), {"shift": number}

        return hook

    def after(number: int) -> Callable[..., Any]:
        def hook(args: Any, kwargs: Any, output: Any) -> Any:
            seen.append((int(args[0]), dict(kwargs), int(output)))
            return output + number

        return hook

    changes.after(model.second, after(1))
    changes.before(model.second, before(7))
    changes.before(model.second, before(8))
    changes.after(model.second, after(2))
    assert value(model, changes) == 2 * 200 + 8 + 1 + 2
    assert seen == [
        (2, {"shift": 0}), (20, {"shift": 7}),
        (200, {"shift": 8}, 408), (200, {"shift": 8}, 409),
    ]  # fmt: skip


def test_a_function_instead_of_a_method() -> None:
    model, changes = Model(), Changes()
    model.first.factor = lambda: 7  # type: ignore[method-assign]
    changes.instead(model.first, "factor", lambda: 5)
    changes.instead(model.second, "forward", lambda x, shift: x + 100)
    assert value(model, changes) == 5 + 100
    changes.instead(model.second, "forward", lambda x, shift: x)  # the last one counts
    assert value(model, changes) == 5
    assert value(model) == 14
    assert plain(model.first, "factor")() == 7, "what the instance had"
    assert plain(model.second, "factor")() == 2


def test_a_dispatcher_that_somebody_has_wrapped_since() -> None:
    model = Model()

    def more() -> Changes:
        changes = Changes()
        changes.instead(model.first, "forward", lambda x: plain(model.first, "forward")(x) + 1)
        return changes

    assert value(model, more()) == 2 * (2 + 1)
    inside = model.first.forward
    model.first.forward = lambda x: 10 * inside(x)  # type: ignore[method-assign]
    assert value(model, more()) == 2 * (20 + 1) and value(model) == 40
    model.first.forward = inside  # type: ignore[method-assign]
    assert value(model, more()) == 2 * (2 + 1) and value(model) == 4


# -- for how long --------------------------------------------------------------------------------


def test_calls_within_calls() -> None:
    """Hooks of all that run, the outermost first; of functions the innermost."""
    model = Model()
    outer, inner = adding(model, 1), Changes()
    inner.after(model.first, lambda args, kwargs, output: output * 10)
    for changes, number in ((outer, 3), (inner, 5)):
        changes.instead(model.second, "factor", lambda number=number: number)
    outer.instead(model.first, "factor", lambda: 4)

    def nested() -> list[int]:
        return [
            value(model), value(model, inner), int(inner.run_alone(model, ONE)),
            int(Changes().run_alone(model, ONE)), value(model),
        ]  # fmt: skip

    # 3 (4 + 1), 5 * 10 (4 + 1), 5 * 10 * 2, stock, 3 (4 + 1)
    assert outer.run(nested) == [15, 250, 100, 4, 15]
    assert outer.run(outer.run, model, ONE) == 3 * (4 + 1 + 1)
    assert value(model) == 4


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("run", [Changes.run, Changes.run_alone])
def test_the_context_ends_however_the_call_ends(run: Any, error: type[BaseException]) -> None:
    model = Model()
    changes, outer = everything(model), adding(model, 1)

    def fails(*args: Any) -> None:
        raise error

    changes.after(model.second, fails)

    def tried() -> int:
        with pytest.raises(error):
            run(changes, model, ONE)
        return value(model)

    assert tried() == 4
    assert outer.run(tried) == 6 and value(model) == 4
    assert per_call._running.get() == ()


# -- for whom ------------------------------------------------------------------------------------


def test_other_threads_see_nothing() -> None:
    """A thread runs the model at the very moment in which another one's changes are at work."""
    model, seen = Model(), []
    changes = everything(model)

    def other(*args: Any) -> None:
        thread = threading.Thread(target=lambda: seen.append(value(model)))
        thread.start()
        thread.join()

    changes.before(model.first, other)
    changes.after(model.second, other)
    assert value(model, changes) == 27 and seen == [4, 4]
    assert value(Model(), changes) == 4, "nor do other models"


# -- what stays on the model ---------------------------------------------------------------------


def test_threads_put_dispatchers_on_one_after_the_other() -> None:
    meeting, results = threading.Barrier(2), {}

    class Meeting(Block):
        def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
            with suppress(threading.BrokenBarrierError):  # where nobody else gets here meanwhile
                meeting.wait(0.2)
            return super().register_forward_hook(*args, **kwargs)

    model = Model()
    model.first = Meeting()

    def work(number: int) -> None:
        results[number] = value(model, adding(model, number)), value(model)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: (4, 4), 1: (6, 4)} and len(model.first._forward_hooks) == 1


def seven() -> int:
    return 7


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_dispatchers_of_their_own(copied: Callable[[Any], Any]) -> None:
    model = Model()
    model.second.factor = seven  # type: ignore[method-assign]
    assert value(model, everything(model)) == 27
    other = copied(model)
    assert value(other) == 14 and value(other, everything(model)) == 14
    assert value(other, everything(other)) == 27 and value(model, everything(other)) == 14
    assert len(other.first._forward_hooks) == len(other.first._forward_pre_hooks) == 1
    del model
    gc.collect()
    assert value(other, everything(other)) == 27


def test_a_model_is_freed_at_once() -> None:
    """Without the garbage collector, which may come late where memory is on a device."""
    gc.collect()
    gc.disable()
    try:
        model = Model()
        assert value(model, everything(model)) == 27
        refs = [weakref.ref(module) for module in model.modules()]
        del model
        assert [found() for found in refs] == [None] * 3
    finally:
        gc.enable()


# -- torch.compile -------------------------------------------------------------------------------


def test_compiled_code_is_stock() -> None:
    """In one graph, compiled before dispatchers were put on and after it."""
    model = Model()
    wrapper = torch.compile(model, backend="eager", fullgraph=True)
    model.first.compile(backend="eager", fullgraph=True)
    assert [value(wrapper), value(model)] == [4, 4]
    changes = everything(model)
    assert [value(wrapper), value(model)] == [4, 4]
    torch.compiler.reset()
    assert [value(wrapper), value(model)] == [4, 4]
    assert value(wrapper, changes) == 4, "hence `step_aside`"


def test_what_is_run_with_changes_is_not_compiled() -> None:
    """Also where all around it is, as in a training step."""
    model = Model()
    changes = everything(model)

    def step(x: Tensor) -> Tensor:
        return changes.run(model, x + 1) - changes.run_alone(model, x)

    expected = step(ONE)
    compiled = torch.compile(step, backend="eager")
    assert int(compiled(ONE)) == int(expected) == 33 - 27
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):  # rather than wrong without a word
        torch.compile(step, backend="eager", fullgraph=True)(ONE)


def compile_forward(model: Any, **how: Any) -> None:
    model.forward = torch.compile(model.forward, **how)


def compile_module(model: Any, **how: Any) -> None:
    model.compile(**how)


def compile_inside(model: Any, **how: Any) -> None:
    model.first = torch.compile(model.first, **how)
    model.second.compile(**how)
    compile_forward(model.second, **how)


@pytest.mark.parametrize("compiled", [compile_forward, compile_module, compile_inside])
@pytest.mark.parametrize("before", [False, True], ids=["dispatchers after", "dispatchers before"])
def test_what_is_compiled_steps_aside(
    compiled: Callable[..., None], before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = Model()
    if before:
        changes = everything(model)
        changes.instead(model, "forward", model.forward)
        changes.instead(model.second, "forward", model.second.forward)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled(model, backend=backend)
    changes = everything(model)
    for _ in range(2):
        step_aside(model)
        assert value(model, changes) == 27 and not graphs
        assert [*inspect.signature(model.second.forward).parameters] == ["x", "shift"]
    assert caplog.text.count("is compiled by torch.compile") == 1
    assert value(model) == 4 and graphs, "compiled where nothing is changed"
    torch.compiler.reset()
    outer = torch.compile(model, backend="eager")
    assert value(outer) == 4
    torch.compiler.reset()


def test_code_that_is_wrapped_around_compiled_code_is_refused() -> None:
    model: Any = Model()
    step_aside(model)
    inner = torch.compile(model.second.forward, backend="eager")

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) * 1

    model.second.forward = wrapper
    with pytest.raises(ValueError, match="second of this Model is compiled and then wrapped"):
        step_aside(model)
