"""Events of the runtime written as the two OpenAI routes answer, in chunks or whole."""
