"""What this computer is, how fast it is, what it is doing, and the environment of a process."""
