"""The control room: a page that shows and steers a running server."""
