"""Conversations: from messages to a prompt."""
