"""Read text and tokens from files, and cut them into training windows."""
