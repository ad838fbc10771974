"""Choosing a token without sorting the vocabulary: every cut and the draw are searches for a place in its order.

The order is the likeliest first, equal logits by id. A token's key is the bits of (greatest logit - logit) /
temperature, a number of 0 or more, whose bits grow with it. Where the tokens up to some key hold a given count or
weight is found bit by bit, a pass over the row for each two. Weights are summed in float64, so that the place doesn't
depend on the order of the sum.

Where neither cut nor draw leaves the first HEAD tokens the reference needs no more of the order than those, and a draw
without any cut that falls behind them goes on by id: so does this.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITE_KEY: tl.constexpr = tl.constexpr(0x7F800000)
"""Key of a logit of -inf: such tokens are never drawn."""


@triton.jit
def _mix(z):
    """The finaliser of SplitMix64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _uniform(seed, position):
    """`kernels.sampling.uniform`."""
    z = _mix(seed.to(tl.uint64)) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    return (_mix(z) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _keys(logits, i, vocab, greatest, temperature):
    """Scaled distances [BLOCK] from the greatest logit, and their keys; behind the row, greater than any."""
    inside = i < vocab
    x = tl.load(logits + i, mask=inside, other=float("-inf"))
    distance = (greatest - x) / temperature
    distance = tl.where(inside & (distance >= 0), tl.abs(distance), float("inf"))  # -0 has a key below that of 0
    return distance, distance.to(tl.int32, bitcast=True)


@triton.jit
def _weight(distance):
    """Of a token, relative to the likeliest."""
    return tl.exp(-distance).to(tl.float64)


@triton.jit
def _weight_of_key(key):
    return _weight(key.to(tl.float32, bitcast=True))


@triton.jit
def _greatest(logits, vocab, BLOCK: tl.constexpr):
    """The greatest logit and the lowest id that has it."""
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits + i, mask=i < vocab, other=float("-inf"))
        above = x > top
        top = tl.where(above, x, top)
        place = tl.where(above, i, place)
    greatest = tl.max(top, 0)
    return greatest, tl.min(tl.where(top == greatest, place, 2147483647), 0)


