"""What the samplers of ``hf-spec search`` find in equally many trials.

    python benchmarks/search_samplers.py MODEL [--trials 60] [--seeds 0 1] [--samplers gp tpe]

The objective is modelled, so that it can be reproduced: the time of a call is what its forwards
cost, by the costs of docs/methods/layer_skip.md. Prints a row for each sampler and seed: the best
speed over plain decoding by number of trials, on the prompts of the search (the first of those that
ship) and, of the last best, on as many others; and the seconds that choosing trials took.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_spec.model.loading import load_model
from hf_spec.tools.bench.prompts import BUNDLED, encode_prompts, read_prompts, spread
from hf_spec.tools.bench.session import Session
from hf_spec.tools.search.layers import SAMPLERS, TRIAL_OPTIONS, LayerSearch, Settings

#: Milliseconds of a verifying forward, of a drafting one, and of each attention and MLP in it.
VERIFY, DRAFT, SUBLAYERS = 10.4, 1.1, {"skip_attention": 0.42, "skip_mlp": 0.37}
NEW_TOKENS = 32


def modelled(layers: int) -> Any:
    """``Session.generate`` with the seconds that the forwards are modelled to take."""
    original = Session.generate

    def generate(self: Any, contender: Any, prompts: Any, **kwargs: Any) -> Any:
        _, rows, steps, stats = original(self, contender, prompts, **kwargs)
        spent = VERIFY * steps
        options = contender.kwargs.get("assistant_kwargs")
        if options is not None and stats is not None:
            kept = sum(cost * (layers - len(options[kind])) for kind, cost in SUBLAYERS.items())
            spent += (DRAFT + kept) * stats.num_draft_forwards
        return spent / 1000, rows, steps, stats

    return generate


def speed(search: LayerSearch, session: Session, choice: Any, ids: Sequence[Any]) -> float:
    """Tokens per second with a choice, over plain decoding."""
    contender = search.contender(choice, **TRIAL_OPTIONS)
    made = [session.generate(contender, [row]) for row in ids]
    tokens = sum(len(rows[0]) for _, rows, *_ in made)
    return tokens * VERIFY / 1000 / sum(spent for spent, *_ in made)


def main(arguments: argparse.Namespace) -> None:
    """Search and print."""
    model, tokenizer = load_model(arguments.model, arguments.dtype, "cpu")
    prompts = spread(read_prompts(BUNDLED), 2 * arguments.limit)
    seen, others = prompts[::2], prompts[1::2]
    held_out, _ = encode_prompts(model, tokenizer, others, NEW_TOKENS)
    stages = [share * arguments.trials // 3 for share in (1, 2, 3)]
    print("sampler, seed", *(f"{n} trials" for n in stages), "others", "choosing, s", sep=" | ")
    for seed in arguments.seeds:
        for sampler in arguments.samplers:
            settings = Settings(max_new_tokens=NEW_TOKENS, seed=seed, sampler=sampler)
            with tempfile.TemporaryDirectory() as folder, Timed() as timed:
                search = LayerSearch(model, tokenizer, seen, Path(folder), settings)
                layers = max(map(len, search.sublayers.values()))
                Session.generate = timed.excluding(modelled(layers))  # type: ignore[method-assign]
                found = []
                for count in stages:
                    search.search(count, lambda *_: None)
                    found.append(search.ranked(1)[0].value * VERIFY / 1000)
                seconds = timed.seconds
                choice = search.choice(search.ranked(1)[0].params)
                options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
                with Session.open(model, tokenizer, options, []) as session:
                    found.append(speed(search, session, choice, held_out))
            print(
                f"{sampler}, {seed}",
                *(f"{one:.3f}x" for one in found),
                f"{seconds:.0f}",
                sep=" | ",
                flush=True,
            )


class Timed:
    """Seconds besides those of generating, and ``Session.generate`` as it was afterwards."""

    def __enter__(self) -> Timed:
        self.original, self.generating, self.began = Session.generate, 0.0, time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        Session.generate = self.original  # type: ignore[method-assign]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began - self.generating

    def excluding(self, generate: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return generate(*args, **kwargs)
            finally:
                self.generating += time.monotonic() - began

        return timed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--dtype", default="float32")
    main(parser.parse_args())
