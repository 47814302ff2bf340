"""Documents in the client's process: found in a conversation, read from where they are, shown as text."""

from stoker.documents.document import Document

__all__ = ["Document"]
