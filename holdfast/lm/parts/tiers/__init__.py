"""Tiers: state that a local disk, or a service that engines share, keeps behind the host tier."""
