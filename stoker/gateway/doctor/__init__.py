"""The cache doctor: says why each prompt token that was not cached had to be computed."""
