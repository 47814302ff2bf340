"""Images in the client's process: read from where they are, checked, decoded, turned upright and shrunk."""

from stoker.images.image import Image, ImageReport

__all__ = ["Image", "ImageReport"]
