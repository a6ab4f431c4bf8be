"""What a run will be, or was: Timelines, why ranks are idle, and what would shorten a step."""
