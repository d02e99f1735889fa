"""Fault injection: training runs that are killed and stopped at random moments, then resumed."""
