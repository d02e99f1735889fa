"""What a step costs: start(device), read(device) -> MemoryRecord."""
