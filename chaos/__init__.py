"""Workers under random faults, and a checker of what their bodies wrote; see docs/contributing/fault-injection.md."""
