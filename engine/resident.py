"""From a configuration to a resident model."""

from __future__ import annotations

from engine.batch import Model
from engine.config import EngineConfig
from engine.fake import is_fake, load_fake


def load_resident(config: EngineConfig) -> Model:
    """Load the model that the configuration names. Only a real one needs torch."""
    if is_fake(config.model):
        return load_fake(config.model)
    from engine.model import load_model

    return load_model(config)
