"""GBNF: notation, lexemes, rules."""
