"""Options and reports that several commands share."""
