"""What the KV cache holds, and for whom. Pure: no tensor, no device; blocks are numbers here."""
