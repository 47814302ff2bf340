"""Constraints on text, compiled to automata over tokens."""
