"""``hf-spec warmup``."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

import typer

from hf_spec.cli import options as opt
from hf_spec.cli.common import progress_bar, taking_part
from hf_spec.model.loading import load_model


def warmup(
    model: opt.Model,
    strategies: Annotated[
        str | None,
        typer.Option(help="Comma-separated.  [default: those of the adapters, else prompt_lookup]"),
    ] = None,
    adapter: opt.Adapters = None,
    strategy_kwargs: opt.KwargsByName = None,
    batch_size: Annotated[str, typer.Option(help="One size, or several: 1,2,4.")] = "1",
    max_length: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens of prompt and output together.")
    ] = 1024,
    do_sample: Annotated[
        bool, typer.Option("--do-sample", help="For calls that sample, whose graphs differ.")
    ] = False,
    backend: Annotated[str, typer.Option(help="Backend of torch.compile.")] = "inductor",
    dtype: opt.Dtype = "bfloat16",
    device: opt.Device = None,
    threads: opt.Threads = None,
) -> None:
    """Compile steps in advance, for calls with cache_implementation='static'.

    The compiler caches its results on disk (TORCHINDUCTOR_CACHE_DIR). A later process with the same
    model, sizes, versions and hardware loads them in seconds instead of minutes. Within a process,
    use hf_spec.warm_up().

    \b
    Examples:
      hf-spec warmup --model Qwen/Qwen3-0.6B
      hf-spec warmup --model M --adapter ./medusa --batch-size 1,8 --max-length 2048
    """
    from transformers import CompileConfig

    import hf_spec
    from hf_spec.bench import contenders as lineup

    sizes = opt.whole_numbers("--batch-size", batch_size)
    adapters, names, options = taking_part(adapter, strategies, strategy_kwargs, "prompt_lookup")
    chosen = [one for one in lineup.contenders(names, options, adapters) if not one.stock]
    if not chosen:
        raise ValueError(
            f"--strategies {strategies!r}: only strategies of hf_spec are compiled in advance; "
            "name one of 'hf-spec strategies'"
        )
    opt.check_backend(backend)
    loaded, _ = load_model(model, dtype, device, adapters=adapters)
    for contender in chosen:
        if contender.adapters:
            loaded.set_adapter(list(contender.adapters))
        typer.echo(f"{contender.name}: compiling, which may take minutes ...", err=True)
        start = time.perf_counter()
        with progress_bar(f"{contender.name}: graphs made") as progress:
            made = hf_spec.warm_up(
                loaded, batch_sizes=sizes, max_length=max_length,
                progress=partial(progress, total=None), do_sample=do_sample,
                compile_config=CompileConfig(backend=backend), **contender.kwargs,
            )  # fmt: skip
        seconds = time.perf_counter() - start
        stats = hf_spec.last_stats(loaded)
        refused = stats.details["compiled"]["refused"] if stats else []
        typer.echo(f"{contender.name}: {made} graphs in {seconds:.0f} seconds")
        for reason in refused:
            typer.echo(f"{contender.name}: some steps will run uncompiled: {reason}", err=True)
    if backend == "inductor":
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        typer.echo(f"kept in {cache_dir()}")
