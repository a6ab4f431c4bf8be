"""What a run will be, or was: Timelines, and what follows from them."""
