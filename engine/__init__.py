"""The inference engine: `from engine import LLM`. Knows nothing of Celery, HTTP or SQL."""
