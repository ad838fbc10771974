"""The job database: what was asked, who works on it, how it ended."""

from ledger.ledger import Ledger

__all__ = ["Ledger"]
