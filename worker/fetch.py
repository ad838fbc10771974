"""Many messages in one round trip, each noted as unacknowledged by the broker itself as it leaves its list.

The transport reads one message, and only then notes it: a worker that dies in between takes it along. Here nothing is
off its list without being noted, whatever dies, and whatever the broker refuses for want of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST = 32
"""Messages in one round trip: it is short, and no worker has them all."""

_SCRIPT = """
local unacked, index = KEYS[1], KEYS[2]
local waiting = 0
for place = 3, #KEYS do waiting = waiting + redis.call('LLEN', KEYS[place]) end
local room = math.min(tonumber(ARGV[1]), math.ceil(waiting / 2))
local time = redis.call('TIME')
local now = time[1] .. '.' .. string.format('%06d', time[2])
local found = {}

local function noted(text)
  local whole, message = pcall(cjson.decode, text)
  if not whole or type(message) ~= 'table' or type(message.properties) ~= 'table' then return nil end
  local tag, delivery = message.properties.delivery_tag, message.properties.delivery_info
  if type(tag) ~= 'string' or type(delivery) ~= 'table' then return nil end
  if type(delivery.exchange) ~= 'string' or type(delivery.routing_key) ~= 'string' then return nil end
  local tail = ',' .. cjson.encode(delivery.exchange) .. ',' .. cjson.encode(delivery.routing_key) .. ']'
  local refused = redis.pcall('HSET', unacked, tag, '[' .. text .. tail)
  if type(refused) == 'table' and refused.err then return nil, refused end
  redis.call('ZADD', index, now, tag)
  return tag
end

for place = 3, #KEYS do
  while #found < room do
    local text = redis.call('LINDEX', KEYS[place], -1)
    if not text then break end
    local tag, refused = noted(text)
    if refused then
      if #found == 0 then return refused end
      return found
    end
    redis.call('RPOP', KEYS[place])
    table.insert(found, {place - 3, tag or '', text})
  end
end
return found
"""


@dataclass(frozen=True, slots=True)
class Taken:
    """A message, off its list."""

    place: int
    """Of its list among those that were asked for."""
    tag: str
    """Its delivery tag; empty if it has none, and so is noted nowhere."""
    text: bytes


def take(client: Any, unacked_key: str, index_key: str, lists: Sequence[str], most: int) -> list[Taken]:
    """At most `most` messages in the lists' order, the oldest first; half of those that wait, so others have some."""
    keys = [unacked_key, index_key, *lists]
    found = client.register_script(_SCRIPT)(keys=keys, args=[most])
    return [Taken(place, tag.decode(errors="replace"), text) for place, tag, text in found]
