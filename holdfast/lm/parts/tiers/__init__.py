"""Tiers below the host tier: a local disk, and a service that engines share."""
