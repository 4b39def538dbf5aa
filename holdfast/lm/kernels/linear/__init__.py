"""Everything a decoder layer computes beside attention: products, norms, rotation, gates."""
