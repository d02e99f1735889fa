"""Put packages to work for one command each."""
