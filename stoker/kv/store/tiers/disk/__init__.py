"""The disk tier: one file per block, in a directory that several workers may share."""
