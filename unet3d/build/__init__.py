"""From a config to objects: nothing above hands a config on, nothing below sees one."""
