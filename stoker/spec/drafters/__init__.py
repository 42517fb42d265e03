"""Tape drafters, a file each; `stoker.spec.drafter` has their registry, `stoker.sched.drafting` their contract."""
