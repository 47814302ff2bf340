"""OpenAI's Responses API: bodies, items, stored responses, events, HTTP and WebSocket."""
