"""A chat in the browser whose colors change with each forward pass: python chat.py MODEL [ADAPTER]

Needs ``pip install gradio``. Without an adapter it drafts with prompt lookups.
"""

import html
import re
import sys
from threading import Thread

import gradio
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_spec
from hf_spec.tools.demo import StepStreamer, pieces

COLORS = "#a9dce3", "#fbe29a"


def colored(texts: list[str]) -> str:
    """Parts of a text as HTML, with another background for each."""
    spans = []
    for order, text in enumerate(texts):
        inside = html.escape(text).replace("\n", "<br>")  # a blank line would end the HTML
        spans.append(f'<span style="color:#111;background:{COLORS[order % 2]}">{inside}</span>')
    return f'<div style="white-space:pre-wrap">{"".join(spans)}</div>'


def plain(shown: str) -> str:
    """The text of an answer that was shown in colors."""
    text = shown.partition("</div>")[0].replace("<br>", "\n")
    return html.unescape(re.sub(r"<[^>]+>", "", text))


def chat(model_name: str, adapter: str | None = None, max_new_tokens: int = 300):
    """The app; ``launch()`` starts it."""
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype="auto", device_map="auto")
    tok = AutoTokenizer.from_pretrained(model_name)
    settings = {"max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    if adapter:
        model.load_adapter(adapter)
        config = hf_spec.SpecConfig.from_pretrained(adapter, **settings)
    else:
        config = hf_spec.SpecConfig("prompt_lookup", **settings)

    def answer(message, history):
        messages = []
        for turn in history:
            text = turn["content"]
            text = text if isinstance(text, str) else text[0]["text"]  # the browser sends parts
            text = plain(text) if turn["role"] == "assistant" else text
            messages.append({"role": turn["role"], "content": text})
        messages.append({"role": "user", "content": message})
        inputs = tok.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        streamer = StepStreamer()
        found = {}

        def generate():
            found["out"] = model.generate(**inputs, generation_config=config, streamer=streamer)

        thread = Thread(target=generate)
        thread.start()
        while thread.is_alive():
            thread.join(timeout=0.1)
            yield colored(pieces(tok, list(streamer.steps)))
        if "out" not in found:
            raise gradio.Error("generate() failed: the terminal says why")
        stats = found["out"].spec_stats
        speed = stats.num_generated_tokens / stats.total_seconds
        tau = stats.tau
        yield (
            f"{colored(pieces(tok, streamer.steps))}\n\n"
            f"{speed:.1f} tokens per second, {tau:.2f} per forward pass (tau)"
        )

    # Answers are escaped above; sanitizing would take away the colors.
    chatbot = gradio.Chatbot(sanitize_html=False)
    return gradio.ChatInterface(answer, chatbot=chatbot, api_name="chat")


if __name__ == "__main__":
    chat(*sys.argv[1:3]).launch()
