"""The inference engine: `from engine import LLM`. Knows nothing of Celery, HTTP or SQL."""

from engine.compression import KVCompression
from engine.config import EngineConfig
from engine.llm import LLM
from engine.request import FinishReason, RequestOutput, SamplingParams

__all__ = ["LLM", "EngineConfig", "FinishReason", "KVCompression", "RequestOutput", "SamplingParams"]
