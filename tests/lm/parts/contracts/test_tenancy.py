"""Tenancy: a tenant shares the engine while another one has sent a request of late."""

from holdfast.core.contract import Contract
from holdfast.core.types import WARMING
from holdfast.lm.parts.contracts.tenancy import RECENT, Tenancy
from tests.lm.parts.contracts.world import World

LOOSE = Contract(complete=1000.0)


def test_one_tenant_has_the_engine_to_itself():
    tenancy = Tenancy()
    for now in range(5):
        tenancy.note("own", float(now))
        assert not tenancy.is_shared(float(now))


def test_another_tenant_counts_until_it_has_been_silent_for_a_while():
    tenancy = Tenancy()
    tenancy.note("other", 10.0)
    tenancy.note("own", 20.0)
    assert tenancy.is_shared(10.0 + RECENT)
    assert not tenancy.is_shared(10.1 + RECENT)
    tenancy.note("own", 100.0)
    assert not tenancy.is_shared(100.0)


def test_each_of_two_tenants_sees_the_other():
    tenancy = Tenancy()
    tenancy.note("first", 0.0)
    tenancy.note("second", 1.0)
    assert tenancy.is_shared(1.0)
    tenancy.note("first", 2.0)
    assert tenancy.is_shared(2.0)


def test_the_first_requests_of_an_engine_are_nobodys():
    tenancy = Tenancy()
    tenancy.note(WARMING, 0.0)
    tenancy.note("own", 1.0)
    assert not tenancy.is_shared(1.0)


def test_a_tenant_that_is_alone_again_has_all_rows():
    world = World(max_sequences=4)
    world.add("plain", 10, 10, tenant="other")
    world.run()
    assert [world.add(str(number), 10, 10, LOOSE) for number in range(3)] == [True, True, False]
    world.run()
    world.clock.advance_to(world.clock.now + RECENT)
    assert [world.add(f"again {number}", 10, 10, LOOSE) for number in range(4)] == [True] * 4
    world.run()
    assert world.broken == {}
