"""Training of EAGLE-3 draft heads."""
