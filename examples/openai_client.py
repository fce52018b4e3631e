"""Talk to a running Pagemill with the official `openai` client.

pip install openai; start `pagemill serve`, then: python examples/openai_client.py
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("PAGEMILL_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("PAGEMILL_API_KEY", "EMPTY"),  # the client insists on one; the server only where one is set
)
model = client.models.list().data[0].id
print(f"model: {model}")

completion = client.completions.create(model=model, prompt="The capital of France is", max_tokens=16, temperature=0)
print(f"completion: {completion.choices[0].text!r}")

print("chat: ", end="")
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name three colours."}],
    max_completion_tokens=64,
    seed=1,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"top_k": 40, "repetition_penalty": 1.1},  # beyond the OpenAI API
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
    if chunk.usage:
        print(f"\nusage: {chunk.usage.prompt_tokens} in, {chunk.usage.completion_tokens} out")
