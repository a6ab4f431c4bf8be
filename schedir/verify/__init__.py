"""What is refused, and why: missing work, values used too early, ranks that wait for ever."""
