"""Facts about this computer: hardware, speed, current load, and process environment."""
