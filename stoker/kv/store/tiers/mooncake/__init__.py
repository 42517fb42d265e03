"""The Mooncake tier: blocks in the RAM and on the SSDs of all workers of a cluster."""
