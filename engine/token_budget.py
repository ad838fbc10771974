"""How many tokens a step computes, and how many of them may be prompts. No torch here."""

from __future__ import annotations

RECOVER_STEPS = 64
"""Steps without a shortage of memory after which a halved budget doubles again."""


class TokenBudget:
    """`most` tokens in a step; prompts get a share of them while others decode, so that these aren't slowed down."""

    def __init__(self, most: int, prefill_share: float = 1.0) -> None:
        self.most = most
        self.tokens = most
        """Of the next step."""
        self._prefill_share = prefill_share
        self._good_steps = 0

    def prompts(self, decoding: int) -> int:
        """Tokens of prompts in a step in which so many requests decode: their share, or all if nobody does."""
        if not decoding:
            return self.tokens
        return max(0, min(max(1, int(self.tokens * self._prefill_share)), self.tokens - decoding))

    def least(self, decoding: int) -> int:
        """What a prompt has to get of the next step, or it isn't admitted yet."""
        return max(1, self.prompts(decoding) // 8)

    def halve(self) -> None:
        """Memory was short: smaller steps from now on."""
        self.tokens = max(1, self.tokens // 2)
        self._good_steps = 0

    def recover(self) -> None:
        """A step went well; after some of them the budget grows again."""
        if self.tokens < self.most:
            self._good_steps += 1
            if self._good_steps >= RECOVER_STEPS:
                self.tokens = min(self.most, 2 * self.tokens)
                self._good_steps = 0


def share(budget: int) -> int:
    """What one long request may take of a budget that others want too."""
    return (budget + 1) // 2
