"""The formats of tool calls, one module a family; `table` has them all."""
