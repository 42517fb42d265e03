"""Device functions, one file each: the plain-torch reference, and beside it the Triton kernel that is tested against
it."""
