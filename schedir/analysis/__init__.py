"""What holds for a program: who waits for whom, how long that takes, and what is held meanwhile."""
