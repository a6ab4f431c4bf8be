"""Parameters of a rank: gradient buffers, buckets, shards, main copies, tied weights, versions."""
