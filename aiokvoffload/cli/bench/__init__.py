"""What the library costs, measured beside yardsticks in the same run."""
