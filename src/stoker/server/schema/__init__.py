"""Bodies that come in (pydantic) and answers that go out (msgspec)."""
