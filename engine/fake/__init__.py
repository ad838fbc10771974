"""A model without weights, and its parts: what tests of everything around a model stand on."""

from engine.fake.model import FakeModel, fake_token, is_fake, load_fake
from engine.fake.storage import FakeStorage
from engine.fake.text import END_ID, fake_text

__all__ = ["END_ID", "FakeModel", "FakeStorage", "fake_text", "fake_token", "is_fake", "load_fake"]
