"""KV memory in integers: units, extents and pages, who holds them, and which are known by what they contain.

    Buddy     units of the arena, leased in powers of two
     Extents  blocks leased for KV, cut into pages of one size
      PagePool  pages by handle: held, cached or free

No torch here.
"""

from engine.memory.buddy import Buddy, OutOfUnits
from engine.memory.extents import Extents, Move, Page
from engine.memory.pages import OutOfPages, PagePool
from engine.memory.prefix import page_hash, root_hash

__all__ = [
    "Buddy",
    "Extents",
    "Move",
    "OutOfPages",
    "OutOfUnits",
    "Page",
    "PagePool",
    "page_hash",
    "root_hash",
]
