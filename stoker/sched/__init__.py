"""The pure scheduler: which tokens each step computes."""