@triton.jit
def _measure(logits, vocab, greatest, temperature, limit, BLOCK: tl.constexpr):
    """Count and weight of the tokens whose key is below `limit`."""
    count = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        distance, key = _keys(logits, start + tl.arange(0, BLOCK), vocab, greatest, temperature)
        below = key < limit
        count += below.to(tl.int32)
        weight += tl.where(below, _weight(distance), 0.0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _search(
    logits, vocab, greatest, temperature, target, STRICT: tl.constexpr, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """The least key up to which the tokens measure `target` or more; with STRICT, more than it."""
    pivot = tl.arange(0, 4)
    low = tl.zeros([4], tl.int32)
    for step in range(16):
        shift = 30 - 2 * step
        sums = tl.zeros([BLOCK, 4], tl.float64)
        for start in range(0, vocab, BLOCK):
            distance, key = _keys(logits, start + tl.arange(0, BLOCK), vocab, greatest, temperature)
            worth = tl.full([BLOCK], 1.0, tl.float64)
            if not BY_COUNT:
                worth = _weight(distance)
            below = (key >> shift)[:, None] <= ((low >> shift) + pivot)[None, :]
            sums += tl.where(below & (key < INFINITE_KEY)[:, None], worth[:, None], 0.0)
        measured = tl.sum(sums, 0)
        short = measured < target
        if STRICT:
            short = measured <= target
        low += tl.sum((short & (pivot < tl.where(step == 0, 1, 3))).to(tl.int32), 0) << shift
    return tl.max(low, 0)


@triton.jit
def _pick(logits, vocab, greatest, temperature, key, rank, BLOCK: tl.constexpr):
    """The id of the token number `rank`, from 0, of those that have this key; the last if there are fewer."""
    seen = tl.zeros([1], tl.int64)
    found = tl.zeros([1], tl.int32)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        _, keys = _keys(logits, i, vocab, greatest, temperature)
        equal = (keys == key) & (i < vocab)
        place = seen + tl.cumsum(equal.to(tl.int64), 0) - 1
        found = tl.maximum(found, tl.max(tl.where(equal & (place <= rank), i, 0), 0))
        seen += tl.sum(equal.to(tl.int64), 0)
    return tl.max(found, 0)


@triton.jit
def _pick_by_id(logits, vocab, greatest, temperature, limit, point, BLOCK: tl.constexpr):
    """The first id at which the weight of the tokens with keys of `limit` or more exceeds `point`."""
    passed = tl.zeros([1], tl.float64)
    found = tl.full([1], 2147483647, tl.int32)
    last = tl.zeros([1], tl.int32)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        distance, key = _keys(logits, i, vocab, greatest, temperature)
        mine = (key >= limit) & (key < INFINITE_KEY)
        mass = passed + tl.cumsum(tl.where(mine, _weight(distance), 0.0), 0)
        found = tl.minimum(found, tl.min(tl.where(mine & (mass > point), i, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(mine, i, 0), 0))
        passed = tl.max(mass, 0) + tl.zeros([1], tl.float64)
    return tl.max(tl.where(found < vocab, found, last), 0)


@triton.jit
def sample_kernel(
    logits, chosen, temperature, limit, top_k, top_p, seed, position, vocab, stride,
    HEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program s: one row. A temperature of 0 takes the lowest id of the greatest logit.

    If the greatest logit is no finite number, the token is -1: `kernels.sampling.NO_TOKEN`.

    What is kept are the tokens with keys below `edge`, and of those with the key `edge` the first `extra` by id.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    heat = tl.load(temperature + row).to(tl.float32)
    greatest, token = _greatest(logits, vocab, BLOCK)
    token = tl.where(tl.abs(greatest) < float("inf"), token, -1)
    if (heat > 0) & (token >= 0):
        edge = tl.load(limit + row)
        most = tl.load(top_k + row)
        share = tl.load(top_p + row)
        is_open = (most >= vocab) & (share >= 1) & (edge == INFINITE_KEY)
        extra = most * 0
        kept, mass = _measure(logits, vocab, greatest, heat, edge, BLOCK)
        if most < kept:
            edge = _search(logits, vocab, greatest, heat, most.to(tl.float64), False, True, BLOCK)
            kept, mass = _measure(logits, vocab, greatest, heat, edge, BLOCK)
            extra = most - kept
            mass += extra.to(tl.float64) * _weight_of_key(edge)
        if share < 1:
            target = share * mass
            key = _search(logits, vocab, greatest, heat, target, False, False, BLOCK)
            if key <= edge:
                before, lighter = _measure(logits, vocab, greatest, heat, key, BLOCK)
                through, _ = _measure(logits, vocab, greatest, heat, key + 1, BLOCK)
                equal = tl.where(key == edge, extra, through - before)
                reach = tl.ceil((target - lighter) / _weight_of_key(key)).to(tl.int32)
                extra = tl.minimum(tl.maximum(reach, 1), equal)
                edge = key
                mass = lighter + extra.to(tl.float64) * _weight_of_key(key)
        point = _uniform(tl.load(seed + row), tl.load(position + row)) * mass
        tail = edge
        head = mass
        if is_open & (vocab > HEAD):
            tail = _search(logits, vocab, greatest, heat, tl.full([], HEAD, tl.float64), False, True, BLOCK)
            _, head = _measure(logits, vocab, greatest, heat, tail, BLOCK)
        if is_open & (point >= head):
            token = _pick_by_id(logits, vocab, greatest, heat, tail, point - head, BLOCK)
        else:
            key = tl.minimum(_search(logits, vocab, greatest, heat, point, True, False, BLOCK), edge)
            before, lighter = _measure(logits, vocab, greatest, heat, key, BLOCK)
            rank = tl.maximum((point - lighter) / _weight_of_key(key), 0.0).to(tl.int32)
            rank = tl.where(key == edge, tl.minimum(rank, extra - 1), rank)
            if rank >= 0:
                token = _pick(logits, vocab, greatest, heat, key, rank, BLOCK)
    tl.store(chosen + row, token)
