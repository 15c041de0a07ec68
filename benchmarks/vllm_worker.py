"""One turn of vLLM for ``benchmarks/vllm.py``, run by an interpreter that has vLLM.

Reads a JSON object from stdin: model, dtype, prompts (lists of token ids), max_new_tokens and
speculative (``speculative_config`` of ``vllm.LLM``, or null). Each prompt is a request by itself;
those in ``warm`` come first and are not timed. The last line on stdout is a JSON object: version,
torch, seconds and tokens (lists of new token ids) of each prompt.
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

    longest = max(map(len, asked["prompts"])) + asked["max_new_tokens"]
    engine = vllm.LLM(
        model=asked["model"], dtype=asked["dtype"], max_num_seqs=1, max_model_len=longest + 1,
        enable_prefix_caching=False, speculative_config=asked["speculative"],
    )  # fmt: skip
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=asked["max_new_tokens"])

    def generate(ids):
        begin = time.perf_counter()
        output = engine.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)
        return time.perf_counter() - begin, list(output[0].outputs[0].token_ids)

    for ids in asked["warm"]:
        generate(ids)
    found = [generate(ids) for ids in asked["prompts"]]
    result = {
        "version": vllm.__version__,
        "torch": torch.__version__,
        "seconds": [seconds for seconds, _ in found],
        "tokens": [tokens for _, tokens in found],
    }
    os.write(answer, ("\n" + json.dumps(result) + "\n").encode())


if __name__ == "__main__":
    main()
