"""What operators see of a gateway: series over time, the latest requests and sessions, the reuse of prefixes."""
