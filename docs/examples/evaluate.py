"""The same scores in less time: python evaluate.py MODEL TASK [LIMIT]

Runs a task of lm-eval that generates, such as gsm8k, plainly and with prompt lookups. Needs
``pip install 'lm-eval[hf]'``. In bf16 and fp16 single answers can differ where two tokens tie.
"""

import sys
import time

import lm_eval

import hf_spec  # noqa: F401  (registers the strategies)


def evaluate(model: str, task, limit: int | None = None, **options) -> dict[str, dict]:
    """Scores and seconds, by strategy; ``options`` are those of ``lm_eval.simple_evaluate``."""
    found = {}
    for strategy in ("none", "prompt_lookup"):
        settings = {} if strategy == "none" else {"assistant_strategy": strategy}
        start = time.perf_counter()
        results = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": model, "dtype": "auto"},
            tasks=[task],
            limit=limit,
            gen_kwargs={"do_sample": False, **settings},
            **options,
        )
        [scores] = results["results"].values()
        found[strategy] = {
            "seconds": time.perf_counter() - start,
            "scores": {name: x for name, x in scores.items() if isinstance(x, float)},
            "answers": [row["resps"][0][0] for rows in results["samples"].values() for row in rows],
        }
    return found


if __name__ == "__main__":
    model, task, *limit = sys.argv[1:4]
    for strategy, found in evaluate(model, task, *map(int, limit)).items():
        print(f"{strategy}: {found['seconds']:.0f} s, {found['scores']}")
