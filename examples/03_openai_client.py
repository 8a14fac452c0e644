"""Any OpenAI client works: point its base URL at a running server (`branchline serve`).

python examples/03_openai_client.py [http://127.0.0.1:8000/v1]
"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
print(f"model: {model}")

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name three colours."}],
    temperature=0,
    max_tokens=32,
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

# n answers are n forks of one prompt: it is computed once.
several = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Say hello."}], temperature=0.9, seed=1, max_tokens=16, n=3
)
for choice in several.choices:
    print(f"{choice.index}: {(choice.message.content or '').strip()}")
assert several.usage is not None
print(f"{several.usage.prompt_tokens} prompt tokens, {several.usage.completion_tokens} generated")
