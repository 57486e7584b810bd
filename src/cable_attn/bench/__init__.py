"""Speed and memory, always beside the peers and behind a correctness gate."""
