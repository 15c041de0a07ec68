"""One engine of vLLM, run by an interpreter that has it.

Reads a JSON object from stdin: model, prompts (lists of token ids), max_new_tokens and speculative
(``speculative_config`` of ``vllm.LLM``, or null). Prompts are requests one after the other. The
last line on stdout is a JSON object: version, tokens (lists of new token ids), drafts (how many)
and accepted (at each position of a draft, from vLLM's metrics).
"""

import json
import os
import sys

#: Behind this, vLLM drafts no more.
ROOM = 16


def main() -> None:
    asked = json.load(sys.stdin)
    answer = os.dup(1)
    os.dup2(2, 1)  # what vLLM prints is no part of the answer

    import vllm

    longest = max(map(len, asked["prompts"])) + asked["max_new_tokens"]
    engine = vllm.LLM(
        model=asked["model"], dtype="float32", max_num_seqs=1, max_model_len=longest + ROOM,
        enable_prefix_caching=False, enforce_eager=True, disable_log_stats=False,
        speculative_config=asked["speculative"],
    )  # fmt: skip
    greedy = vllm.SamplingParams(
        temperature=0.0, max_tokens=asked["max_new_tokens"], ignore_eos=True
    )
    tokens = []
    for ids in asked["prompts"]:
        output = engine.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)
        tokens.append(list(output[0].outputs[0].token_ids))
    metrics = {metric.name: metric for metric in engine.get_metrics()}
    drafts = metrics.get("vllm:spec_decode_num_drafts")
    accepted = metrics.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    result = {
        "version": vllm.__version__,
        "tokens": tokens,
        "drafts": drafts and drafts.value,
        "accepted": accepted and list(accepted.values),
    }
    os.write(answer, ("\n" + json.dumps(result) + "\n").encode())


if __name__ == "__main__":
    main()
