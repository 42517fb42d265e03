"""Dashboards and alerts, made from the metrics that the code exports."""
