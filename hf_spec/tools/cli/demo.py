"""``hf-spec demo``."""

from pathlib import Path
from typing import Annotated, Any

from typer import Option, echo

from hf_spec.tools.cli import options as opt
from hf_spec.tools.cli.common import check_writable, load_library, show_results

#: Lines of a prompt and of its continuation that are shown.
SHOWN_LINES = 8


def demo(
    output: opt.Output = Path("hf-spec-demo"),
    model: Annotated[
        str | None,
        Option(help="Instead of the small one: a folder, or a repository on the Hub."),
    ] = None,
    limit: Annotated[int, Option(min=1, help="Prompts; there are 8, with --model 24.")] = 2,
    max_new_tokens: opt.NewTokens = 96,
    dtype: opt.Dtype = "float32",
    threads: Annotated[
        int | None,
        Option(min=1, help="CPU threads of torch.  [default: 1; with --model torch's choice]"),
    ] = None,
) -> None:
    """See a small model write the same code, faster.

    The model ships with the package and has read the modeling code of Transformers. It continues
    beginnings of Python classes, plainly and with each strategy; texts and times are compared. It
    takes half a minute. With --model, another model answers prompts of hf-spec bench; in a clone of
    the repository, with the adapters of hub_cards/adapters that fit it. Without --model, nothing is
    downloaded. Exits with an error if an output differs from plain generate's other than at a tie
    of two tokens, which float32 leaves none of in practice.

    \b
    Examples:
      hf-spec demo
      hf-spec demo --limit 8 --max-new-tokens 256
      hf-spec demo --model HuggingFaceTB/SmolLM2-135M-Instruct --dtype bfloat16
    """
    check_writable(output)
    echo("Loading PyTorch and Transformers, which takes a few seconds", err=True)
    load_library()

    from hf_spec.methods.registry import get_method
    from hf_spec.tools.bench.contenders import BASELINE, contenders
    from hf_spec.tools.bench.environment import environment_of
    from hf_spec.tools.bench.runner import run
    from hf_spec.tools.data import ALL
    from hf_spec.tools.demo.demo import FREE_STRATEGY, load

    # A second thread gains little on so small a model, and waits where others work, too.
    opt.use_threads(1 if threads is None and model is None else threads)
    loaded, tokenizer, adapters, prompts = load(model, dtype, limit)
    names = dict.fromkeys([FREE_STRATEGY, *(adapter.strategy for adapter in adapters)])
    lineup = contenders(names, adapters=adapters)
    count = f"{len(prompts)} prompt{'s' * (len(prompts) != 1)}"
    what = model or "a small model that ships with hf_spec"
    echo(
        f"{count}, up to {max_new_tokens} new tokens each, by {what}:\n"
        "with generate() as it is, and with"
    )
    for name in names:
        echo(f"  {name:14} {get_method(name).summary}")
    show = _Shown(tokenizer, prompts, [BASELINE.name, *(one.name for one in lineup)])
    result = run(loaded, tokenizer, prompts, lineup, max_new_tokens=max_new_tokens, seen=show.call)
    echo("")
    environment = environment_of(loaded, model or "demo model", None)
    show_results(result, environment, output, phases=False)
    echo("speedup: of tokens/s beside generate; tau: tokens per forward pass of the model")
    rows = [row for row in result.rows if row["task"] == ALL]
    if any(row["diverged"] for row in rows):
        raise ValueError("an output differs from plain generate's other than at a tie")
    ties = sum(row["diverged_at_tie"] for row in rows)
    but = f", but for {ties} that part where two tokens tie in this dtype" if ties else ""
    echo(f"Every output equals plain generate's{but}.")
    if model is None:
        echo("Your model: hf-spec demo --model MODEL; what suits it: hf-spec doctor --model MODEL")


class _Shown:
    """Prints calls as they end, those of a prompt in one order, the plain one first."""

    def __init__(self, tokenizer: Any, prompts: Any, order: list[str]):
        self.tokenizer, self.prompts, self.order = tokenizer, prompts, order
        self.made: dict[str, Any] = {}  # of the prompt at hand
        self.printed = self.number = 0

    def call(self, made: Any) -> None:
        """Print a measurement, once those before it in the order are printed."""
        if not self.made:
            self.number += 1
            echo(f"\n--- prompt {self.number} of {len(self.prompts)} ---")
            echo("\n".join(self.prompts[made.prompts[0]].text.rstrip().splitlines()[-SHOWN_LINES:]))
        self.made[made.strategy] = made
        while self.printed < len(self.order) and self.order[self.printed] in self.made:
            self._print(self.made[self.order[self.printed]])
            self.printed += 1
        if self.printed == len(self.order):
            self.made, self.printed = {}, 0

    def _print(self, made: Any) -> None:
        plain, speed = self.made[made.baseline], made.new_tokens / made.seconds
        line = f"{made.strategy:14} {made.new_tokens:4} tokens {made.seconds:7.2f} s"
        line += f" {speed:8.1f} tokens/s"
        if made is plain:
            text = self.tokenizer.decode(made.rows[0], skip_special_tokens=True)
            written = text.splitlines()[:-1] or [text]  # the last line may be cut off
            shown = "\n".join(written[:SHOWN_LINES]).rstrip()
            more = "\n..." * (len(written) > SHOWN_LINES)
            echo(f"--- what the model writes ---\n{shown}{more}\n---\n{line}")
            return
        faster = speed * plain.seconds / max(plain.new_tokens, 1)
        same = "the same text" if made.rows == plain.rows else "another text"
        echo(f"{line} {faster:6.2f}x  {same}")
