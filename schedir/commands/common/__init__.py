"""Define options and reports that several commands share."""
