"""Read a config once: compose it, check it, and return typed settings."""
