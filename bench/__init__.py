"""Benchmarks against what people run today. Never part of the tests."""
