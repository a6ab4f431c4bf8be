"""Facts about a program: which instruction waits for which, earliest starts, deadlocks, memory."""
