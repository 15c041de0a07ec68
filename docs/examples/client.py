"""A client of OpenAI's API: python client.py MODEL [URL]

Needs ``pip install openai``, and a server: ``hf-spec serve MODEL --strategy prompt_lookup``. The
client needs no option, since the server's strategy is the default.
"""

import sys
import time
from collections.abc import Iterator

from openai import OpenAI


def stream(client: OpenAI, model: str, question: str, max_tokens: int = 200) -> Iterator[str]:
    """The parts of an answer, as the server sends them."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
    )
    for part in answer:
        if part.choices and part.choices[0].delta.content:
            yield part.choices[0].delta.content


def main(model: str, url: str = "http://localhost:8000/v1") -> str:
    client = OpenAI(base_url=url, api_key="none")
    start, text = time.perf_counter(), ""
    for part in stream(client, model, "Write a Python class for a binary tree, with comments."):
        print(part, end="", flush=True)
        text += part
    print(f"\n\n{len(text) / (time.perf_counter() - start):.0f} characters per second")
    return text


if __name__ == "__main__":
    main(*sys.argv[1:3])
