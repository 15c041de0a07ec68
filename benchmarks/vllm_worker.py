"""One turn of vLLM for ``benchmarks/vllm.py``, run by an interpreter that has vLLM.

Reads a JSON object from stdin: model, dtype, prompts (lists of token ids), max_new_tokens,
batch_size, max_model_len and speculative (``speculative_config`` of ``vllm.LLM``, or null). In
batches of 1 each prompt is a request by itself; in larger ones all are submitted at once, and so
many run at a time. Those in ``warm`` come first and are not timed. The last line on
stdout is a JSON object: version, torch, seconds (of each call) and tokens (lists of new token ids)
of each prompt.
"""

import json
import os
import sys
import time

# The folder of this file has a vllm.py of its own, which is not the package; processes that vLLM
# starts import this file again.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path = [path for path in sys.path if os.path.abspath(path) != HERE]


def main() -> None:
    asked = json.load(sys.stdin)
    answer = os.dup(1)
    os.dup2(2, 1)  # what vLLM prints is no part of the answer

    import torch
    import vllm

    engine = vllm.LLM(
        model=asked["model"], dtype=asked["dtype"], max_num_seqs=asked["batch_size"],
        max_model_len=asked["max_model_len"], enable_prefix_caching=False,
        speculative_config=asked["speculative"],
    )  # fmt: skip
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=asked["max_new_tokens"])

    def generate(rows):
        begin = time.perf_counter()
        prompts = [{"prompt_token_ids": ids} for ids in rows]
        outputs = engine.generate(prompts, greedy, use_tqdm=False)
        return time.perf_counter() - begin, [list(one.outputs[0].token_ids) for one in outputs]

    generate(asked["warm"])
    prompts = asked["prompts"]
    calls = [[ids] for ids in prompts] if asked["batch_size"] == 1 else [prompts]
    found = [generate(rows) for rows in calls]
    result = {
        "version": vllm.__version__,
        "torch": torch.__version__,
        "seconds": [seconds for seconds, _ in found],
        "tokens": [tokens for _, rows in found for tokens in rows],
    }
    os.write(answer, ("\n" + json.dumps(result) + "\n").encode())


if __name__ == "__main__":
    main()
