"""Loggers: what conf/logger names. Each shows the same of a run."""
