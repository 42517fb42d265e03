"""Decides when workers change their role, start or stop. Pure: the time is an argument."""
