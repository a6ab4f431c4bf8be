"""The parameters of a rank: buffers, buckets, shards, main and tied parameters, versions."""
