"""Invariants of the block pools: free + cached + used = total in each tier, and no block is owned twice unshared."""

from collections import Counter

from holdfast.lm.parts.tiers.planner import TierPart


def check_scheduler(scheduler, reserved=()):
    """Raise RuntimeError if a block of a scheduler's pool is lost, or owned twice without being shared.

    `reserved` is as for `check_pool`; what is filled from lower tiers need not be in it.
    """
    tables = [entry.cache.blocks for entry in scheduler._entries.values()]
    check_pool(scheduler._queues.pool, tables, [*reserved, *filled_from_below(scheduler)])


def blocks_below(part):
    """The account of the blocks in the tiers of a part, beside which there may be one of states."""
    return getattr(part.lower, "_blocks", part.lower)


def filled_from_below(scheduler):
    """The blocks of the host that are being filled from lower tiers."""
    lowers = [blocks_below(part) for part in scheduler.parts if isinstance(part, TierPart)]
    return [arrival.hosts[digest] for lower in lowers for digest, arrival in lower._arriving.items()]


def check_pool(pool, tables, reserved=()):
    """Raise RuntimeError unless these block tables, and they alone, account for every block that is used.

    `reserved` are blocks of the host tier that are being filled from elsewhere than the device.
    """
    owners, digests, swapping_out = pool._owners, pool._digests, pool.copies.swapping_out
    check_owners(owners, tables)
    check_index(pool._index)
    if {copy for _, copies in pool.copies._swap_outs for copy in copies} != set(swapping_out.items()):
        raise RuntimeError("a block is pinned without a copy under way")
    idle = [*pool._idle.retained.blocks, *pool._idle.reclaimable]
    idle += [block for block in swapping_out if not owners[block]]
    unowned = [block for block, count in enumerate(owners) if not count]
    lent = range(pool.num_blocks - pool.lent, pool.num_blocks)
    if sorted((*pool._free, *idle, *lent)) != unowned or len(idle) != pool.cached:
        raise RuntimeError("a block is lost, or is in two of the states free, cached, owned and lent")
    if len(pool._free) + pool.cached + pool.used + pool.lent != pool.num_blocks:
        raise RuntimeError("free + cached + used + lent is not the total")
    cached = [block for block, digest in enumerate(digests) if digest is not None]
    if not {*idle, *swapping_out} <= {*cached} or not {*cached}.isdisjoint(pool._free):
        raise RuntimeError("a block is idle or being copied but is not cached, or is free and cached at once")
    if any(count > 1 and digests[block] is None for block, count in enumerate(owners)):
        raise RuntimeError("a block has several owners, but is not cached")
    if pool.host is not None:
        check_host(pool.host, [*swapping_out.values(), *reserved])


def check_owners(counted, tables):
    """Raise RuntimeError unless each block stands in as many of these block tables as it counts owners."""
    owners = [0] * len(counted)
    for table in tables:
        if len(set(table)) != len(table):
            raise RuntimeError(f"a block stands twice in one table: {table}")
        for block in table:
            owners[block] += 1
    for block, pair in enumerate(zip(owners, counted, strict=True)):
        if pair[0] != pair[1]:
            raise RuntimeError(f"block {block} stands in {pair[0]} tables, but counts {pair[1]} owners")


def check_index(index):
    """Raise RuntimeError unless digests and cached blocks correspond one to one."""
    cached = {block: digest for block, digest in enumerate(index.digests) if digest is not None}
    if cached != {block: digest for digest, block in index.blocks.items()} or len(cached) != len(index.blocks):
        raise RuntimeError("a cached block is not found by its digest, or a digest leads to another block")


def check_host(host, reserved):
    """Raise RuntimeError unless free + reserved + cached = total on the host, and no block is in two states."""
    check_index(host._index)
    states = [*host._free, *reserved, *host._retained.blocks, *host._duplicates, *host._held]
    if sorted(states) != list(range(host.ready)):
        raise RuntimeError(f"blocks of the host tier are lost or in two states: {sorted(states)}")
    if len(host._index.blocks) != len(host._retained.blocks) + len(host._duplicates) + len(host._held):
        raise RuntimeError("a block of the host tier is retained, a duplicate or held, but is not cached")
    if any(hold.holders < 1 for hold in host._held.values()):
        raise RuntimeError("a block of the host tier is held by nobody")


def check_lower(scheduler):
    """Raise RuntimeError unless each block that is held or reserved behind the host tier is so for a job or a fetch."""
    part = scheduler.part(TierPart)
    lower = blocks_below(part)
    jobs = [book.job for book in lower._books.values()]
    blocks = {(job.tier, job.kind): [] for job in jobs}
    for job in jobs:
        blocks[job.tier, job.kind] += job.blocks
    written, read = blocks.get(("disk", "write"), []), blocks.get(("disk", "read"), [])
    if lower.disk is not None:
        check_host(lower.disk, [block.slot for block in written])
        if sorted(lower.disk._held) != sorted(block.slot for block in read):
            raise RuntimeError("a block of the disk is held, and not for a job that reads it, or the other way round")
    arriving = sorted(arrival.hosts[digest] for digest, arrival in lower._arriving.items())
    if arriving != sorted(block.host for job in jobs if job.kind == "read" for block in job.blocks):
        raise RuntimeError("a block of the host is reserved for no job that fills it")
    held = [block for fetch in (*part._waiting.values(), *part._arrived.values()) for block in fetch.held]
    writing = [block.host for job in jobs if job.kind == "write" for block in job.blocks]
    holders = Counter({block: hold.holders for block, hold in lower._host._held.items()})
    if len(held) != lower._held or Counter([*held, *writing]) != holders:
        raise RuntimeError("a block of the host is held for nobody, or not held for somebody")
