"""Workers under random faults, and a checker of what their bodies wrote down; see docs/chaos.md."""
