"""A service that wants text: it submits jobs and goes its way. It needs nothing of Headrace but the `headrace` package.

Usage: python demo_producer.py API_URL MODEL MAX_TOKENS. Prints one line of JSON for each job.
"""

from __future__ import annotations

import json
import sys

from headrace import Client

PROMPTS = (
    "Why is the sky blue?",
    "Write one sentence about a river that turns a mill wheel.",
    "What is a message queue good for?",
    "Name three fruits that are red.",
    "Explain photosynthesis to a child in two sentences.",
    "Give me a title for a story about a lighthouse keeper.",
    "How do I boil an egg?",
    "What is the difference between a lake and a sea?",
    "Write a two-line poem about rain.",
    "Why do cats purr?",
    "What does a database transaction guarantee?",
    "Suggest a name for a small bakery.",
    "How many legs has a spider?",
    "Say good morning in three languages.",
    "What should I pack for a day in the mountains?",
    "Finish the sentence: The best thing about trains is",
)


def main() -> None:
    api_url, model, max_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with Client(api_url) as client:
        for prompt in PROMPTS:
            job = client.submit(
                messages=[{"role": "user", "content": prompt}], model=model, max_tokens=max_tokens, temperature=0
            )
            print(json.dumps({"id": job.id, "prompt": prompt}), flush=True)


if __name__ == "__main__":
    main()
