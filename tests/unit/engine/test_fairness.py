from __future__ import annotations

from engine.fairness import FairShare


def next_of(shares: FairShare, *tenants: str) -> str:
    return min(tenants, key=shares.time)


def test_tokens_are_shared_by_weight() -> None:
    shares = FairShare({"gold": 3.0})
    served = dict.fromkeys(["gold", "plain"], 0)
    for tenant in served:
        shares.enter(tenant)
    for _ in range(400):
        tenant = next_of(shares, *served)
        shares.begin(tenant, 10)
        served[tenant] += 10
    assert served == {"gold": 3000, "plain": 1000}


def test_a_pause_earns_no_credit() -> None:
    shares = FairShare()
    shares.enter("steady")
    for _ in range(100):
        shares.begin("steady", 10)
    shares.enter("back")
    turns = []
    for _ in range(20):
        turns.append(next_of(shares, "back", "steady"))
        shares.begin(turns[-1], 10)
    assert 9 <= turns.count("back") <= 11


def test_a_pause_cancels_no_debt() -> None:
    shares = FairShare()
    for tenant in ("a", "b"):
        shares.enter(tenant)
    shares.begin("a", 500)
    shares.leave("a")
    shares.begin("b", 10)
    shares.enter("a")
    assert shares.time("a") == 500.0


def test_who_waited_all_along_keeps_what_is_due() -> None:
    shares = FairShare()
    shares.enter("waits")
    shares.enter("served")
    for _ in range(10):
        shares.begin("served", 10)
    shares.enter("waits")
    assert shares.time("waits") == 0.0


def test_tenants_that_mean_nothing_any_more_are_forgotten() -> None:
    shares = FairShare()
    for number in range(5000):
        tenant = str(number)
        shares.enter(tenant)
        shares.leave(tenant)
        shares.begin(tenant, 1)
    assert len(shares._time) < 2100
