"""Fault injection: training runs that are killed and stopped must end as if left alone."""
