from __future__ import annotations
from cli.checks.finding import Finding
from settings import Settings
def check_model(settings: Settings) -> list[Finding]:
    return []
