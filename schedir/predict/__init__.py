"""Simulate programs, find the causes of idle time, and simulate changes that shorten a step."""
