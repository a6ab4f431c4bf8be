"""The parameters of a rank: gradient buffers, buckets, shards, main parameters, ties, versions."""
