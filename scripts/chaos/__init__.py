"""Training runs that are killed and stopped again and again must end as if nothing had happened."""
