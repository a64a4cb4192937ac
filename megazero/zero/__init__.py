"""The data-parallel engine's mechanism: flat buckets, the schedule that drives them, the optimizer over them."""
